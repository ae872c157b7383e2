"""Exact top-k in Triton, for every GPU. The arguments are checked by :mod:`tetrad.ops.topk_indices`.

One program has a row. It finds the key of the k-th score byte by byte, each from a histogram of that byte over the row,
and then writes the columns of larger keys, and the first ones of equal keys, in ascending order: running counts give
every column its place, so nothing depends on timing.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 4096


def topk_indices(logits: Tensor, visible_end: Tensor, k: int, out: Tensor) -> None:
    """Fill ``out`` int32 [R, k], the chosen columns in ascending order; see
    :func:`tetrad.ops.topk_indices.topk_indices`.
    """
    rows, width = logits.shape
    if not rows:
        return
    block = min(_LARGEST_BLOCK, 1 << (max(width, 128) - 1).bit_length())
    with torch.cuda.device(logits.device) if logits.is_cuda else contextlib.nullcontext():
        launch = topk_kernel[(rows,)]
        strides = logits.stride(0), out.stride(0)
        options: dict[str, Any] = {"BLOCK": block, "num_warps": warps_for(block)}
        launch(logits, visible_end, out, k, width, *strides, **options)


def warps_for(block: int) -> int:
    """Warps of a program: 16 scores a thread at the largest block."""
    return max(1, min(8, block // 256))


@triton.jit
def _key(score):
    """uint32 in the order of the scores: NaN, -inf, ..., 0, ..., inf. Integers have no modes."""
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # one zero of two
    bits = tl.where(magnitude == 0, 0, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = ordered.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(magnitude > 0x7F800000, 0, key).to(tl.uint32)


@triton.jit
def topk_kernel(logits, visible_end, out, k, width, logits_stride, out_stride, BLOCK: tl.constexpr):
    """One row. logits fp32 [R, width], visible_end int32 [R], out int32 [R, k]; strides in elements."""
    row = tl.program_id(0).to(tl.int64)
    scores = logits + row * logits_stride
    chosen = out + row * out_stride
    end = tl.minimum(tl.load(visible_end + row), width)
    lane = tl.arange(0, BLOCK)
    if end <= k:
        for start in range(0, k, BLOCK):
            place = start + lane
            tl.store(chosen + place, tl.where(place < end, place, -1), mask=place < k)
    else:
        byte = tl.arange(0, 256)
        prefix = tl.full((), 0, tl.uint32)
        need = k
        for step in range(4):
            shift = 24 - 8 * step
            counts = tl.zeros((256,), tl.int32)
            outside = 0
            for start in range(0, end, BLOCK):
                column = start + lane
                key = _key(tl.load(scores + column, mask=column < end, other=0.0))
                # two shifts: one by 32 would not be defined
                inside = (column < end) & (((key ^ prefix) >> shift) >> 8 == 0)
                digit = tl.where(inside, (key >> shift) & 255, 0).to(tl.int32)
                counts += tl.histogram(digit, 256)
                outside += tl.sum((~inside).to(tl.int32), 0)
            counts -= tl.where(byte == 0, outside, 0)
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
            here = (above < need) & (above + counts >= need)
            prefix = prefix | (tl.sum(tl.where(here, byte, 0), 0).to(tl.uint32) << shift)
            need -= tl.sum(tl.where(here, above, 0), 0)

        larger_before = 0
        equal_before = 0
        for start in range(0, end, BLOCK):
            column = start + lane
            key = _key(tl.load(scores + column, mask=column < end, other=0.0))
            larger = ((key > prefix) & (column < end)).to(tl.int32)
            equal = ((key == prefix) & (column < end)).to(tl.int32)
            larger_rank = larger_before + tl.cumsum(larger, 0) - larger
            equal_rank = equal_before + tl.cumsum(equal, 0) - equal
            taken = (larger > 0) | ((equal > 0) & (equal_rank < need))
            tl.store(chosen + larger_rank + tl.minimum(equal_rank, need), column, mask=taken)
            larger_before += tl.sum(larger, 0)
            equal_before += tl.sum(equal, 0)
