"""E2M1 and E4M3 numbers out of their bytes, in Triton, by integer operations and exact products alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1_low(packed):
    """fp32 of the low codes of packed bytes, times 2^-14, exactly.

    The three magnitude bits are where fp16 keeps the end of its exponent and the start of its mantissa; 0.5 becomes a
    subnormal number, as it is one in E2M1.
    """
    byte = packed.to(tl.int16)
    bits = ((byte & 0x7) << 9) | ((byte & 0x8) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_high(packed):
    """The same of the high codes."""
    byte = packed.to(tl.int16)
    bits = ((byte & 0x70) << 5) | ((byte & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def power_of_two(exponent):
    """fp32 2^exponent for int32 exponents from -126 to 127; anything finite or not for others."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def truncated_bf16(x):
    """The upper half of fp32 numbers: exact where the lower half is zero, and cheaper than rounding everywhere."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e4m3_as_fp16(byte):
    """fp16 of E4M3 bytes, exactly; 0x7F and 0xFF stay NaN."""
    byte = byte.to(tl.int16)
    magnitude = byte & 0x7F
    # one more than the largest number sets bit 7, which becomes the exponent of infinity and NaN
    bits = (magnitude << 7) | ((byte & 0x80) << 8) | (((magnitude + 1) & 0x80) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0
