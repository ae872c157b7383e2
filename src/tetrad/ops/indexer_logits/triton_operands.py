"""Query vectors and keys as operands of the tensor cores, in Triton, and which of them are out of their reach."""

from __future__ import annotations

import triton
import triton.language as tl

from tetrad.ops.indexer_logits.triton_numbers import (
    e2m1_high,
    e2m1_low,
    e4m3_as_fp16,
    power_of_two,
    truncated_bf16,
)


@triton.jit
def query_vectors(
    q,
    q_scale,
    weights,
    vector,
    real,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    UNITS: tl.constexpr,
):
    """(a, b, weights, wide) of the query vectors ``vector`` where ``real``: their channels [K, vectors] for the
    products, in two parts where there are two products or a part and its scales, the weights with all factors, and
    which of them have a scale or weight far from 1.
    """
    VECTORS: tl.constexpr = vector.shape[0]
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
            a = tl.trans(tl.reshape(packed, (VECTORS, DIM // 2)))
            b = scale.to(tl.uint8)
        else:
            power = power_of_two(scale + (14 - 127))[:, :, None]
            a = tl.trans(tl.reshape(truncated_bf16(e2m1_low(packed) * power), (VECTORS, DIM // 2)))
            b = tl.trans(tl.reshape(truncated_bf16(e2m1_high(packed) * power), (VECTORS, DIM // 2)))
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
    return a, b, w, wide.to(tl.int32)


@triton.jit
def keys_of_page(page, place, seen, KIND: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr):
    """(a, b, scale, wide) of keys at ``place`` of ``page`` (pointers to bytes): as :func:`query_vectors`, [keys, K]; a
    factor of the whole key; and which keys are to be scored again.
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
