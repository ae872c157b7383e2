"""Both schedules of the indexer in one launch, for every GPU that Triton compiles for.

Beside the plan's buffer of work items, which is the reference's to the last integer, it makes a schedule of groups: up
to :data:`GROUP_ROWS` adjacent rows of one request, whose keys are read and converted once for all of them.

int32 ``schedule`` [slots, 4], one work item of a group a slot: (first row, rows, first block, blocks), in blocks of 256
entries up to what the furthest row sees; (-1, 0, 0, 0) is unused. A run of rows of one request is cut into groups from
its first row on. A block of a group costs 1 + rows, the keys and the product with each row, and a unit costs about s:

    s = ceil(SUM_g cost_g / (slots - groups))      per_unit_g = ceil(s / (1 + rows_g)) blocks

There are always slots enough, because SUM_g ceil(cost_g / s) is at most SUM_g cost_g / s + groups.

Two programs work side by side, one for the buffer and one for the schedule. Each lists its rows or groups where their
first work item goes, and then fills in the units of every slot: the last one listed up to a slot is the one it belongs
to. Only the search for the buffer's blocks to a unit looks at all rows more than twice.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetrad.geometry import ceil_div
from tetrad.ops.plan_indexer.plan import BLOCK, LEAST_SLOTS
from tetrad.platforms import current_platform

SCHEDULE_OF = "triton"
"""Whose the schedule is."""

GROUP_ROWS = 4
"""Rows of one request that are scored together."""

_MOST_KEPT = 16384
"""Rows whose blocks are kept in registers; of more rows than that they are read again in every step of the search."""


def launch_options(rows: int, arch: str) -> dict[str, Any]:
    """What the kernel is compiled with for so many rows: five ways for every number of them.

    ``STEP`` is the rows or slots that are worked on at a time, ``KEPT`` those whose blocks are kept, 0 for none.
    """
    step = 512 if rows <= 512 else 2048
    kept = next((size for size in (512, 2048, 8192, _MOST_KEPT) if rows <= size), 0)
    # four rows a thread; a warp of AMD's is twice as wide
    warps = step // (256 if arch.startswith("gfx") else 128)
    return {"BLOCK": BLOCK, "GROUP_ROWS": GROUP_ROWS, "STEP": step, "KEPT": kept, "num_warps": warps}


def new_schedule(rows: int, device: torch.device) -> Tensor:
    """An uninitialised schedule for so many rows: int32 [512 + rows, 4]."""
    return torch.empty((LEAST_SLOTS + rows, 4), dtype=torch.int32, device=device)


def plan_indexer(
    row_request: Tensor, visible_end: Tensor, buffer: Tensor, *, width: int, schedule: Tensor | None = None
) -> None:
    """Fill ``buffer`` int32 [slots, 4], see :func:`tetrad.ops.plan_indexer.plan_indexer`, and ``schedule`` as
    :func:`new_schedule` made it."""
    rows, device = row_request.shape[0], row_request.device
    most_blocks = max(1, ceil_div(width, BLOCK))
    groups = buffer if schedule is None else schedule
    with torch.cuda.device(device) if row_request.is_cuda else contextlib.nullcontext():
        plan_kernel[(1 if schedule is None else 2,)](
            row_request,
            visible_end,
            buffer,
            groups,
            rows,
            buffer.shape[0],
            groups.shape[0],
            most_blocks,
            **launch_options(rows, current_platform(device).arch),
        )


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _units(blocks, per_unit):
    """ceil(blocks / per_unit) by a division of fp32, which is off by less than half a step below 2^21 blocks."""
    return (((blocks + per_unit - 1).to(tl.float32) + 0.5) * (1.0 / per_unit.to(tl.float32))).to(tl.int32)


@triton.jit
def _members(row_request, visible_end, row, rows, leads, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """(rows, end, blocks) of the group that begins at ``row`` where ``leads``, and nothing elsewhere: its rows, and
    what the furthest of them sees.
    """
    own = tl.load(row_request + row, leads, -1)
    same = leads & (own >= 0)
    members = same.to(tl.int32)
    end = tl.load(visible_end + row, same, 0)
    for distance in tl.static_range(1, GROUP):  # pyright: ignore[reportGeneralTypeIssues]
        other = row + distance
        same = same & (tl.load(row_request + other, same & (other < rows), -1) == own)
        members += same.to(tl.int32)
        end = tl.maximum(end, tl.load(visible_end + other, same, 0))
    end = tl.maximum(end, 0)
    return members, end, (end + BLOCK - 1) // BLOCK


@triton.jit
def _leads(row_request, row, rows, run, GROUP: tl.constexpr):
    """(which rows a group begins at, where the last row's run began); ``run``: that of the row before the first."""
    if GROUP == 1:
        leads = row < rows
    else:
        own = tl.load(row_request + row, row < rows, -1)
        before = tl.load(row_request + row - 1, (row > 0) & (row < rows), -1)
        begun = tl.where((before != own) & (row < rows), row, 0)
        begun = tl.maximum(tl.associative_scan(begun, 0, _larger), run)
        leads = (row < rows) & ((row - begun) % GROUP == 0)
        run = tl.max(begun, 0)
    return leads, run


@triton.jit
def _sum_of_units(kept, row_request, visible_end, rows, per_unit, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Work items of all rows with ``per_unit`` blocks each. ``kept``: the blocks of all rows, or None."""
    if kept is None:
        units = tl.zeros((STEP,), tl.int32)
        for start in range(0, rows, STEP):
            row = start + tl.arange(0, STEP)
            units += _units(_members(row_request, visible_end, row, rows, row < rows, BLOCK, 1)[2], per_unit)
    else:
        units = _units(kept, per_unit)
    return tl.sum(units.to(tl.int64), 0)


@triton.jit
def _fewest_blocks(
    row_request,
    visible_end,
    rows,
    slots,
    low,
    high,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    KEPT: tl.constexpr,
):
    """The fewest blocks to a unit with which the units of all rows fit into the slots; from ``low`` to ``high``, which
    is enough.
    """
    if KEPT:
        row = tl.arange(0, KEPT)
        kept = _members(row_request, visible_end, row, rows, row < rows, BLOCK, 1)[2]
    else:
        kept = None
    while low < high:
        middle = (low + high) // 2
        if _sum_of_units(kept, row_request, visible_end, rows, middle, BLOCK, STEP) <= slots:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def _per_unit(size, members, GROUP: tl.constexpr):
    """Blocks of a unit whose cost is ``size``: of a single row, or of a group."""
    if GROUP == 1:
        return size + 0 * members
    return (size + members) // (1 + members)


@triton.jit
def _cut(
    row_request,
    visible_end,
    out,
    rows,
    slots,
    most_blocks,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Fill ``out`` int32 [slots, 4] with the work items of all groups of GROUP rows, or of all rows if that is 1."""
    lane = tl.arange(0, STEP)
    for start in range(0, slots, STEP):
        slot = (start + lane).to(tl.int64)
        tl.store(out + slot * 4, tl.full((STEP,), -1, tl.int32), slot < slots)

    cost = tl.zeros((STEP,), tl.int64)
    count = tl.zeros((STEP,), tl.int32)
    run = 0
    for start in range(0, rows, STEP):
        row = start + lane
        leads, run = _leads(row_request, row, rows, run, GROUP)
        members, _end, blocks = _members(row_request, visible_end, row, rows, leads, BLOCK, GROUP)
        cost += blocks.to(tl.int64) * (members if GROUP == 1 else 1 + members)
        count += (blocks > 0).to(tl.int32)
    total, filled = tl.sum(cost, 0), tl.sum(count, 0)

    # total / s <= SUM ceil(cost / s) < total / s + filled bounds the size from both sides
    spare = slots - filled
    enough = tl.cdiv(total, tl.maximum(spare, 1)).to(tl.int32)
    if GROUP == 1:
        high = tl.maximum(tl.where(spare > 0, tl.minimum(most_blocks, enough), most_blocks), 1)
        low = tl.minimum(tl.maximum(tl.cdiv(total, tl.maximum(slots, 1)).to(tl.int32), 1), high)
        size = _fewest_blocks(row_request, visible_end, rows, slots, low, high, BLOCK, STEP, KEPT)
    else:
        size = tl.maximum(enough, 1)

    # the slots are all marked as empty before some of them are taken, by whichever thread
    tl.debug_barrier()
    used = 0
    run = 0
    for start in range(0, rows, STEP):
        row = start + lane
        leads, run = _leads(row_request, row, rows, run, GROUP)
        members, _end, blocks = _members(row_request, visible_end, row, rows, leads, BLOCK, GROUP)
        units = _units(blocks, _per_unit(size, members, GROUP))
        slot = (used + tl.cumsum(units, 0) - units).to(tl.int64)
        tl.store(out + slot * 4, row, (units > 0) & (slot < slots))
        used += tl.sum(units, 0)
    tl.debug_barrier()

    last = tl.full((), 0, tl.int64)
    for start in range(0, slots, STEP):
        slot = start + lane
        entry = out + slot.to(tl.int64) * 4
        listed = tl.load(entry, slot < slots, -1)
        # (first slot, row) of what was listed last
        owner = tl.where(listed >= 0, (slot.to(tl.int64) << 32) | listed.to(tl.int64), 0)
        owner = tl.maximum(tl.associative_scan(owner, 0, _larger), last)
        last = tl.max(owner, 0)
        taken = slot < tl.minimum(used, slots)
        row = tl.where(taken, (owner & 0x7FFFFFFF).to(tl.int32), 0)
        members, end, blocks = _members(row_request, visible_end, row, rows, taken, BLOCK, GROUP)
        per_unit = _per_unit(size, members, GROUP)
        first = tl.where(taken, (slot - (owner >> 32).to(tl.int32)) * per_unit, 0)
        blocks = tl.where(taken, tl.minimum(per_unit, blocks - first), 0)
        tl.debug_barrier()
        tl.store(entry, tl.where(taken, row, -1), slot < slots)
        tl.store(entry + 1, first if GROUP == 1 else members, slot < slots)
        tl.store(entry + 2, blocks if GROUP == 1 else first, slot < slots)
        tl.store(entry + 3, end if GROUP == 1 else blocks, slot < slots)


@triton.jit
def plan_kernel(
    row_request,
    visible_end,
    buffer,
    schedule,
    rows,
    buffer_slots,
    schedule_slots,
    most_blocks,
    BLOCK: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Program 0 fills the buffer, program 1 the schedule. All pointers are to int32."""
    if tl.program_id(0) == 0:
        _cut(row_request, visible_end, buffer, rows, buffer_slots, most_blocks, BLOCK, 1, STEP, KEPT)
    else:
        _cut(row_request, visible_end, schedule, rows, schedule_slots, most_blocks, BLOCK, GROUP_ROWS, STEP, KEPT)
