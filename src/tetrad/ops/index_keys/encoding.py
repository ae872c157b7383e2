"""How index keys and queries are stored: one vector, one encoding, for every index dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats import fp8, mxfp4
from tetrad.geometry import IndexDtype, IndexLayout


def encode(x: Tensor, dtype: IndexDtype) -> tuple[Tensor, Tensor | None]:
    """Vectors [..., D] (bf16 or fp32) as (values, scales).

    ======  ==============================  =============================================
    dtype   values                          scales
    ======  ==============================  =============================================
    fp4     uint8 [..., D/2]                uint8 e8m0 [..., D/32]
    fp8     float8_e4m3fn [..., D]          fp32 [...], one power of two for each vector
    bf16    bfloat16 [..., D]               None
    fp32    float32 [..., D]                None
    ======  ==============================  =============================================

    Raises:
        ValueError: fp4 with D not a multiple of 32
    """
    if dtype is IndexDtype.FP4:
        return mxfp4.quantize(x)
    if dtype is IndexDtype.FP8:
        return fp8.quantize_index(x)
    return x.to(torch.bfloat16 if dtype is IndexDtype.BF16 else torch.float32), None


def decode(values: Tensor, scales: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """What :func:`encode` stored, as [..., D] in ``dtype`` (fp32 or fp64); a scale of NaN (byte 255) gives NaN.

    Exact for fp4 and for the power-of-two scales of fp8, while in the range of ``dtype``.
    """
    if values.dtype == torch.uint8:
        assert scales is not None  # follows from how the two are made
        return mxfp4.dequantize(values, scales, dtype)
    if scales is not None:
        return values.to(dtype) * scales.to(dtype).unsqueeze(-1)
    return values.to(dtype)


def to_rows(values: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The bytes of a page's rows for vectors [N, ...] from :func:`encode`: (data uint8 [N, B], scales uint8 [N, S])."""
    data = values.contiguous().view(torch.uint8)
    if scales is None or scales.dtype == torch.uint8:
        return data, scales
    return data, scales.unsqueeze(-1).contiguous().view(torch.uint8)


def from_rows(data: Tensor, scales: Tensor | None, layout: IndexLayout) -> tuple[Tensor, Tensor | None]:
    """The inverse of :func:`to_rows` for rows as they come from a page of ``layout``; leading dimensions are kept."""
    if layout.dtype is IndexDtype.FP4:
        return data, scales
    if layout.dtype is IndexDtype.FP8:
        assert scales is not None  # its layout has scales
        return data.view(torch.float8_e4m3fn), scales.view(torch.float32).squeeze(-1)
    return data.view(torch.bfloat16 if layout.dtype is IndexDtype.BF16 else torch.float32), None
