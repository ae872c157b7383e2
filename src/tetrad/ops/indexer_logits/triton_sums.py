"""The product of a tile of keys with query vectors, relu, and the weighted sum over the heads, in Triton.

A score must have the same bits whether its row is scored alone or in a group. The tensor cores sum over the channels of
one pair in one way, but a reduction by Triton follows the layout of the product, which depends on its size, and the
compiler may round a product before it is added or not. So the order of the sum over heads is written down here.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weighted_sum(x, w, OUTER: tl.constexpr, INNER: tl.constexpr, HEAD_TILE: tl.constexpr, LOW: tl.constexpr):
    """[keys, OUTER * INNER] of x [keys, vectors] and w [vectors]: SUM over the heads of w * x, a tree of sums of two.

    A sum of two does not depend on the order, and where a product meets a sum it is said here which is rounded. So the
    result does not depend on the layout of x, which another number of rows changes. First come the heads that are one
    thread's in the layouts of most tensor cores, then other lanes', then other warps'.
    """
    KEYS: tl.constexpr = x.shape[0]
    even, odd = tl.split(tl.reshape(x, (KEYS, x.shape[1] // 2, 2)))
    w_even, w_odd = tl.split(tl.reshape(w, (w.shape[0] // 2, 2)))
    x = tl.fma(even, tl.broadcast_to(w_even[None, :], even.shape), odd * w_odd[None, :])
    HIGH: tl.constexpr = HEAD_TILE // LOW
    if HIGH >= 8:
        x = tl.sum(tl.reshape(x, (KEYS, OUTER, 2, 2 * INNER * LOW)), 2)
    if HIGH >= 4:
        x = tl.sum(tl.reshape(x, (KEYS, OUTER, 2, INNER * LOW)), 2)
    PAIRS: tl.constexpr = OUTER * INNER * (2 if HIGH >= 2 else 1)
    if LOW >= 32:
        x = tl.sum(tl.reshape(x, (KEYS, PAIRS, 2, 8)), 2)
        x = tl.sum(tl.reshape(x, (KEYS, PAIRS, 2, 4)), 2)
    x = tl.sum(tl.reshape(x, (KEYS, PAIRS, 2, 2)), 2)
    x = tl.sum(x, 2)
    if HIGH >= 2:
        x = tl.sum(tl.reshape(x, (KEYS, OUTER, 2, INNER)), 2)
    return tl.reshape(x, (KEYS, OUTER * INNER))


@triton.jit
def weighted_products(
    key_a,
    key_b,
    query_a,
    query_b,
    w,
    is_head,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    LOW: tl.constexpr,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    UNITS: tl.constexpr,
    WIDEN: tl.constexpr,
    zero,
):
    """SUM over some heads of weight * relu(<query, key>): fp32 [keys, ROWS]."""
    if KIND == "fp4":
        if UNITS:
            start = tl.zeros((key_a.shape[0], ROWS * HEAD_TILE), tl.float32) + zero
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
        relu = tl.where(is_head[None, :], relu, 0.0)
    return _weighted_sum(relu, w, ROWS // INNER, INNER, HEAD_TILE, LOW)
