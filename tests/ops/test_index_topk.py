"""Scoring and choosing together: the row budget, what is never scored, and how much memory is asked for."""

from __future__ import annotations

import weakref
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from tests.ops.indexer_cases import logits_fp64, make_case
from torch.utils._python_dispatch import TorchDispatchMode

from tetrad.ops import index_topk, indexer_logits, plan_indexer, topk_indices
from tetrad.ops.index_topk import rows_per_chunk

module = import_module("tetrad.ops.index_topk")

ENDS = [[300, 301, 302], [90], list(range(240, 275)), [64], [0, 1], [257]]


class Ledger(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, and the most that were alive at once."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        # views of these are no new memory
        self.known = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.enter(tensor.untyped_storage())
        return result

    def enter(self, storage: torch.UntypedStorage) -> None:
        identity, size = storage._cdata, storage.nbytes()
        if identity not in self.known:
            self.known.add(identity)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self.leave, identity, size)

    def leave(self, identity: int, size: int) -> None:
        self.known.discard(identity)
        self.alive -= size


@pytest.mark.parametrize(
    ("rows", "width", "budget", "chunk"),
    [
        (16_384, 32_768, 2048 << 20, 16_384),
        (16_385, 32_768, 2048 << 20, 16_384),
        (100_000, 65_536, 2048 << 20, 8192),
        (100_000, 131_072, 2048 << 20, 4096),
        (100_000, 262_144, 2048 << 20, 2048),
        (100_000, 262_144, 0, 100_000),
        (1000, 0, 1, 1000),
        (1000, 10, 40 * 999, 896),
        (1000, 10, 40 * 1000, 1000),
        (1000, 10, 40 * 128, 128),
        (1000, 10, 40 * 127, 64),
        (1000, 10, 40 * 64, 64),
        (1000, 10, 40 * 63, 32),
        (1000, 10, 40, 1),
        (1000, 10, 39, 1),
        (1, 10, 1, 1),
        (0, 10, 1, 1),
    ],
)
def test_rows_per_chunk(rows, width, budget, chunk):
    """All rows, else a multiple of 128, else a power of two, and never under one row."""
    assert rows_per_chunk(rows, width, budget) == chunk


@pytest.mark.parametrize("dtype", ["fp4", "fp8", "bf16", "fp32"])
@pytest.mark.parametrize("budget", [0, 1, 302 * 4 * 5, 2048 << 20])
def test_equals_the_two_ops(dtype, budget):
    """The budget cuts the rows anywhere, also inside a request; the choice may not notice."""
    case = make_case(dtype, 4, 32, ENDS, padding=2)
    logits = indexer_logits(*case.arguments, width=case.width)
    expected = topk_indices(logits, case.visible_end, 50)
    plan = plan_indexer(case.row_request, case.visible_end, width=case.width)
    out = torch.full((case.q.shape[0], 50), 77, dtype=torch.int32)
    got = index_topk(*case.arguments, 50, width=case.width, logits_budget_bytes=budget, plan=plan, out=out)
    assert got is out
    assert torch.equal(got, expected)
    assert torch.equal(index_topk(*case.arguments, 50, width=case.width, logits_budget_bytes=budget), expected)


def test_padding_chooses_nothing():
    """Rows of request -1 may hold NaN in all that is theirs; the rows beside them choose what they chose before."""
    case = make_case("fp32", 4, 32, ENDS, padding=3)
    expected = index_topk(*case.arguments, 50, width=case.width)
    padding = case.row_request < 0
    assert (expected[padding] == -1).all()
    case.q[padding] = float("nan")
    case.weights[padding] = float("nan")
    assert torch.equal(index_topk(*case.arguments, 50, width=case.width), expected)


def test_chooses_what_scores_best_in_fp64():
    """Against the oracle: no chosen entry scores less than one that was left out, beyond rounding."""
    case = make_case("fp4", 32, 128, ENDS, spread=1)
    k = 40
    got = index_topk(*case.arguments, k, width=case.width)
    for row, values in enumerate(logits_fp64(case)):
        chosen = [j for j in got[row].tolist() if j >= 0]
        assert len(chosen) == len(set(chosen)) == min(k, len(values))
        left = [values[j] for j in range(len(values)) if j not in set(chosen)]
        if left and chosen:
            assert min(values[j] for j in chosen) >= max(left) - 1e-5 * max(abs(values))


@pytest.mark.parametrize("width", [0, 1, 7, 8])
def test_nothing_is_scored_when_all_are_chosen(width, monkeypatch):
    """With width <= k no page may be read: the tables here point nowhere."""
    case = make_case("fp4", 4, 32, [[width], [max(0, width - 1)]], padding=1, width=width)
    case = replace(case, block_tables=torch.full_like(case.block_tables, -5))

    def refuse(*args, **options):
        raise AssertionError("was scored")

    monkeypatch.setattr(module, "indexer_logits", refuse)
    got = index_topk(*case.arguments, 8, width=width, out=torch.full((3, 8), 99, dtype=torch.int32))
    for row, end in enumerate(case.visible_end.tolist()):
        assert got[row].tolist() == [*range(end), *[-1] * (8 - end)]


def peak_bytes(
    rows: int, width: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[tuple[int, int]]]:
    """The peak of what ``index_topk`` asks for, with the scoring stubbed; and the shapes of the scores."""
    shapes: list[tuple[int, int]] = []

    def stub(q, *args, width, plan, **options):
        shapes.append((q.shape[0], width))
        return torch.empty((q.shape[0], width), device="meta")

    monkeypatch.setattr(module, "indexer_logits", stub)
    arguments = [
        torch.empty(rows, 64, 64, dtype=torch.uint8, device="meta"),
        torch.empty(rows, 64, 4, dtype=torch.uint8, device="meta"),
        torch.empty(rows, 64, device="meta"),
        torch.empty(width // 64, 4352, dtype=torch.uint8, device="meta"),
        torch.empty(1, width // 64, dtype=torch.int32, device="meta"),
        torch.empty(rows, dtype=torch.int32, device="meta"),
        torch.empty(rows, dtype=torch.int32, device="meta"),
    ]
    with Ledger(arguments) as ledger:
        index_topk(*arguments, 512, width=width, logits_budget_bytes=budget)
    return ledger.peak, shapes


def test_memory_grows_with_the_budget(monkeypatch):
    """A prefill of 32k tokens sees 8192 entries: rows times width would be a gigabyte at once."""
    rows, width, mib = 32_768, 8192, 1 << 20
    small, shapes = peak_bytes(rows, width, 32 * mib, monkeypatch)
    assert sum(count for count, _ in shapes) == rows
    assert max(count * width * 4 for count, _ in shapes) == 32 * mib
    large, _ = peak_bytes(rows, width, 256 * mib, monkeypatch)
    unlimited, shapes = peak_bytes(rows, width, 0, monkeypatch)
    assert shapes == [(rows, width)]
    # beside the scores: the result (64 MiB) and a bounded amount for choosing
    assert 32 * mib < small < (32 + 64 + 64) * mib
    assert 256 * mib - 32 * mib - mib <= large - small <= 256 * mib - 32 * mib + mib
    assert unlimited > 1024 * mib
    fewer_rows, _ = peak_bytes(rows // 4, width, 32 * mib, monkeypatch)
    assert small - fewer_rows == 3 * rows // 4 * 512 * 4, "only the result may grow with the rows"


def test_bad_arguments():
    case = make_case("fp4", 4, 32, [[20]])
    with pytest.raises(ValueError, match="k must be at least 1; got 0"):
        index_topk(*case.arguments, 0, width=20)
    with pytest.raises(TypeError, match="k must be a plain int; got Tensor"):
        index_topk(*case.arguments, torch.tensor(3), width=20)
    with pytest.raises(ValueError, match="logits_budget_bytes must be at least 0; got -1"):
        index_topk(*case.arguments, 3, width=20, logits_budget_bytes=-1)
    with pytest.raises(ValueError, match=r"out must be int32 \[rows, k\] = \[1, 3\]; got the shape \[1, 4\]"):
        index_topk(*case.arguments, 3, width=20, out=torch.empty((1, 4), dtype=torch.int32))
    with pytest.raises(ValueError, match="made for 1 rows, width 19"):
        index_topk(*case.arguments, 3, width=20, plan=plan_indexer(case.row_request, case.visible_end, width=19))
    with pytest.raises(TypeError, match="weights must be float32"):
        index_topk(*replace(case, weights=case.weights.double()).arguments, 30, width=20)
