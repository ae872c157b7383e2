"""Mixture of experts: the first layers route by token id, the others by score; one shared expert always runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tetrad.models.config import ModelConfig
from tetrad.models.linear import ActivationQuant, Linear, quantize_activation
from tetrad.ops.row_invariant import linear, silu, softplus


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(g, limit)) * clamp(u, -limit, limit) in fp32: the gate has no lower bound."""
    return silu(gate.float().clamp_max(limit)) * up.float().clamp(-limit, limit)


class Gate(nn.Module):
    """score = sqrt(softplus(x W^T)) in fp32. Experts by token id in hash layers, else the top k of score + bias.

    The weights are the chosen scores, without the bias, normalised and times ``routed_scaling_factor``.
    """

    def __init__(self, config: ModelConfig, hashed: bool) -> None:
        super().__init__()
        experts, chosen = config.n_routed_experts, config.num_experts_per_tok
        self.chosen, self.scaling = chosen, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty((experts, config.hidden_size), dtype=torch.float32), requires_grad=False)
        self.bias: nn.Parameter | None = None
        self.tid2eid: nn.Parameter | None = None
        if hashed:
            self.tid2eid = nn.Parameter(
                torch.empty((config.vocab_size, chosen), dtype=torch.int64), requires_grad=False
            )
        else:
            self.bias = nn.Parameter(torch.empty(experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x: [R, D]; input_ids: int64 [R]. Returns (weights fp32 [R, k], experts int64 [R, k])."""
        score = softplus(linear(x.float(), self.weight)).sqrt()
        if self.tid2eid is not None:
            experts = self.tid2eid[input_ids]
        else:
            assert self.bias is not None
            experts = torch.topk(score + self.bias, self.chosen, dim=-1).indices
        weights = score.gather(1, experts)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling, experts


class Experts(nn.Module):
    """The routed experts, stacked: w1 (gate) and w3 (up) [E, I, D], w2 (down) [E, D, I]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, quant: ActivationQuant) -> None:
        super().__init__()
        count, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.limit, self.quant = config.swiglu_limit, quant
        self.w1 = nn.Parameter(torch.empty((count, inner, hidden), dtype=dtype), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty((count, hidden, inner), dtype=dtype), requires_grad=False)
        self.w3 = nn.Parameter(torch.empty((count, inner, hidden), dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """sum_e weight_e W2 (swiglu(W1 x, W3 x)) in fp32 [R, D], always added in the order of the expert ids."""
        result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat = experts.flatten()
        order = torch.argsort(flat, stable=True)
        x = quantize_activation(x, self.quant)
        start = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=self.w1.shape[0]).tolist()):
            picks = order[start : start + count]
            start += count
            if not count:
                continue
            rows = picks // experts.shape[1]
            mine = x[rows]
            inner = clamped_swiglu(linear(mine, self.w1[expert]), linear(mine, self.w3[expert]), self.limit)
            # the routing weight goes in before w2, whose input is what DeepSeek quantises
            inner = (inner * weights.flatten()[picks].unsqueeze(1)).to(x.dtype)
            output = linear(quantize_activation(inner, self.quant), self.w2[expert])
            result.index_add_(0, rows, output.float())
        return result


class SharedExpert(nn.Module):
    """The expert that every token passes through, with the same clamp."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, quant: ActivationQuant) -> None:
        super().__init__()
        inner = config.moe_intermediate_size * config.n_shared_experts
        self.limit = config.swiglu_limit
        self.w1 = Linear(config.hidden_size, inner, dtype, quant)
        self.w2 = Linear(inner, config.hidden_size, dtype, quant)
        self.w3 = Linear(config.hidden_size, inner, dtype, quant)

    def forward(self, x: Tensor) -> Tensor:
        """x: [R, D] -> [R, D]."""
        return self.w2(clamped_swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(nn.Module):
    """y = sum of the routed experts + the shared expert."""

    def __init__(self, config: ModelConfig, hashed: bool, dtype: torch.dtype, quant: ActivationQuant) -> None:
        super().__init__()
        self.gate = Gate(config, hashed)
        self.experts = Experts(config, dtype, quant)
        self.shared_experts = SharedExpert(config, dtype, quant)

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """x: [R, D], already normed; input_ids: int64 [R]. Returns [R, D] in the dtype of ``x``."""
        routed = self.experts(x, *self.gate(x, input_ids))
        return (routed + self.shared_experts(x).float()).to(x.dtype)
