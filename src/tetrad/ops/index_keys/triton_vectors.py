"""Vectors in Triton as tuples of pieces [vectors, 32], and the steps that make index keys and queries of them."""

# pyright: reportGeneralTypeIssues=false
# Triton unrolls loops over static_range, which is not iterable to anyone else

from __future__ import annotations

import triton
import triton.language as tl

PIECE = tl.constexpr(32)
"""Channels of a piece."""


@triton.jit
def rounded(x, BF16: tl.constexpr):
    """fp32 numbers as they are, or as the nearest bf16 ones."""
    if BF16:
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def load_pieces(vectors, real, DIM: tl.constexpr):
    """The fp32 pieces of vectors; zeros for those that are not real. vectors: pointers [vectors]."""
    pieces = ()
    for piece in tl.static_range(DIM // PIECE):
        channel = piece * PIECE + tl.arange(0, PIECE)
        x = tl.load(vectors[:, None] + channel[None, :], real[:, None], 0.0)
        pieces += (x.to(tl.float32),)
    return pieces


@triton.jit
def _one_of(x, index: tl.constexpr, AXIS: tl.constexpr):
    """``x`` at one index of its last axis, or of the one before it: exact for numbers that are not -0."""
    size: tl.constexpr = x.shape[AXIS]
    here = tl.arange(0, size) == index
    if len(x.shape) > AXIS + 1:
        here = here[:, None]
    return tl.sum(tl.where(here[None], x, 0.0), AXIS)


@triton.jit
def normed(pieces, weight, eps, DIM: tl.constexpr, BF16: tl.constexpr, VECTORS: tl.constexpr):
    """Cast and RMSNorm.

    Squares are summed over the pieces, then over the 4 parts of a piece, then over the 8 channels of a part, each time
    one after the other: as torch does it on x86, with 4 accumulators of 8 numbers.
    """
    values = ()
    sums = tl.zeros((VECTORS, PIECE), tl.float32)
    for piece in tl.static_range(DIM // PIECE):
        x = rounded(pieces[piece], BF16)
        sums += x * x
        values += (x,)
    parts = tl.reshape(sums, (VECTORS, 4, 8))
    channels = _one_of(parts, 0, 1)
    for part in tl.static_range(1, 4):
        channels += _one_of(parts, part, 1)
    total = _one_of(channels, 0, 1)
    for channel in tl.static_range(1, 8):
        total += _one_of(channels, channel, 1)
    factor = tl.div_rn(1.0, tl.sqrt_rn(total * (1.0 / DIM) + eps))[:, None]
    result = ()
    for piece in tl.static_range(DIM // PIECE):
        w = tl.load(weight + piece * PIECE + tl.arange(0, PIECE)).to(tl.float32)
        result += (rounded(values[piece] * factor * w[None, :], BF16),)
    return result


@triton.jit
def _turned_piece(x, cos, sin, real, FIRST: tl.constexpr, BF16: tl.constexpr, VECTORS: tl.constexpr):
    """RoPE of one piece, whose first two channels are the angles' pair FIRST; pairs below 0 are left as they are."""
    pair = FIRST + tl.arange(0, PIECE // 2)
    turning = real[:, None] & (pair >= 0)[None, :]
    c = tl.load(cos[:, None] + pair[None, :], turning, 0.0)
    s = tl.load(sin[:, None] + pair[None, :], turning, 0.0)
    a, b = tl.split(tl.reshape(x, (VECTORS, PIECE // 2, 2)))
    y = tl.join(rounded(a * c - b * s, BF16), rounded(a * s + b * c, BF16))
    if FIRST < 0:
        y = tl.where((pair >= 0)[None, :, None], y, tl.join(a, b))
    return tl.reshape(y, (VECTORS, PIECE))


@triton.jit
def apply_rope(
    pieces, cos, sin, real, DIM: tl.constexpr, ROPE: tl.constexpr, BF16: tl.constexpr, VECTORS: tl.constexpr
):
    """RoPE of the last ROPE channels. cos, sin: pointers [vectors] to the angles of each."""
    result = ()
    for piece in tl.static_range(DIM // PIECE):
        x = pieces[piece]
        if (piece + 1) * PIECE > DIM - ROPE:
            x = _turned_piece(x, cos, sin, real, (piece * PIECE - DIM + ROPE) // 2, BF16, VECTORS)
        result += (x,)
    return result


@triton.jit
def _whole_pass(pieces, HALF: tl.constexpr, COUNT: tl.constexpr):
    """A Hadamard pass between pieces HALF apart."""
    result = ()
    for piece in tl.static_range(COUNT):
        if piece // HALF % 2:
            result += (pieces[piece - HALF] - pieces[piece],)
        else:
            result += (pieces[piece] + pieces[piece + HALF],)
    return result


@triton.jit
def _inner_pass(x, HALF: tl.constexpr, VECTORS: tl.constexpr):
    """A Hadamard pass between channels HALF apart of one piece."""
    x = tl.reshape(x, (VECTORS, PIECE // (2 * HALF), 2, HALF))
    sign = tl.where(tl.arange(0, 2) == 0, 1.0, -1.0)[None, None, :, None]
    # the other one of the pair, plus or minus this one
    return tl.reshape(tl.fma(x, sign, tl.flip(x, 2)), (VECTORS, PIECE))


@triton.jit
def rotated(pieces, DIM: tl.constexpr, BF16: tl.constexpr, VECTORS: tl.constexpr):
    """The Hadamard rotation: one pass for each bit of the channel's number, the top bit first."""
    for level in tl.static_range(4):
        if DIM >> (level + 1) >= PIECE:
            pieces = _whole_pass(pieces, (DIM // PIECE) >> (level + 1), DIM // PIECE)
    scale: tl.constexpr = DIM**-0.5
    result = ()
    for piece in tl.static_range(DIM // PIECE):
        x = pieces[piece]
        for level in tl.static_range(5):
            x = _inner_pass(x, PIECE >> (level + 1), VECTORS)
        result += (rounded(x * scale, BF16),)
    return result
