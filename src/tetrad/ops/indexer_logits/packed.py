"""FP4 queries in the forms that other libraries have them in, as bytes; without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PACKED = (torch.int8, torch.float4_e2m1fn_x2)


def packed_query(q: Any) -> Any:
    """``q`` int8 or float4_e2m1fn_x2, two values to a byte, as uint8; anything else as it is."""
    return q.view(torch.uint8) if isinstance(q, Tensor) and q.dtype in _PACKED else q


def scale_bytes(q_scale: Any) -> Any:
    """e8m0 scales as uint8 [R, H, D/32]: from float8_e8m0fnu of that shape, or from int32 [R, H, D/128] or [R, H] with
    the scale of the first group in the lowest byte; anything else as it is, for the check behind it to judge.
    """
    if not isinstance(q_scale, Tensor):
        return q_scale
    if q_scale.dtype == torch.float8_e8m0fnu:
        return q_scale.view(torch.uint8)
    if q_scale.dtype != torch.int32 or not q_scale.is_contiguous():
        return q_scale
    words = q_scale.unsqueeze(-1) if q_scale.dim() == 2 else q_scale
    return words.view(torch.uint8) if words.dim() == 3 else q_scale
