"""Scores of fp32 keys in Triton: without tensor cores on most GPUs, so in small pieces that fit into registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def indexer_logits_fp32_kernel(
    q,
    weights,
    cache,
    block_tables,
    row_request,
    plan,
    out,
    page_stride,
    table_stride,
    out_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """One work item. q fp32, cache bytes, plan int32 [slots, 4], out fp32 [R, width].

    Strides in elements, those of the cache in bytes. Channels are summed up 16 at a time.
    """
    unit = plan + tl.program_id(0) * 4
    row = tl.load(unit).to(tl.int64)
    if row < 0:
        return
    begin = tl.load(unit + 1) * 256
    end = tl.minimum(begin + tl.load(unit + 2) * 256, tl.load(unit + 3))
    table = block_tables + tl.load(row_request + row).to(tl.int64) * table_stride
    lane = tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        entry = start + lane
        seen = entry < end
        # nothing of the table or of a page is read behind the end
        page = cache + tl.load(table + entry // 64, seen, 0).to(tl.int64) * page_stride
        keys = page.to(tl.pointer_type(tl.float32), bitcast=True)
        score = tl.zeros((TILE,), tl.float32)
        for first_head in range(0, HEADS, HEAD_TILE):
            head = first_head + tl.arange(0, HEAD_TILE)
            real = head < HEADS
            vector = row * HEADS + head
            product = tl.zeros((TILE, HEAD_TILE), tl.float32)
            for first in range(0, DIM, 16):
                channel = first + tl.arange(0, 16)
                k = tl.load(keys[:, None] + ((entry % 64)[:, None] * DIM + channel[None, :]), seen[:, None], 0.0)
                x = tl.load(q + (vector[None, :] * DIM + channel[:, None]), real[None, :], 0.0)
                product = tl.dot(k, x, product, input_precision="ieee")
            relu = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
            # heads that are only padding: zero times an infinite key would be NaN
            relu = tl.where(real[None, :], relu, 0.0)
            score += tl.sum(relu * tl.load(weights + vector, real, 0.0)[None, :], 1)
        tl.store(out + row * out_stride + entry, score, seen)
