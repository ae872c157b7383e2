"""Scores whose scales are too far from 1 for the products of tensor cores: in fp64, one head after another.

fp64 has room for any two scales and any weight, and a NaN scale stays NaN. Many times slower than the ordinary way,
and needed for next to no key, so it is written for few registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tetrad.ops.indexer_logits.triton_numbers import e2m1_high, e2m1_low, e4m3_as_fp16


@triton.jit
def _power_of_two_fp64(exponent):
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def exact_scores(
    q, q_scale, weights, row, page, place, seen, KIND: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):
    """fp32 scores of one row and the keys at ``place`` of ``page`` (pointers to bytes), where ``seen``."""
    score = tl.zeros(place.shape, tl.float64)
    key_scale = page + 64 * (DIM // 2 if KIND == "fp4" else DIM)
    for head in range(HEADS):
        vector = row * HEADS + head
        product = tl.zeros(place.shape, tl.float64)
        for group in range(DIM // 32):
            if KIND == "fp4":
                byte = group * 16 + tl.arange(0, 16)
                k = tl.load(page[:, None] + (place[:, None] * (DIM // 2) + byte[None, :]), seen[:, None], 0)
                x = tl.load(q + vector * (DIM // 2) + byte)[None, :]
                # products of small integers, but for a factor: exact in any order
                part = tl.sum(e2m1_low(k) * e2m1_low(x) + e2m1_high(k) * e2m1_high(x), 1)
                k_byte = tl.load(key_scale + place * (DIM // 32) + group, seen, 127).to(tl.int32)
                q_byte = tl.load(q_scale + vector * (DIM // 32) + group).to(tl.int32)
                # 2^-14 of both codes, and 2^-127 of both bytes
                power = _power_of_two_fp64(k_byte + q_byte + (28 - 254))
                broken = (k_byte == 255) | (q_byte == 255)
                product += tl.where(broken, float("nan"), part.to(tl.float64) * power)
            else:
                channel = group * 32 + tl.arange(0, 32)
                k = tl.load(page[:, None] + (place[:, None] * DIM + channel[None, :]), seen[:, None], 0)
                x = tl.load(q + vector * DIM + channel)[None, :]
                part = e4m3_as_fp16(k).to(tl.float32) * e4m3_as_fp16(x).to(tl.float32)
                product += tl.sum(part, 1).to(tl.float64)
        if KIND == "fp8":
            scale = tl.load(key_scale.to(tl.pointer_type(tl.float32), bitcast=True) + place, seen, 1.0)
            product *= scale.to(tl.float64) * tl.load(q_scale + vector).to(tl.float64)
        # relu that keeps NaN
        score += tl.load(weights + vector).to(tl.float64) * tl.where(product < 0, 0.0, product)
    return score.to(tl.float32)
