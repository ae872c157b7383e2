"""The indexer's scores in Triton, for every GPU. The arguments are checked by :mod:`tetrad.ops.indexer_logits`.

One program has one work item: some blocks of one row, or of some adjacent rows of one request. It holds the query of
each row ready for the tensor cores and walks over the pages: a tile of keys, one product with all heads of all its
rows, relu, weighted sum over the heads (:mod:`tetrad.ops.indexer_logits.triton_rows`).

FP4 goes to the tensor cores as it is where they know it. Elsewhere every code becomes a bf16 number that includes its
scale, which is exact. So that this holds for the smallest scales, and none is flushed, key scales are multiplied by
2^50 on the way and the weights by 2^-50. E4M3 likewise is itself where there are units for it, and fp16 elsewhere.

What could leave the range of fp32 on this way is only marked: keys with a scale above 2^30 (NaN included), rows with a
query scale or a weight far from 1. After its last tile the program scores it again in fp64
(:mod:`tetrad.ops.indexer_logits.triton_exact`). Which way a score takes depends on its key and its row, so its bits
depend on nothing else either.

Rows are scored together where the plan has the Triton back end's schedule of groups and where there are more rows than
requests, so that some share their pages. In every other case the units are the plan's own, one row each. Two rows go
together on most GPUs, because the queries have to stay in registers or in shared memory. All ways give the same bits
(:mod:`tetrad.ops.indexer_logits.triton_sums`).
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
from torch import Tensor

from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.indexer_logits.triton_fp32 import indexer_logits_fp32_kernel
from tetrad.ops.indexer_logits.triton_rows import indexer_logits_kernel
from tetrad.ops.plan_indexer import IndexerPlan, plan_indexer
from tetrad.ops.plan_indexer.triton import GROUP_ROWS, SCHEDULE_OF
from tetrad.platforms import current_platform

FP4_UNITS = frozenset({"sm_100", "sm_103", "sm_120", "gfx950"})
"""Architectures whose tensor cores multiply E2M1 numbers with e8m0 scales, where Triton knows it."""

FP8_UNITS = FP4_UNITS | {"sm_89", "sm_90", "sm_121"}
"""Those whose tensor cores multiply E4M3 numbers."""

_PRODUCTS_OF_WARPGROUPS = frozenset({"sm_90", "sm_100", "sm_103"})
"""Those where four warps have whole rows of a product."""

_STAGES = 3
"""Tiles of keys in flight."""


@functools.cache
def launch_constants(arch: str, dtype: IndexDtype, heads: int, head_dim: int) -> dict[str, Any]:
    """What a kernel for so many heads and channels is compiled with on an architecture.

    ``KIND`` is the dtype of the cache, ``TILE`` the keys and ``HEAD_TILE`` the heads that are multiplied at once.
    ``UNITS``: FP4 or E4M3 numbers go to the tensor cores as they are. ``WIDEN``: bf16 numbers become fp32 first, for
    Triton's interpreter, which multiplies their bits. ``LOW``: columns of a product that one warp has side by side, for
    the order of the sum over heads. ``ROWS`` go together, here one; :func:`group_constants` has more.
    """
    # the tensor cores of gfx950 take 64 FP4 channels only with 32 heads; more than 64 heads are taken in small pieces,
    # because two pieces have to fit into the registers
    least = 32 if arch.startswith("gfx") else 16
    head_tile = max(least, triton.next_power_of_2(heads)) if heads <= 64 else 32
    constants: dict[str, Any] = {"HEADS": heads, "DIM": head_dim, "TILE": 64, "HEAD_TILE": head_tile}
    if dtype is IndexDtype.FP32:
        return constants
    # they multiply 64 FP4 channels at a time, and Triton 3.6 cannot give one tile of keys to two FP4 products on sm_100
    fp4_units = FP4_UNITS if head_dim >= 64 and heads <= 64 else frozenset()
    able = {IndexDtype.FP4: fp4_units, IndexDtype.FP8: FP8_UNITS}
    units = arch in able.get(dtype, ())
    if units and dtype is IndexDtype.FP4:
        # those of sm_100 take 128 keys
        constants["TILE"] = 128
    constants |= {"ROWS": 1, "INNER": 1, "LOW": 32 if arch.startswith("gfx") else 8}
    return constants | {"KIND": dtype.value, "UNITS": units, "WIDEN": arch == "cpu", "STAGES": _STAGES}


@functools.cache
def group_constants(arch: str, dtype: IndexDtype, heads: int, head_dim: int) -> dict[str, Any] | None:
    """What the kernel for several rows of one request is compiled with, launch options among it; None if rows are
    scored one by one.

    ``ROWS`` go together. ``INNER`` of them lie within the heads of a row: where the warps share a product column by
    column, each has the same heads of all rows then, and a sum over heads crosses as few warps as for one row.
    """
    if dtype is IndexDtype.FP32 or heads > 64 or head_dim > 128:
        return None
    rows, options = 2, {"num_warps": 8}
    if arch == "sm_90":
        # the queries are read from shared memory there. Three programs of four warps fit on a multiprocessor, or two of
        # eight warps that have 128 registers a thread: enough for four rows if nothing has to be converted
        rows, options = (4, {"num_warps": 8, "maxnreg": 128}) if dtype is IndexDtype.BF16 else (2, {"num_warps": 4})
    inner = 1 if arch.startswith("gfx") or arch in _PRODUCTS_OF_WARPGROUPS else rows
    return launch_constants(arch, dtype, heads, head_dim) | {"ROWS": rows, "INNER": inner} | options


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
    """Fill ``out`` fp32 [R, width]; see :func:`tetrad.ops.indexer_logits.indexer_logits`. Allocates nothing if ``plan``
    is given.
    """
    rows, heads = weights.shape
    if not rows or not out.shape[1]:
        return
    if plan is None:
        plan = plan_indexer(row_request, visible_end, width=out.shape[1])
    if layout.dtype is IndexDtype.FP8:
        q = q.view(torch.uint8)
    inputs = weights, cache, block_tables, row_request
    strides = cache.stride(0), block_tables.stride(0), out.stride(0)
    problem = current_platform(q.device).arch, layout.dtype, heads, layout.head_dim
    constants, units, grid = launch_constants(*problem), plan.buffer, (plan.slots,)
    schedule, groups = plan.schedule_for(SCHEDULE_OF), group_constants(*problem)
    if schedule is not None and groups is not None and rows > block_tables.shape[0]:
        constants, units, grid = groups, schedule, (schedule.shape[0], GROUP_ROWS // groups["ROWS"])
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        if layout.dtype is IndexDtype.FP32:
            indexer_logits_fp32_kernel[grid](q, *inputs, units, out, *strides, **constants)
        else:
            indexer_logits_kernel[grid](q, q_scale, *inputs, visible_end, units, out, *strides, **constants)


__all__ = ["FP4_UNITS", "FP8_UNITS", "group_constants", "indexer_logits", "indexer_logits_fp32_kernel",
           "indexer_logits_kernel", "launch_constants"]  # fmt: skip
