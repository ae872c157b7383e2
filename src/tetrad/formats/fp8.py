"""FP8: E4M3 without infinities (largest 448), with scales that are powers of two.

    scale = max(amax, 1e-4) * fp32(1/448), rounded up to a power of two
    value = E4M3 of x / scale, to the nearest, ties to even

Scales are e8m0 bytes, except in :func:`quantize_index`, whose users keep them as fp32. The rule is the one DeepSeek-V4
was trained with: groups of 64 along a KV entry, of 128 along the input of a linear, tiles of 128x128 in a weight. A
group or tile at the edge may be short and simply has fewer values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.errors import check_integer
from tetrad.formats import e8m0
from tetrad.formats.arguments import check_is_tensor, described

LARGEST = 448.0
"""The largest E4M3 magnitude."""

LINEAR_GROUP = 128
"""Values of a linear's input that share one scale."""

WEIGHT_BLOCK = (128, 128)
"""Rows and columns of a weight that share one scale."""

_SMALLEST_AMAX = 1e-4
_INVERSE_LARGEST = 0x924925 * 2.0**-32
"""fp32(1/448), spelled out since the rule is about its bits."""


def quantize_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """``x`` in FP8 by groups of consecutive values: (E4M3 [..., D], e8m0 bytes uint8 [..., ceil(D/group)]).

    A group with an infinity or a NaN gets byte 255 and NaN for all its values. No gradient flows through.

    Args:
        x: [..., D] in fp32, bf16 or fp16

    Raises:
        ValueError: if ``group`` is not positive or ``x`` has no dimension
        TypeError: for other dtypes. fp64 is among them: through fp32 it would be rounded twice
    """
    _check_source(x)
    _check_group(group)
    if x.dim() == 0:
        raise ValueError("FP8 groups run along the last dimension, but the tensor has none")
    groups = _split(x.detach().float(), -1, group)
    scales = _scale_bytes(groups.abs().amax(-1))
    values = _to_e4m3(groups, e8m0.reciprocal(scales).unsqueeze(-1))
    return values.flatten(-2)[..., : x.shape[-1]].contiguous(), scales


def dequantize_groups(values: Tensor, scales: Tensor, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., D] in ``dtype``: each E4M3 value times the scale of its group.

    Exact in fp32, bf16 and fp64 as long as the product is in range: from 2^128 on, which the largest finite fp32 rounds
    up to, it is infinite in fp32 and bf16. fp16 rounds once and overflows above 65504.

    Args:
        values: float8_e4m3fn [..., D]
        scales: [..., ceil(D/group)], e8m0 bytes or float8_e8m0fnu

    Raises:
        ValueError: if the two shapes do not belong together
        TypeError: for other dtypes
    """
    _check_values(values)
    _check_group(group)
    scale_bytes = e8m0.as_bytes(scales)
    expected = (*values.shape[:-1], -(-values.shape[-1] // group)) if values.dim() else ()
    if values.dim() == 0 or scale_bytes.shape != expected:
        raise ValueError(
            f"FP8 values of shape {list(values.shape)} in groups of {group} need scales of shape {list(expected)}; "
            f"got {list(scale_bytes.shape)}"
        )
    product = e8m0.product_dtype(dtype)
    groups = _split(values.to(product), -1, group)
    result = (groups * e8m0.decode(scale_bytes, product).unsqueeze(-1)).flatten(-2)
    return result[..., : values.shape[-1]].to(dtype).contiguous()


def fake_quantize(x: Tensor, group: int = LINEAR_GROUP) -> Tensor:
    """``x`` [..., D] as it comes back from FP8: quantised by groups, dequantised, in the dtype of ``x``.

    What DeepSeek's FP8 linears see as their input. Errors as :func:`quantize_groups`.
    """
    values, scales = quantize_groups(x, group)
    return dequantize_groups(values, scales, group, x.dtype)


def quantize_blocks(weight: Tensor, block: tuple[int, int] = WEIGHT_BLOCK) -> tuple[Tensor, Tensor]:
    """A weight in FP8 by tiles: (E4M3 [..., N, K], e8m0 bytes uint8 [..., ceil(N/rows), ceil(K/columns)]).

    Args:
        weight: [..., N, K] in fp32, bf16 or fp16
        block: rows and columns of a tile

    Raises:
        ValueError: if ``weight`` has fewer than two dimensions or ``block`` is not positive
        TypeError: for other dtypes
    """
    _check_source(weight)
    _check_block(weight, block)
    rows, columns = weight.shape[-2:]
    tiles = _split(_split(weight.detach().float(), -1, block[1]), -3, block[0])
    scales = _scale_bytes(tiles.abs().amax(dim=(-3, -1)))
    values = _to_e4m3(tiles, e8m0.reciprocal(scales)[..., :, None, :, None])
    return values.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous(), scales


def dequantize_blocks(
    values: Tensor, scales: Tensor, block: tuple[int, int] = WEIGHT_BLOCK, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[..., N, K] in ``dtype``: each E4M3 value times the scale of its tile. Exact as :func:`dequantize_groups` is.

    Needs no memory beyond the result and one row of scales per tile row (for fp16: an fp32 copy as well).

    Args:
        values: float8_e4m3fn [..., N, K]
        scales: [..., ceil(N/rows), ceil(K/columns)], e8m0 bytes or float8_e8m0fnu

    Raises:
        ValueError: if the shapes do not belong together
        TypeError: for other dtypes
    """
    _check_values(values)
    _check_block(values, block)
    scale_bytes = e8m0.as_bytes(scales)
    rows, columns = values.shape[-2:]
    expected = (*values.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if scale_bytes.shape != expected:
        raise ValueError(
            f"FP8 values of shape {list(values.shape)} in tiles of {list(block)} need scales of shape "
            f"{list(expected)}; got {list(scale_bytes.shape)}"
        )
    product = e8m0.product_dtype(dtype)
    result = values.to(product, memory_format=torch.contiguous_format)
    row_scales = e8m0.decode(scale_bytes, product).repeat_interleave(block[1], dim=-1)[..., :columns]
    whole = rows // block[0]
    split = whole * block[0]
    result[..., :split, :].unflatten(-2, (whole, block[0])).mul_(row_scales[..., :whole, None, :])
    if split < rows:
        result[..., split:, :].mul_(row_scales[..., whole:, :])
    return result.to(dtype)


def quantize_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """Index keys or queries in FP8: (E4M3 [..., D], fp32 scale [...]), one power-of-two scale per last-dimension row.

    A row with an infinity or a NaN gets NaN for its scale and its values.

    Args:
        x: [..., D] in fp32, bf16 or fp16, D at least 1

    Raises:
        ValueError: if D is 0 or ``x`` has no dimension
        TypeError: for other dtypes
    """
    check_is_tensor("what is quantised", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"an index row needs at least one value; got the shape {list(x.shape)}")
    values, scales = quantize_groups(x, x.shape[-1])
    return values, e8m0.decode(scales.squeeze(-1))


def _scale_bytes(amax: Tensor) -> Tensor:
    return e8m0.encode_ceil(amax.clamp_(min=_SMALLEST_AMAX) * _INVERSE_LARGEST)


def _to_e4m3(x: Tensor, inverse_scale: Tensor) -> Tensor:
    # no clamp: at most 448 is left, or a bit more since fp32(1/448) is rounded, and that becomes 448 as well
    return (x * inverse_scale).to(torch.float8_e4m3fn)


def _split(x: Tensor, dim: int, size: int) -> Tensor:
    """Dimension ``dim`` (negative) of ``x`` as (pieces, size), zeros behind the last piece where it is short."""
    missing = -x.shape[dim] % size
    if missing:
        x = functional.pad(x, (0, 0) * (-1 - dim) + (0, missing))
    return x.unflatten(dim, (x.shape[dim] // size, size))


def _check_source(x: Tensor) -> None:
    check_is_tensor("what is quantised", x)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"FP8 quantises float32, bfloat16 or float16, not {x.dtype}; cast it first")


def _check_values(values: Tensor) -> None:
    check_is_tensor("values", values)
    if values.dtype != torch.float8_e4m3fn:
        raise TypeError(f"FP8 values are float8_e4m3fn, not {values.dtype}; view raw bytes as it")


def _check_group(group: int) -> None:
    check_integer("group", group)
    if group < 1:
        raise ValueError(f"an FP8 group holds at least one value, not {group}")


def _check_block(tensor: Tensor, block: tuple[int, int]) -> None:
    if tensor.dim() < 2:
        raise ValueError(f"FP8 tiles need a tensor with rows and columns; got the shape {list(tensor.shape)}")
    if not isinstance(block, Sequence) or isinstance(block, str) or len(block) != 2:
        raise TypeError(f"block must be the rows and columns of a tile, such as (128, 128); got {described(block)}")
    for size in block:
        check_integer("a size in block", size)
    if min(block) < 1:
        raise ValueError(f"an FP8 tile has at least one row and one column, not {list(block)}")
