"""Both schedules of the indexer in one launch, for Hopper.

Beside the plan's buffer of work items, which is the reference's to the last integer, it makes the schedule of the
Hopper scorer: a persistent grid in which every thread block gets an equal share of the work, whatever the lengths.

int32 ``schedule``, in pieces of 16 bytes; shares = multiprocessors of the device:

* for every share 8 integers: (first group, its first tile, last group, the tile before which that one ends) and the
  first group's own entry, so that a block needs no second look-up before it can start. The last group is past the end
  of the list and its tile 0 where the share reaches to the end. Equal begin and end: no work.
* then the groups, 4 integers each: (first row, rows, request, entries that the furthest row sees). A group is up to 8
  adjacent rows of one request, which are scored together so that a page is read and converted once for all of them.
  Groups that see nothing are left out.

A tile is a page of 64 entries. It costs 3 + 2 * rows units, about 64 cycles each: what the conversion of the page takes
beside the products of each row. Shares are equal in these units up to one tile.

CUDA C++ and not Triton, because the schedule is a few scans with different roles for two thread blocks.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from tetrad.geometry import CSA_ENTRIES, ceil_div
from tetrad.ops.nvrtc import EARLY_START, cuda_kernel
from tetrad.ops.plan_indexer.plan import BLOCK

SCHEDULE_OF = "sm90"
"""Whose the schedule is."""

GROUP_ROWS = 8
"""Rows of one request that are scored together."""

_TILE_COST, _ROW_COST = 3, 2
_FEW_ROWS = 512
"""Up to so many rows four warps are faster than 32: their scans have fewer steps."""


@functools.cache
def source() -> str:
    """The kernel's source."""
    return EARLY_START + Path(__file__).with_name("sm90_plan.cu").read_text(encoding="utf-8")


@functools.cache
def shares(device: torch.device) -> int:
    """Thread blocks that the scorer runs with: one for each multiprocessor, which it fills."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def defines(threads: int) -> tuple[tuple[str, int], ...]:
    """The macros of the kernel for blocks of so many threads."""
    return (
        ("THREADS", threads),
        ("BLOCK", BLOCK),
        ("PAGE", CSA_ENTRIES),
        ("GROUP_ROWS", GROUP_ROWS),
        ("TILE_COST", _TILE_COST),
        ("ROW_COST", _ROW_COST),
    )


def new_schedule(rows: int, device: torch.device) -> Tensor:
    """An uninitialised schedule for so many rows: int32 [2 * shares + rows, 4]."""
    return torch.empty((2 * shares(device) + rows, 4), dtype=torch.int32, device=device)


def plan_indexer(
    row_request: Tensor, visible_end: Tensor, buffer: Tensor, *, width: int, schedule: Tensor | None = None
) -> None:
    """Fill ``buffer`` int32 [slots, 4], see :func:`tetrad.ops.plan_indexer.plan_indexer`, and ``schedule`` as
    :func:`new_schedule` made it.

    Raises:
        ConfigError: where CUDA C++ cannot be compiled
    """
    device = row_request.device
    threads = 128 if row_request.shape[0] <= _FEW_ROWS else 1024
    kernel = cuda_kernel(source(), "plan_indexer", device, defines=defines(threads), early_start=True)
    kernel.launch(
        (1 if schedule is None else 2,),
        (threads,),
        row_request,
        visible_end,
        row_request.shape[0],
        buffer.shape[0],
        max(1, ceil_div(width, BLOCK)),
        buffer,
        shares(device),
        buffer if schedule is None else schedule,
    )
