"""Fake quantisation for training: values rounded to the checkpoint's and the caches' formats.

Gradients pass straight through.

FP4 is E2M1 with one power-of-two scale per 32 values, FP8 is E4M3 with one power-of-two scale per group (caches) or per
128 x 128 tile (weights); a scale is rounded up, so nothing saturates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

FP4_MAX, FP8_MAX = 6.0, 448.0


def power_of_two_at_least(x: torch.Tensor) -> torch.Tensor:
    """The least power of two >= x for positive normal fp32 x, from its bits."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _fp4_torch(x: torch.Tensor) -> torch.Tensor:
    groups = x.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-126)
    scale = power_of_two_at_least(largest * (1 / FP4_MAX))
    value = (groups / scale).clamp(-FP4_MAX, FP4_MAX)
    magnitude = value.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = torch.round(magnitude / step) * step
    return (torch.copysign(rounded, value) * scale).flatten(-2).to(x.dtype)


def fp4_groups(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., multiple of 32] rounded to FP4, ties to even, in groups of 32; same dtype, no gradient."""
    if x.is_cuda:
        from kernels import fp4_round  # Triton exists only where there is a GPU

        return fp4_round(x)
    return _fp4_torch(x)


def _fp8(groups: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    scale = power_of_two_at_least(largest.clamp_min(1e-4) * (1 / FP8_MAX))
    return (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def fp8_groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """`x` [..., n] rounded to FP8 in groups of `group`, of which the last may be short; no gradient."""
    parts = [part.float() for part in x.split(group, dim=-1)]
    return torch.cat([_fp8(part, part.abs().amax(-1, keepdim=True)) for part in parts], -1).to(x.dtype)


def fp8_tiles(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [..., rows, columns] rounded to FP8 in 128 x 128 tiles (edges may be short); no gradient."""
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    tiles = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    rounded = _fp8(tiles, tiles.abs().amax((-3, -1), keepdim=True))
    return rounded.flatten(-4, -3).flatten(-2)[..., :rows, :columns].to(weight.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


def straight_through(x: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`rounding(x)` in the forward pass, the identity in the backward pass."""
    return _StraightThrough.apply(x, rounding)  # pyright: ignore[reportReturnType]


def hadamard_matrix(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The Sylvester-Hadamard matrix [size, size] of +1 and -1, fp32, not normalised; size is a power of two."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


def index_format(x: torch.Tensor, hadamard: torch.Tensor, name: str) -> torch.Tensor:
    """An index query or key [..., width] as the cache of format `name` gives it back; gradients pass straight through.

    `name` is fp4, fp8 or bf16 (each after the Hadamard rotation, rounded to x's dtype) or fp4-plain (without it).
    """
    if name != "fp4-plain":
        x = (F.linear(x.float(), hadamard) * hadamard.shape[0] ** -0.5).to(x.dtype)
    if name in ("fp4", "fp4-plain"):
        return straight_through(x, fp4_groups)
    if name == "fp8":
        return straight_through(x, lambda values: fp8_groups(values, values.shape[-1]))
    if name != "bf16":
        raise ValueError(f"index format must be fp4, fp4-plain, fp8 or bf16, got {name!r}")
    return x
