"""MXFP4: E2M1 values, two to a byte, with one e8m0 scale per 32 consecutive values of the last dimension.

A code's bit 3 is the sign and its bits 0 to 2 the magnitude: 0, 0.5, 1, 1.5, 2, 3, 4, 6. The low nibble of a byte holds
the element with the even index. The scale rule is the one DeepSeek-V4 was trained with; the packing is that of its
checkpoints:

    scale = 2^ceil(log2(max(amax, 6 * 2^-126) * fp32(1/6)))        code = nearest E2M1 of x / scale, ties to even codes
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats import e8m0
from tetrad.formats.arguments import check_is_tensor

GROUP_SIZE = 32
"""Values that share one scale."""

LARGEST = 6.0
"""The largest E2M1 magnitude."""

CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each of the 16 codes."""

_SMALLEST_AMAX = 6.0 * 2.0**-126
_INVERSE_LARGEST = 0xAAAAAB * 2.0**-26
"""fp32(1/6), spelled out since the rule is about its bits."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` in MXFP4: (packed uint8 [..., D/2], scales uint8 [..., D/32]).

    The smallest scale is 2^-126 (byte 1, also for a group of zeros), the largest that a finite fp32 group gets is byte
    253. What rounds to zero keeps its sign. A group with an infinity or a NaN gets byte 255 and zeros for codes.
    Every group is computed on its own: no result depends on what else is in the tensor. No gradient flows through.

    Args:
        x: [..., D] in fp32, bf16 or fp16, D a multiple of 32

    Raises:
        ValueError: if D is not a multiple of 32
        TypeError: for other dtypes. fp64 is among them: through fp32 it would be rounded twice
    """
    check_is_tensor("what is quantised", x)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"MXFP4 quantises float32, bfloat16 or float16, not {x.dtype}; cast it first")
    if x.dim() == 0 or x.shape[-1] % GROUP_SIZE:
        raise ValueError(
            f"MXFP4 needs a last dimension that is a multiple of {GROUP_SIZE}; got the shape {list(x.shape)}"
        )
    groups = x.detach().float().unflatten(-1, (x.shape[-1] // GROUP_SIZE, GROUP_SIZE))
    amax = groups.abs().amax(-1).clamp_(min=_SMALLEST_AMAX)
    scales = e8m0.encode_ceil(amax * _INVERSE_LARGEST)
    # NaN here means a group with byte 255; as an integer it would be whatever the device makes of it
    magnitude = (groups * e8m0.reciprocal(scales).unsqueeze(-1)).abs_().nan_to_num_(nan=0.0)
    codes = _nearest_code(magnitude).to(torch.uint8)
    codes |= torch.signbit(groups).to(torch.uint8) << 3
    return pack(codes.flatten(-2)), scales


def dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., D] of MXFP4 data: E2M1 value times scale.

    Exact in fp32, bf16 and fp64 as long as the product is in range: from 2^128 on, which the largest finite fp32 rounds
    up to, it is infinite in fp32 and bf16. fp16 rounds once and overflows above 65504.

    Args:
        packed: [..., D/2], two codes to a byte: uint8, int8 (as checkpoints hold them) or float4_e2m1fn_x2
        scales: [..., D/32], e8m0 bytes or float8_e8m0fnu
        dtype: float64, float32, bfloat16 or float16

    Raises:
        ValueError: if the two shapes do not belong together
        TypeError: for other dtypes
    """
    data, scale_bytes = _packed_bytes(packed), e8m0.as_bytes(scales)
    half_group = GROUP_SIZE // 2
    expected = (*data.shape[:-1], data.shape[-1] // half_group) if data.dim() else ()
    if data.dim() == 0 or data.shape[-1] % half_group or scale_bytes.shape != expected:
        raise ValueError(
            f"MXFP4 data of shape {list(data.shape)} (two values to a byte) and scales of shape "
            f"{list(scale_bytes.shape)} do not belong together: each scale goes with {half_group} bytes"
        )
    product = e8m0.product_dtype(dtype)
    # the two values of every possible byte; one look-up is several times faster than taking nibbles apart
    pairs = _code_value(unpack(torch.arange(256, dtype=torch.uint8, device=data.device).unsqueeze(-1))).to(product)
    values = pairs.index_select(0, data.flatten().to(torch.int32)).view(*scale_bytes.shape, GROUP_SIZE)
    values *= e8m0.decode(scale_bytes, product).unsqueeze(-1)
    return values.flatten(-2).to(dtype)


def pack(codes: Tensor) -> Tensor:
    """Codes uint8 [..., D], each 0 to 15, as bytes uint8 [..., D/2]: the even index in the low nibble.

    Raises:
        ValueError: if D is odd
    """
    check_is_tensor("codes", codes)
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes are uint8, not {codes.dtype}")
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise ValueError(
            f"two codes share a byte, so the last dimension must be even; got the shape {list(codes.shape)}"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The codes uint8 [..., 2 * B] of bytes [..., B]; the inverse of :func:`pack`.

    Args:
        packed: uint8, int8 or float4_e2m1fn_x2
    """
    data = _packed_bytes(packed)
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def _packed_bytes(packed: Tensor) -> Tensor:
    check_is_tensor("packed", packed)
    if packed.dtype == torch.uint8:
        return packed
    if packed.dtype in (torch.int8, torch.float4_e2m1fn_x2):
        return packed.view(torch.uint8)
    raise TypeError(f"packed MXFP4 is uint8, int8 or float4_e2m1fn_x2, not {packed.dtype}")


def _nearest_code(magnitude: Tensor) -> Tensor:
    """The E2M1 code of magnitudes up to 6 (or a rounding error above), ties to even, still as fp32.

    Codes 0-4, 4-6 and 6-7 lie on three lines of falling slope, so the code is the least of the three, each rounded.
    Adding an even number or comparing does not disturb ties: even codes stay even.
    """
    code = (magnitude * 2.0).round_()
    torch.minimum(code, magnitude.round().add_(2.0), out=code)
    return torch.minimum(code, (magnitude * 0.5).round_().add_(4.0), out=code)


def _code_value(codes: Tensor) -> Tensor:
    """fp32 values of uint8 codes: the inverse of the three lines, hence the greatest of them, and the sign."""
    magnitude = (codes & 7).to(torch.float32)
    value = torch.maximum(magnitude * 0.5, torch.maximum(magnitude - 2.0, magnitude * 2.0 - 8.0))
    return torch.where(codes >= 8, -value, value)
