"""The schedule against a plain enumeration in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tetrad.ops import IndexerPlan, plan_indexer
from tetrad.ops.plan_indexer import BLOCK, LEAST_SLOTS


def enumerate_units(requests: list[int], ends: list[int], slots: int, width: int) -> list[list[int]]:
    """Try every number of blocks to a unit, the smallest first; walk rows in order."""
    seen = [0 if request < 0 else end for request, end in zip(requests, ends, strict=True)]
    blocks_of = torch.tensor([-(-end // BLOCK) for end in seen], dtype=torch.int64)
    for per_unit in range(1, max(1, -(-width // BLOCK)) + 1):
        if int(((blocks_of + per_unit - 1) // per_unit).sum()) > slots:
            continue  # listing them all took minutes for tens of thousands of rows
        units: list[list[int]] = []
        for row, end in enumerate(seen):
            blocks = -(-end // BLOCK)
            units += [[row, first, min(per_unit, blocks - first), end] for first in range(0, blocks, per_unit)]
        return units + [[-1, 0, 0, 0]] * (slots - len(units))
    raise AssertionError("one unit a row always fits")


def make(requests: list[int], ends: list[int], width: int, slots: int | None = None) -> IndexerPlan:
    """A plan, with a buffer of its own if ``slots`` is given, guarded and filled with nonsense."""
    out = None
    if slots is not None:
        memory = torch.full((slots * 4 + 22,), -999, dtype=torch.int32)
        out = memory[11:-11].view(slots, 4)
    plan = plan_indexer(
        torch.tensor(requests, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32), width=width, out=out
    )
    if slots is not None:
        assert plan.buffer is out
        assert (memory[:11] == -999).all()
        assert (memory[-11:] == -999).all()
    return plan


def check(requests: list[int], ends: list[int], width: int, slots: int | None = None) -> None:
    plan = make(requests, ends, width, slots)
    assert (plan.rows, plan.width, plan.block) == (len(requests), width, 256)
    assert plan.slots == (slots if slots is not None else max(LEAST_SLOTS, len(requests)))
    assert plan.buffer.tolist() == enumerate_units(requests, ends, plan.slots, width)


ROWS = st.lists(st.tuples(st.sampled_from([-1, 0, 3]), st.integers(0, 6000)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(0, 40), st.integers(0, 3000))
def test_equals_the_enumeration(rows, spare_slots, extra_width):
    """Padding rows get nothing even where their visible end is stale."""
    requests, ends = [request for request, _ in rows], [end for _, end in rows]
    check(requests, ends, max(ends, default=0) + extra_width, len(rows) + spare_slots)


@pytest.mark.parametrize("end", [0, 1, 255, 256, 257, 511, 512, 513, 131_072, 262_144])
def test_one_row(end):
    """One long row is spread over the 512 slots that a plan has at least; exactly full is not yet too much."""
    check([0], [end], max(end, 1))


def test_all_lengths_zero():
    check([0, 0, 1, -1], [0, 0, 0, 0], 0)
    check([0, 0, 1, -1], [0, 0, 0, 0], 5000)


def test_no_rows():
    check([], [], 0)
    check([], [], 1000, 7)
    check([], [], 1000, 0)


def test_as_many_slots_as_rows():
    """The tightest plan: every row must still get its one unit."""
    check(list(range(9)), [2560, 1, 0, 300, 256, 257, 2559, 2304, 2305], 2560, 9)


@pytest.mark.parametrize("rows", [513, 32_768])
def test_many_rows(rows):
    """A grid smaller than the rows would silently drop some of them."""
    ends = [(row * 7919) % 5000 for row in range(rows)]
    check([row // 4 for row in range(rows)], ends, 5000)


def test_every_visible_block_is_scored_once():
    """Said without the enumeration: the units are a partition of each row's blocks."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, 40_000, (700,), generator=generator).tolist()
    plan = make([row % 50 for row in range(700)], ends, 40_000)
    covered = [[0] * -(-end // BLOCK) for end in ends]
    for row, first, count, end in plan.buffer.tolist():
        if row >= 0:
            assert end == ends[row]
            assert count >= 1
            for block in range(first, first + count):
                covered[row][block] += 1
    assert all(count == 1 for row in covered for count in row)


def test_refilled_at_the_same_address():
    """A captured graph reads the buffer that it was captured with; what an earlier step left must be gone."""
    plan = make([0, 1, 2], [4000, 4000, 4000], 4096)
    address = plan.buffer.data_ptr()
    again = plan_indexer(
        torch.tensor([0, 1, -1], dtype=torch.int32), torch.tensor([1, 0, 0], dtype=torch.int32), width=4096, out=plan
    )
    assert again is plan
    assert plan.buffer.data_ptr() == address
    assert plan.buffer.tolist() == enumerate_units([0, 1, -1], [1, 0, 0], plan.slots, 4096)


def test_other_sizes_are_refused():
    requests, ends = torch.zeros(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    plan = plan_indexer(requests, ends, width=100)
    with pytest.raises(ValueError, match="made for 3 rows, width 100"):
        plan_indexer(requests, ends, width=101, out=plan)
    with pytest.raises(ValueError, match="made for 3 rows"):
        plan_indexer(requests[:2], ends[:2], width=100, out=plan)
    with pytest.raises(ValueError, match="a slot for every row, so at least 3; got 2"):
        plan_indexer(requests, ends, width=100, out=torch.empty((2, 4), dtype=torch.int32))
    with pytest.raises(ValueError, match="blocks of 128"):
        IndexerPlan(plan.buffer, 3, 100, 128).check(3, 100)


def test_waits_for_no_value():
    """Runs on tensors without values, so it cannot synchronise a device."""
    rows = torch.empty(5, dtype=torch.int32, device="meta")
    assert plan_indexer(rows, rows, width=1000).slots == LEAST_SLOTS
