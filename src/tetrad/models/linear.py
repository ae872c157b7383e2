"""Linear layers as DeepSeek-V4 computes them: no biases, optionally with its FP8 activation quantisation."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor, nn

from tetrad.formats import fp8
from tetrad.ops.row_invariant import linear

ACTIVATION_GROUP = 128
"""Channels of an activation that share one power-of-two scale in DeepSeek's FP8 linears."""


class ActivationQuant(StrEnum):
    """What happens to the input of the linears that DeepSeek runs in FP8."""

    NONE = "none"
    FP8 = "fp8"


def quantize_activation(x: Tensor, mode: ActivationQuant) -> Tensor:
    """``x`` itself, or rounded to E4M3 with one power-of-two scale per 128 channels (then back to its dtype)."""
    return fp8.fake_quantize(x, ACTIVATION_GROUP) if mode is ActivationQuant.FP8 else x


class Linear(nn.Module):
    """y = x W^T; weight [outputs, inputs] in the compute dtype, or fp32 where DeepSeek computes in fp32."""

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, quant: ActivationQuant = ActivationQuant.NONE
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((outputs, inputs), dtype=dtype), requires_grad=False)
        self.quant = quant

    def forward(self, x: Tensor) -> Tensor:
        """x: [R, inputs] -> [R, outputs] in the weight's dtype."""
        return linear(quantize_activation(x, self.quant).to(self.weight.dtype), self.weight)


class Norm(nn.Module):
    """The weight of an RMS norm, fp32 [dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32), requires_grad=False)
