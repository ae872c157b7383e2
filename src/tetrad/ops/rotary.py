"""Rotary position embedding of the last channels, in interleaved pairs (2i, 2i + 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats.arguments import check_is_tensor
from tetrad.ops.arguments import check_switch, check_tensor
from tetrad.torch_settings import without_autocast


@without_autocast
def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last ``2 * cos.shape[-1]`` channels of ``x``; the others pass through.

    (a, b) -> (a cos - b sin, a sin + b cos); ``inverse`` uses -sin. x: [N, ..., D]; cos, sin: fp32 [N, rope / 2], one
    angle per row and pair. Computed in fp32, returned in the dtype of ``x``.

    Raises:
        ValueError: for a wrong shape or device
        TypeError: for a wrong type or dtype
    """
    check_is_tensor("x", x)
    check_tensor(
        "cos", cos, torch.float32, (x.shape[0] if x.dim() > 1 else None, None), "rows, pairs", x.device, strided=True
    )
    check_tensor("sin", sin, torch.float32, tuple(cos.shape), "rows, pairs", x.device, strided=True)
    check_switch("inverse", inverse)
    if not x.is_floating_point() or x.dim() < 2 or x.shape[-1] < 2 * cos.shape[1]:
        raise ValueError(
            f"x must be a floating-point tensor [rows, ..., channels] with at least {2 * cos.shape[1]} channels to "
            f"turn; got {x.dtype} of the shape {list(x.shape)}"
        )
    rope = 2 * cos.shape[-1]
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[1],)
    signed = torch.stack((sin, -sin) if inverse else (-sin, sin), dim=-1)
    plain, rotary = x.split((x.shape[-1] - rope, rope), dim=-1)
    # both of a pair at once: (a, b) cos + (b, a) (-sin, sin); a difference is the sum with the negative, bit by bit
    pair = rotary.float().unflatten(-1, (-1, 2))
    rotated = pair * cos.view(*shape, 1) + pair.flip(-1) * signed.view(*shape, 2)
    return torch.cat((plain, rotated.flatten(-2).to(x.dtype)), dim=-1)
