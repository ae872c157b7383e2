"""The indexer's scores in Triton, for every GPU. The arguments are checked by :mod:`tetrad.ops.indexer_logits`.

One program has one work unit of the plan, some blocks of one row. It holds the row's query ready for the matrix units
and walks over the pages: a tile of keys, one product with all heads, relu, weighted sum over the heads.

FP4 goes to the matrix units as it is where they know it. Elsewhere every code becomes a bf16 number that includes its
scale, which is exact. So that this holds for the smallest scales, and none is flushed, key scales are multiplied by
2^50 on the way and the weights by 2^-50. E4M3 likewise is itself where there are units for it, and fp16 elsewhere.

What could leave the range of fp32 on this way is only marked: keys with a scale above 2^30 (NaN included), rows with a
query scale or a weight far from 1. After its last tile the program scores it again in fp64
(:mod:`tetrad.ops.indexer_logits.triton_exact`). Which way a score takes depends on its key and its row, so its bits
depend on nothing else either.

Every row has units of its own. Adjacent rows of one request do not share what they read and convert: the queries of
several rows would have to stay ready, and one takes a good part of the registers of the smaller GPUs.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.indexer_logits.triton_exact import exact_scores
from tetrad.ops.indexer_logits.triton_fp32 import indexer_logits_fp32_kernel
from tetrad.ops.indexer_logits.triton_numbers import (
    e2m1_high,
    e2m1_low,
    e4m3_as_fp16,
    power_of_two,
    truncated_bf16,
)
from tetrad.ops.plan_indexer import IndexerPlan, plan_indexer
from tetrad.platforms import current_platform

FP4_UNITS = frozenset({"sm_100", "sm_103", "sm_120", "gfx950"})
"""Architectures whose matrix units multiply E2M1 numbers with e8m0 scales, where Triton knows it."""

FP8_UNITS = FP4_UNITS | {"sm_89", "sm_90", "sm_121"}
"""Those whose matrix units multiply E4M3 numbers."""

_STAGES = 3
"""Tiles of keys in flight."""


@functools.cache
def launch_constants(arch: str, dtype: IndexDtype, heads: int, head_dim: int) -> dict[str, Any]:
    """What a kernel for so many heads and channels is compiled with on an architecture.

    ``KIND`` is the dtype of the cache, ``TILE`` the keys and ``HEAD_TILE`` the heads that are multiplied at once.
    ``UNITS``: FP4 or E4M3 numbers go to the matrix units as they are. ``WIDEN``: bf16 numbers become fp32 first, for
    Triton's interpreter, which multiplies their bits.
    """
    # the matrix units of gfx950 take 64 FP4 channels only with 32 heads; more than 64 heads are taken in small pieces,
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
    return constants | {"KIND": dtype.value, "UNITS": units, "WIDEN": arch == "cpu", "STAGES": _STAGES}


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
    inputs = weights, cache, block_tables, row_request, plan.buffer, out
    strides = cache.stride(0), block_tables.stride(0), out.stride(0)
    constants = launch_constants(current_platform(q.device).arch, layout.dtype, heads, layout.head_dim)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        if layout.dtype is IndexDtype.FP32:
            indexer_logits_fp32_kernel[(plan.slots,)](q, *inputs, *strides, **constants)
        else:
            indexer_logits_kernel[(plan.slots,)](q, q_scale, *inputs, *strides, **constants)


@triton.jit
def _query(
    q,
    q_scale,
    weights,
    row,
    first_head,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    UNITS: tl.constexpr,
):
    """(a, b, weights, wide) of some heads: their channels [K, heads] for the products, in two parts where there are two
    products or a part and its scales, the weights with all factors, and whether a scale or weight is far from 1.
    """
    head = first_head + tl.arange(0, HEAD_TILE)
    real = head < HEADS
    vector = row * HEADS + head
    w = tl.load(weights + vector, real, 0.0)
    size = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # 2^-60 to 2^40 as integers: no comparison of numbers flushes what it compares
    wide = (size != 0) & ((size < 0x21800000) | (size > 0x53800000))
    if KIND == "fp4":
        group, byte = tl.arange(0, DIM // 32), tl.arange(0, 16)
        scale = tl.load(q_scale + vector[:, None] * (DIM // 32) + group[None, :], real[:, None], 127).to(tl.int32)
        packed_at = vector[:, None, None] * (DIM // 2) + (group[None, :, None] * 16 + byte[None, None, :])
        packed = tl.load(q + packed_at, real[:, None, None], 0)
        # zeros are zeros under any scale: they neither make a row wide nor meet an infinity
        filled = tl.max((packed & 0x77).to(tl.int32), 2) > 0
        odd = ((scale < 97) | (scale > 157)) & (filled | (scale == 255))
        wide = wide | (tl.max(odd.to(tl.int32), 1) > 0)
        scale = tl.where(filled & (scale != 255), scale, 127)
        w *= 1.0 / (1 << 50)
        if UNITS:
            a = tl.trans(tl.reshape(packed, (HEAD_TILE, DIM // 2)))
            b = scale.to(tl.uint8)
        else:
            power = power_of_two(scale + (14 - 127))[:, :, None]
            a = tl.trans(tl.reshape(truncated_bf16(e2m1_low(packed) * power), (HEAD_TILE, DIM // 2)))
            b = tl.trans(tl.reshape(truncated_bf16(e2m1_high(packed) * power), (HEAD_TILE, DIM // 2)))
    else:
        a = tl.trans(tl.load(q + vector[:, None] * DIM + tl.arange(0, DIM)[None, :], real[:, None], 0))
        if KIND == "fp8":
            scale = tl.load(q_scale + vector, real, 1.0)
            bits = scale.to(tl.int32, bitcast=True)
            # 2^-30 to 2^30, positive
            wide = wide | (bits < 0x30800000) | (bits > 0x4E800000)
            w *= scale
            a = a.to(tl.float8e4nv, bitcast=True) if UNITS else e4m3_as_fp16(a)
        b = a
    return a, b, w, tl.max(wide.to(tl.int32), 0)


@triton.jit
def _keys(page, place, seen, KIND: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr):
    """(a, b, scale, wide) of keys at ``place`` of ``page`` (pointers to bytes): as :func:`_query`, [keys, K]; a factor
    of the whole key; and which keys are to be scored again.
    """
    scale = tl.full((TILE,), 1.0, tl.float32)
    wide = tl.zeros((TILE,), tl.int32)
    if KIND == "fp4":
        group, byte = tl.arange(0, DIM // 32), tl.arange(0, 16)
        scale_at = place[:, None] * (DIM // 32) + (group[None, :] + 64 * (DIM // 2))
        scales = tl.load(page[:, None] + scale_at, seen[:, None], 127).to(tl.int32)
        packed_at = place[:, None, None] * (DIM // 2) + (group[None, :, None] * 16 + byte[None, None, :])
        packed = tl.load(page[:, None, None] + packed_at, seen[:, None, None], 0)
        wide = (tl.max(scales, 1) > 157).to(tl.int32)
        if UNITS:
            a = tl.reshape(packed, (TILE, DIM // 2))
            # a wide key gets some other scale: it is scored again
            b = (tl.minimum(scales, 158) + 50).to(tl.uint8)
        else:
            power = power_of_two(scales + (50 + 14 - 127))[:, :, None]
            a = tl.reshape(truncated_bf16(e2m1_low(packed) * power), (TILE, DIM // 2))
            b = tl.reshape(truncated_bf16(e2m1_high(packed) * power), (TILE, DIM // 2))
    elif KIND == "fp8":
        a = tl.load(page[:, None] + (place[:, None] * DIM + tl.arange(0, DIM)[None, :]), seen[:, None], 0)
        scale = tl.load((page + 64 * DIM).to(tl.pointer_type(tl.float32), bitcast=True) + place, seen, 1.0)
        bits = scale.to(tl.int32, bitcast=True)
        # neither zero nor a positive normal number
        wide = ((bits != 0) & ((bits < 0x00800000) | (bits >= 0x7F800000))).to(tl.int32)
        a = a.to(tl.float8e4nv, bitcast=True) if UNITS else e4m3_as_fp16(a)
        b = a
    else:
        start = page.to(tl.pointer_type(tl.bfloat16), bitcast=True)
        a = tl.load(start[:, None] + (place[:, None] * DIM + tl.arange(0, DIM)[None, :]), seen[:, None], 0.0)
        b = a
    return a, b, scale, wide


@triton.jit
def _weighted(
    key_a,
    key_b,
    query_a,
    query_b,
    w,
    first_head,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    UNITS: tl.constexpr,
    WIDEN: tl.constexpr,
    zero,
):
    """SUM over some heads of weight * relu(<query, key>): fp32 [keys]."""
    if KIND == "fp4":
        if UNITS:
            start = tl.zeros((key_a.shape[0], HEAD_TILE), tl.float32) + zero
            product = tl.dot_scaled(key_a, key_b, "e2m1", query_a, query_b, "e2m1", start)
        else:
            if WIDEN:
                key_a, key_b = key_a.to(tl.float32), key_b.to(tl.float32)
                query_a, query_b = query_a.to(tl.float32), query_b.to(tl.float32)
            product = tl.dot(key_b, query_b, tl.dot(key_a, query_a))
    else:
        if WIDEN:
            key_a, query_a = key_a.to(tl.float32), query_a.to(tl.float32)
        product = tl.dot(key_a, query_a)
    relu = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if HEADS % HEAD_TILE:
        # heads that are only padding: zero times an infinite key would be NaN
        head = first_head + tl.arange(0, HEAD_TILE)
        relu = tl.where((head < HEADS)[None, :], relu, 0.0)
    return tl.sum(relu * w[None, :], 1)


@triton.jit
def indexer_logits_kernel(
    q,
    q_scale,
    weights,
    cache,
    block_tables,
    row_request,
    plan,
    out,
    page_stride,
    table_stride,
    out_stride,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    UNITS: tl.constexpr,
    WIDEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One work unit. q and cache are bytes, but elements of a bf16 query; plan int32 [slots, 4]; out fp32 [R, width].

    Strides in elements, those of the cache in bytes.
    """
    unit = plan + tl.program_id(0) * 4
    row = tl.load(unit).to(tl.int64)
    if row < 0:
        return
    begin = tl.load(unit + 1) * 256
    end = tl.minimum(begin + tl.load(unit + 2) * 256, tl.load(unit + 3))
    table = block_tables + tl.load(row_request + row).to(tl.int64) * table_stride
    scores = out + row * out_stride
    lane = tl.arange(0, TILE)
    place = lane % 64
    CHUNKS: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    query_a, query_b, w, row_is_wide = _query(  # pyright: ignore[reportGeneralTypeIssues]
        q, q_scale, weights, row, 0, KIND, HEADS, DIM, HEAD_TILE, UNITS
    )
    for chunk in range(1, CHUNKS):
        row_is_wide |= _query(q, q_scale, weights, row, chunk * HEAD_TILE, KIND, HEADS, DIM, HEAD_TILE, UNITS)[3]
    # Triton 3.6 and 3.7 cannot start a loop's FP4 product for sm_100 at a zero that they know
    zero = begin.to(tl.float32) * 0.0
    marked = tl.zeros((TILE,), tl.int32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        entry = start + lane
        seen = entry < end
        # nothing of the table or of a page is read behind the end
        page = cache + tl.load(table + entry // 64, seen, 0).to(tl.int64) * page_stride
        key_a, key_b, scale, wide = _keys(page, place, seen, KIND, DIM, TILE, UNITS)
        score = _weighted(key_a, key_b, query_a, query_b, w, 0, KIND, HEADS, HEAD_TILE, UNITS, WIDEN, zero)
        for chunk in range(1, CHUNKS):
            # more than one does not fit beside the keys
            a, b, w_chunk, _known = _query(
                q, q_scale, weights, row, chunk * HEAD_TILE, KIND, HEADS, DIM, HEAD_TILE, UNITS
            )
            score += _weighted(
                key_a, key_b, a, b, w_chunk, chunk * HEAD_TILE, KIND, HEADS, HEAD_TILE, UNITS, WIDEN, zero
            )
        if KIND == "bf16":
            tl.store(scores + entry, score, seen)
        else:
            wide |= row_is_wide
            marked |= tl.where(seen, wide, 0)
            tl.store(scores + entry, score * scale, seen & (wide == 0))

    if KIND != "bf16":  # noqa: SIM102, this one is decided when the kernel is compiled
        if tl.max(marked, 0) > 0:
            for start in range(begin, end, TILE):
                entry = start + lane
                seen = entry < end
                page = cache + tl.load(table + entry // 64, seen, 0).to(tl.int64) * page_stride
                wide = _keys(page, place, seen, KIND, DIM, TILE, UNITS)[3]
                wide = seen & ((wide | row_is_wide) > 0)
                if tl.max(wide.to(tl.int32), 0) > 0:
                    score = exact_scores(q, q_scale, weights, row, page, place, wide, KIND, HEADS, DIM)
                    tl.store(scores + entry, score, wide)
