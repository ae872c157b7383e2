"""The rotation angles of DeepSeek-V4: one base for window-only layers, another with YaRN for compressed ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tetrad.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig, *, compressed: bool) -> Tensor:
    """f_i = base^(-2i / rope), fp32 [rope / 2], stretched by YaRN in the layers that have compressed keys.

    YaRN: f_i <- f_i (1 - ramp_i) + (f_i / factor) ramp_i, ramp_i = clamp((i - low) / (high - low), 0, 1), where low
    and high are the channels that turn beta_fast and beta_slow times within the original context. Cosines and sines
    are not scaled. Computed on the CPU, so that every device gets the same bits. Source: YaRN (arXiv 2309.00071), with
    the constants of DeepSeek-V4.
    """
    rope = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    frequencies = 1.0 / (base ** (torch.arange(0, rope, 2, dtype=torch.float32, device="cpu") / rope))
    if not compressed or config.rope_factor == 1.0:
        return frequencies

    def channel(turns: float) -> float:
        return (
            rope * math.log(config.rope_original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))
        )

    low = max(math.floor(channel(config.rope_beta_fast)), 0)
    high = min(math.ceil(channel(config.rope_beta_slow)), rope - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rope // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / config.rope_factor * ramp


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) fp32 [N, rope / 2] of the fp32 product position * f_i, as the model was trained with."""
    angle = positions.float().unsqueeze(1) * frequencies
    return torch.cos(angle), torch.sin(angle)
