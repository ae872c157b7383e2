"""Exact top-k against Python's sort, with NaN behind every row's end."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tetrad.ops import topk_indices

reference = import_module("tetrad.ops.topk_indices.reference")

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, -1.0]


def expected_set(values: list[float], k: int) -> list[int]:
    """The first k in the order: numbers before NaN, larger before smaller, lower column first. Ascending."""
    order = sorted(
        range(len(values)), key=lambda j: (math.isnan(values[j]), 0 if math.isnan(values[j]) else -values[j], j)
    )
    return sorted(order[:k])


def check(rows: list[list[float]], k: int, extra_width: int = 3, beyond: float = math.nan) -> None:
    width = max((len(row) for row in rows), default=0) + extra_width
    logits = torch.full((len(rows), width), beyond)
    for index, row in enumerate(rows):
        logits[index, : len(row)] = torch.tensor(row)
    ends = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    guard = 11
    memory = torch.full((len(rows) * k + 2 * guard,), -12345, dtype=torch.int32)
    out = memory[guard : guard + len(rows) * k].view(len(rows), k)
    before = logits.clone()
    assert topk_indices(logits, ends, k, out=out) is out
    for index, row in enumerate(rows):
        chosen = expected_set(row, k)
        assert out[index].tolist() == chosen + [-1] * (k - len(chosen)), f"row {index}"
    assert (memory[:guard] == -12345).all()
    assert (memory[guard + len(rows) * k :] == -12345).all()
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), "the scores were changed"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=32)), max_size=40), max_size=5),
    st.integers(1, 50),
    st.integers(0, 3),
    st.sampled_from([math.nan, math.inf, 0.0]),
)
def test_equals_a_sort(rows, k, extra_width, beyond):
    check(rows, k, extra_width, beyond)


@pytest.mark.parametrize("k", [1, 63, 64, 65, 512])
def test_every_length(k):
    """Lengths around k, a page and a block; few distinct values, so that ties are cut by k in most rows."""
    generator = torch.Generator().manual_seed(k)
    lengths = [0, 1, k - 1, k, k + 1, 63, 64, 65, 255, 256, 257]
    check([torch.randint(-3, 4, (length,), generator=generator).float().tolist() for length in lengths], k)


def test_ties_go_to_the_lowest_column():
    """Also between the two zeros, which compare equal though their bits do not."""
    check([[0.0] * 9, [-0.0, 0.0] * 5, [0.0, -0.0] * 5, [math.nan] * 9, [-math.inf] * 9], 4)


def test_nan_only_when_nothing_else_is_left():
    """NaN would otherwise be the largest, and one broken key would be attended by every query."""
    negative_nan = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
    row = torch.cat((negative_nan, torch.tensor([math.nan, -math.inf, 5.0, math.nan, -3.4e38])))
    ends = torch.tensor([6], dtype=torch.int32)
    for k, chosen in ((1, [3]), (2, [3, 5]), (3, [2, 3, 5]), (4, [0, 2, 3, 5]), (5, [0, 1, 2, 3, 5])):
        assert topk_indices(row.unsqueeze(0), ends, k).tolist() == [chosen]


def test_neighbouring_numbers_are_told_apart():
    """Scores that differ in the last bit, of either sign, also below the normal numbers."""
    for base in (1.0, -1.0, 1e-40, -1e-40, 65504.0):
        bits = torch.tensor([base]).view(torch.int32) + torch.arange(50, dtype=torch.int32)
        check([bits.view(torch.float32).tolist(), bits.flip(0).view(torch.float32).tolist()], 7)


@pytest.mark.parametrize("chunk_keys", [1, 1000])
def test_chunks_and_company_change_nothing(chunk_keys, monkeypatch):
    logits = torch.randint(-20, 20, (37, 300), generator=torch.Generator().manual_seed(1)).float()
    ends = torch.arange(37, dtype=torch.int32) * 8
    together = topk_indices(logits, ends, 20)
    monkeypatch.setattr(reference, "_CHUNK_KEYS", chunk_keys)
    assert torch.equal(topk_indices(logits, ends, 20), together)
    for row in (0, 1, 5, 36):
        alone = topk_indices(logits[row : row + 1, : max(1, int(ends[row]))], ends[row : row + 1], 20)
        assert torch.equal(alone, together[row : row + 1])


def test_a_million_columns():
    """The place of a column is part of the key that is sorted: it must not run into the value's bits."""
    logits = torch.zeros(1, 1 << 20)
    logits[0, [5, 700_000, (1 << 20) - 1]] = torch.tensor([1.0, 2.0, 1.5])
    got = topk_indices(logits, torch.tensor([1 << 20], dtype=torch.int32), 2048)
    assert got.tolist() == [[*range(2046), 700_000, (1 << 20) - 1]]


def test_empty_shapes():
    """No rows, no columns, and a k beyond the width: each place is -1."""
    assert topk_indices(torch.empty(0, 7), torch.empty(0, dtype=torch.int32), 3).shape == (0, 3)
    assert topk_indices(torch.empty(2, 0), torch.zeros(2, dtype=torch.int32), 3).tolist() == [[-1] * 3] * 2


def test_rows_may_be_apart():
    """Scores in a wider buffer, chosen places into a wider buffer."""
    logits, ends = torch.randn(5, 40), torch.tensor([40, 3, 0, 17, 39], dtype=torch.int32)
    wide = torch.full((5, 64), math.inf)
    wide[:, :40] = logits
    out = torch.full((5, 16), 99, dtype=torch.int32)
    topk_indices(wide[:, :40], ends, 9, out=out[:, :9])
    assert torch.equal(out[:, :9], topk_indices(logits, ends, 9))
    assert (out[:, 9:] == 99).all()


def test_waits_for_no_value():
    """Runs on tensors without values, so it cannot synchronise a device."""
    out = topk_indices(torch.empty(5, 40, device="meta"), torch.empty(5, dtype=torch.int32, device="meta"), 7)
    assert out.shape == (5, 7)
