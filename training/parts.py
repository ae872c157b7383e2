"""What every layer is made of: RoPE, RMS norm, weights that know how they are stored, and the record of a pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from quantise import fp4_groups, fp8_tiles, straight_through
from shape import Shape
from torch import nn


def rope_frequencies(shape: Shape, compressed: bool) -> torch.Tensor:
    """Rotation per position of each pair, fp32 [qk_rope_head_dim / 2]; with YaRN for layers that compress."""
    size = shape.qk_rope_head_dim
    base = shape.compress_rope_theta if compressed else shape.rope_theta
    frequencies = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float) / size))
    if not compressed or shape.rope_factor == 1:
        return frequencies

    def turn(rotations: float) -> float:
        return size * math.log(shape.rope_original_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(turn(32)), 0), min(math.ceil(turn(1)), size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / shape.rope_factor * ramp + frequencies * (1 - ramp)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the interleaved pairs of the last 2 * cos.shape[-1] dims; cos and sin broadcast to x[..., :r/2] in fp32."""
    if x.is_cuda:
        from kernels import Rotate  # Triton exists only where there is a GPU

        return Rotate.apply(x, cos, sin, 1.0)
    size = 2 * cos.shape[-1]
    plain, pairs = x[..., :-size], x[..., -size:].float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([plain, turned.to(x.dtype)], -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm over the last dim, fp32 inside, cast back once; the weight is rounded to x's dtype, as it is stored."""
    return F.rms_norm(x, (x.shape[-1],), None if weight is None else weight.to(x.dtype), eps)


@dataclass
class Pass:
    """How one forward pass runs, and what it collects."""

    selection: bool = False
    """Attend only to the index_topk entries that the indexer picks; otherwise to every visible entry."""
    topk: int = 48
    index_format: str = "fp4"
    weights_quantised: bool = False
    cache_quantised: bool = False
    rows: torch.Tensor | None = None
    """int64 [B, M]: places in each sequence whose index scores are compared with the attention they must imitate."""
    index_losses: list[torch.Tensor] = field(default_factory=list)
    loads: dict[int, torch.Tensor] = field(default_factory=dict)
    keep: list[dict[str, torch.Tensor]] | None = None
    prefix: list[dict[str, torch.Tensor]] | None = None
    prefix_length: int = 0
    found: list[torch.Tensor] = field(default_factory=list)
    tables: dict[bool, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Linear(nn.Module):
    """A weight [.., out, in] without bias; rounded to FP8 tiles or FP4 groups where the checkpoint stores it so."""

    def __init__(self, *size: int, stored: str = "fp8") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*size) * size[-1] ** -0.5)
        self.stored = stored

    def value(self, run: Pass, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weight
        if run.weights_quantised and self.stored == "fp8":
            weight = straight_through(weight, fp8_tiles)
        elif run.weights_quantised and self.stored == "fp4":
            weight = straight_through(weight, fp4_groups)
        return weight.to(dtype)

    def forward(self, x: torch.Tensor, run: Pass) -> torch.Tensor:
        return F.linear(x, self.value(run, x.dtype))


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
