"""e8m0: a scale that is a power of two, as one byte.

byte b stands for 2^(b - 127); b = 255 is NaN; there is no zero, no sign and no infinity (OCP Microscaling formats 1.0,
section 5.4.1). Bytes 1 to 254 are the exponent field of a normal fp32 number, so most conversions are shifts. The two
ends are not: byte 0 is 2^-127, which fp32 holds as a subnormal, and byte 255 shifted would be infinity.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tetrad.formats.arguments import check_is_tensor, described

NAN_BYTE = 255
"""The byte of a group that holds an infinity or a NaN."""

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_MAGNITUDE_MASK = 0x7FFFFFFF
_INFINITY = 0x7F800000
_TOP_MANTISSA_BIT = 1 << (_MANTISSA_BITS - 1)


def as_bytes(scales: Tensor) -> Tensor:
    """The bytes of ``scales`` as uint8, without a copy.

    Args:
        scales: uint8, int8 (how safetensors files carry raw bytes) or ``torch.float8_e8m0fnu``, any shape

    Raises:
        TypeError: for any other dtype, since a number that is not a byte would silently change its meaning
    """
    check_is_tensor("scales", scales)
    if scales.dtype == torch.uint8:
        return scales
    if scales.dtype in (torch.int8, torch.float8_e8m0fnu):
        return scales.view(torch.uint8)
    raise TypeError(f"e8m0 scales are bytes (uint8, int8 or float8_e8m0fnu), not {scales.dtype}")


def decode(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127), NaN for 255; the shape of ``scales``.

    Exact in fp32, bf16 and fp64. fp16 ends at 2^15 and 2^-24: beyond that it gives infinity and zero.

    Args:
        scales: e8m0 bytes as :func:`as_bytes` takes them
        dtype: torch.float64, torch.float32, torch.bfloat16 or torch.float16

    Raises:
        TypeError: for another dtype of either
    """
    product_dtype(dtype)
    index = as_bytes(scales).int()
    return _numbers(index.device)[index].to(dtype)


@functools.cache
def _numbers(device: torch.device) -> Tensor:
    """fp32 [256], what each byte stands for."""
    exponent = torch.arange(256, dtype=torch.int32, device=device)
    # at either end the right number has exactly one bit more than the shift gives: 2^-127 is the top bit of a
    # subnormal's mantissa, and the same bit makes a quiet NaN out of infinity
    at_an_end = ((exponent == 0) | (exponent == NAN_BYTE)).to(torch.int32)
    return ((exponent << _MANTISSA_BITS) | (at_an_end * _TOP_MANTISSA_BIT)).view(torch.float32)


def reciprocal(scales: Tensor) -> Tensor:
    """fp32 2^(127 - byte), NaN for 255: what to multiply by in order to divide by the scale, exactly.

    The product with any fp32 number is exact unless it falls below 2^-126, far under every rounding threshold of the
    formats here.

    Args:
        scales: e8m0 bytes as :func:`as_bytes` takes them
    """
    # in a byte's arithmetic 254 - 255 is 255 again, so NaN stays NaN
    return decode(254 - as_bytes(scales))


def encode_ceil(values: Tensor) -> Tensor:
    """The byte of the smallest power of two that is not below each value; uint8, the shape of ``values``.

    Infinity, NaN and everything above 2^127 give 255; zero and everything up to 2^-127 give 0. The sign is ignored.
    Read off the bits: the exponent, plus one if any mantissa bit is set, so that no logarithm rounds.

    Args:
        values: fp32, magnitudes

    Raises:
        TypeError: for any other dtype
    """
    check_is_tensor("values", values)
    if values.dtype != torch.float32:
        raise TypeError(f"encode_ceil reads fp32 bits, it cannot take {values.dtype}")
    bits = (values.detach().view(torch.int32) & _MAGNITUDE_MASK).clamp_max_(_INFINITY)
    # a subnormal is at most 2^-127 up to this mantissa
    return torch.where(bits <= _TOP_MANTISSA_BIT, 0, (bits + _MANTISSA_MASK) >> _MANTISSA_BITS).to(torch.uint8)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a 4-bit or 8-bit value times a scale is computed when the result is wanted in ``dtype``.

    The result's own dtype, in which the product is exact, except for fp16: its range is too small for the scale alone,
    so that product is made in fp32 and cast once.

    Raises:
        TypeError: if ``dtype`` is not one of fp64, fp32, bf16, fp16
    """
    if dtype in (torch.float64, torch.float32, torch.bfloat16):
        return dtype
    if dtype == torch.float16:
        return torch.float32
    raise TypeError(
        f"dequantised values are torch.float64, torch.float32, torch.bfloat16 or torch.float16; dtype is "
        f"{described(dtype)}"
    )
