"""Vectors in Triton, as tuples of pieces, to the bytes in which index keys and queries are stored."""

# pyright: reportGeneralTypeIssues=false
# Triton unrolls loops over static_range, which is not iterable to anyone else

from __future__ import annotations

import triton
import triton.language as tl

from tetrad.ops.index_keys.triton_vectors import PIECE


@triton.jit
def _magnitude(x):
    """The bits of numbers without their signs: in the order of the magnitudes, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_byte(magnitude, SMALLEST: tl.constexpr, INVERSE_LARGEST: tl.constexpr):
    """The e8m0 byte, as int32, of the largest magnitude: see :func:`tetrad.formats.e8m0.encode_ceil`."""
    amax = tl.maximum(magnitude, SMALLEST).to(tl.float32, bitcast=True)
    bits = _magnitude(amax * INVERSE_LARGEST)
    return tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)


@triton.jit
def _inverse(byte):
    """fp32 2^(127 - byte) [vectors, 1] for bytes 1 to 253."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _store_fp4(x, data, real, VECTORS: tl.constexpr):
    """Store one piece at ``data``, pointers [vectors] to 16 bytes, as :mod:`tetrad.formats.mxfp4` does. Returns the
    bytes of its scales, int32 [vectors].
    """
    # 6 * 2^-126 and 1/6
    byte = _scale_byte(tl.max(_magnitude(x), 1), 0x01C00000, 0xAAAAAB * 2.0**-26)
    inverse, magnitude = _inverse(byte), tl.abs(x)
    # the three lines of E2M1 codes, each rounded to an integer in the last bits of a number of 2^23 and more
    code = tl.fma(magnitude, inverse * 2.0, 8388608.0).to(tl.int32, bitcast=True)
    code = tl.minimum(code, tl.fma(magnitude, inverse, 8388610.0).to(tl.int32, bitcast=True))
    code = tl.minimum(code, tl.fma(magnitude, inverse * 0.5, 8388612.0).to(tl.int32, bitcast=True))
    code = (code & 7) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    low, high = tl.split(tl.reshape(code, (VECTORS, PIECE // 2, 2)))
    # zeros with their signs where the group has an infinity or a NaN
    kept = tl.where(byte == 255, 0x88, 0xFF)[:, None]
    packed = (low | (high << 4)) & kept
    place = tl.arange(0, PIECE // 2)
    tl.store(data[:, None] + place[None, :], packed.to(tl.uint8), real[:, None])
    return byte


@triton.jit
def _e4m3(x, byte):
    """The E4M3 bytes, as int32, of numbers divided by a vector's scale; NaN where the scale is. By integer operations,
    since not every GPU has the conversion.
    """
    quotient = tl.abs(x) * _inverse(byte)
    bits = quotient.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6, in units of 2^-9
    subnormal = (quotient + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, subnormal, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(byte[:, None] == 255, 0x7F, code)


@triton.jit
def _store_numbers(pieces, data, real, DIM: tl.constexpr):
    """data: pointers [vectors] to the numbers of each, which are rounded to their type."""
    channel = tl.arange(0, PIECE)[None, :]
    for piece in tl.static_range(DIM // PIECE):
        tl.store(data[:, None] + (piece * PIECE + channel), pieces[piece], real[:, None])


@triton.jit
def store_pieces(pieces, data, scales, real, DIM: tl.constexpr, KIND: tl.constexpr, VECTORS: tl.constexpr):
    """Encode vectors and store them. data, scales: byte pointers [vectors] to what each has of either."""
    channel = tl.arange(0, PIECE)[None, :]
    if KIND == "fp4":
        group = tl.arange(0, DIM // PIECE)[None, :]
        byte = tl.zeros((VECTORS, DIM // PIECE), tl.int32)
        for piece in tl.static_range(DIM // PIECE):
            own = _store_fp4(pieces[piece], data + piece * (PIECE // 2), real, VECTORS)
            byte = tl.where(group == piece, own[:, None], byte)
        tl.store(scales[:, None] + group, byte.to(tl.uint8), real[:, None])
    elif KIND == "fp8":
        largest = _magnitude(pieces[0])
        for piece in tl.static_range(1, DIM // PIECE):
            largest = tl.maximum(largest, _magnitude(pieces[piece]))
        # 1e-4 and 1/448
        byte = _scale_byte(tl.max(largest, 1), 0x38D1B717, 0x924925 * 2.0**-32)
        for piece in tl.static_range(DIM // PIECE):
            code = _e4m3(pieces[piece], byte).to(tl.uint8)
            tl.store(data[:, None] + (piece * PIECE + channel), code, real[:, None])
        bits = tl.where(byte == 255, 0x7FC00000, byte << 23)
        tl.store(scales.to(tl.pointer_type(tl.int32), bitcast=True), bits, real)
    elif KIND == "bf16":
        _store_numbers(pieces, data.to(tl.pointer_type(tl.bfloat16), bitcast=True), real, DIM)
    else:
        _store_numbers(pieces, data.to(tl.pointer_type(tl.float32), bitcast=True), real, DIM)
