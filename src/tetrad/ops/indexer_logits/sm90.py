"""The indexer's scores on Hopper: FP4 and FP8 pages on the FP8 tensor cores.

CUDA C++ (``sm90_scorer.cu``), compiled at run time. It is not written in Gluon, because reading, converting,
multiplying and summing up only overlap when they are different warps' work: warps that do nothing but start bulk
copies into a ring of pages, warpgroups that take pages out of it as they come, and warps that prepare the next
query rows behind their backs. Triton 3.6 and 3.7 cannot say that: their warp specialisation hands tiles over through
layouts of their own, and the first operand of the FP8 product, converted in registers, has to be read from a ring slot
of 4352 bytes that a bulk copy without a tensor map has filled. docs/kernels.md has the figures and the reasons.

One persistent thread block for each multiprocessor walks its share of the schedule
(:mod:`tetrad.ops.plan_indexer.sm90`).
Scores do not depend on the schedule: every one is the same sum in the same order, whichever warpgroup computes it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.nvrtc import EARLY_START, CudaKernel, cuda_kernel
from tetrad.ops.plan_indexer import LEAST_SLOTS, IndexerPlan
from tetrad.ops.plan_indexer.sm90 import GROUP_ROWS, SCHEDULE_OF, new_schedule, plan_indexer, shares

HEAD_DIM = 128
HEADS = (32, 64)

FETCHERS = 2
"""Warps that fetch pages."""

_FLAG_BYTES = 4096 + 24


@dataclass(frozen=True, slots=True)
class Variant:
    """How a thread block is laid out: consumer warpgroups, pages in flight, whether two query rows go through the
    tensor cores at once, and registers of a thread of the consumers and of the helpers, which must add up to what the
    launch has (see :attr:`launch_registers`)."""

    groups: int
    ring: int
    pairs: bool
    consumer_registers: int
    helper_registers: int

    def __post_init__(self) -> None:
        # A barrier tells only odd phases from even ones, so a place of the ring must always be the same warpgroup's and
        # the same fetching warp's: one that ran ahead would else take the phase before for the one it waits for.
        assert self.ring % self.groups == 0 and self.ring % FETCHERS == 0

    @property
    def threads(self) -> int:
        return (self.groups + 1) * 128

    @property
    def launch_registers(self) -> int:
        """Registers that a thread starts with: an equal share of the multiprocessor's, in steps of eight."""
        return 65536 // self.threads // 8 * 8

    def shared_bytes(self, dtype: IndexDtype, heads: int) -> int:
        """Dynamic shared memory: query rows, pages, head weights, their descriptions, barriers, marks."""
        query = heads * HEAD_DIM + (heads // 4 + 4) * 16 + 4
        slot = IndexLayout(dtype, HEAD_DIM).page_bytes + 16
        return 2 * (GROUP_ROWS * query + 40 + 16) + self.ring * slot + _FLAG_BYTES

    def defines(self, dtype: IndexDtype, heads: int) -> tuple[tuple[str, int | str], ...]:
        return (
            ("HEADS", heads),
            ("FP8", int(dtype is IndexDtype.FP8)),
            ("GROUPS", self.groups),
            ("RING", self.ring),
            ("FETCHERS", FETCHERS),
            ("PAIRS", int(self.pairs)),
            ("ROWS", GROUP_ROWS),
            ("CONSUMER_REGISTERS", self.consumer_registers),
            ("HELPER_REGISTERS", self.helper_registers),
            ("SHARED_BYTES", self.shared_bytes(dtype, heads)),
        )


def variant(dtype: IndexDtype, rows: int, requests: int) -> Variant:
    """The layout for a cache and a step. It changes the speed, not a bit of a score.

    With more rows than requests some share their pages, and two of them their products. That needs registers, so there
    are fewer warpgroups then. FP8 pages are as large as two of FP4 and need no conversion: there a deep ring is worth
    more than a third warpgroup.
    """
    shared = rows > requests
    if dtype is IndexDtype.FP8:
        return Variant(3, 6, True, 144, 80) if shared else Variant(2, 10, True, 216, 72)
    return Variant(3, 18, True, 144, 80) if shared else Variant(4, 20, False, 104, 64)


@functools.cache
def source() -> str:
    """The kernel's source, its parts put together."""
    folder = Path(__file__).parent

    def read(name: str) -> str:
        text = (folder / name).read_text(encoding="utf-8")
        return re.sub(r'#include "(\w+\.cuh)"\n', lambda part: read(part[1]), text)

    return EARLY_START + read("sm90_scorer.cu")


def indexer_logits(
    q: Tensor,
    q_scale: Tensor | None,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    visible_end: Tensor,
    out: Tensor,
    *,
    layout: IndexLayout,
    plan: IndexerPlan | None = None,
) -> None:
    """Fill ``out`` fp32 [R, width]; see :func:`tetrad.ops.indexer_logits.indexer_logits`.

    Allocates nothing if ``plan`` was made on this device and q and q_scale start at multiples of 16 bytes.
    """
    rows, heads = weights.shape
    if not rows or not out.shape[1]:
        return
    assert q_scale is not None  # checked by the op: fp4 and fp8 queries have scales
    schedule = None if plan is None else plan.schedule_for(SCHEDULE_OF)
    if schedule is None:
        schedule = _own_schedule(row_request, visible_end, out.shape[1])
    chosen = variant(layout.dtype, rows, block_tables.shape[0])
    _kernel(chosen, layout.dtype, heads, q.device).launch(
        (shares(q.device),),
        (chosen.threads,),
        _aligned(q),
        _aligned(q_scale),
        weights,
        cache,
        cache.stride(0),
        block_tables,
        block_tables.stride(0),
        visible_end,
        out,
        out.stride(0),
        schedule,
    )


def _own_schedule(row_request: Tensor, visible_end: Tensor, width: int) -> Tensor:
    """For a plan without one that this kernel can read, whatever back end makes the plans here."""
    rows, device = row_request.shape[0], row_request.device
    buffer = torch.empty((max(LEAST_SLOTS, rows), 4), dtype=torch.int32, device=device)
    schedule = new_schedule(rows, device)
    plan_indexer(row_request, visible_end, buffer, width=width, schedule=schedule)
    return schedule


@functools.cache
def _kernel(chosen: Variant, dtype: IndexDtype, heads: int, device) -> CudaKernel:
    return cuda_kernel(
        source(),
        "indexer_logits",
        device,
        defines=chosen.defines(dtype, heads),
        shared_bytes=chosen.shared_bytes(dtype, heads),
        early_start=True,
    )


def _aligned(x: Tensor) -> Tensor:
    """The kernel loads 16 bytes at once, but a caller's rows may begin anywhere."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


__all__ = ["HEADS", "HEAD_DIM", "Variant", "indexer_logits", "new_schedule", "source", "variant"]
