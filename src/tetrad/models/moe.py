"""Mixture of experts: the first layers route by token id, the others by score; one shared expert always runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tetrad.models.config import ModelConfig
from tetrad.models.linear import ActivationQuant, Linear, quantize_activation
from tetrad.models.step import Rows
from tetrad.ops.row_invariant import ROW_MULTIPLE, linear, ordered_sum, silu, softplus


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

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, real: Tensor) -> Tensor:
        """sum_e weight_e W2 (swiglu(W1 x, W3 x)) in fp32 [R, D], always added in the order of the expert ids.

        weights: fp32 [R, k]; experts: int64 [R, k]; real: bool [R], rows without it call no expert and give zeros.
        """
        count, chosen = self.w1.shape[0], experts.shape[1]
        # pairs of (row, expert): a row's by ascending expert, those of padding behind all others
        experts, order = experts.masked_fill(~real.unsqueeze(1), count).sort(dim=1, stable=True)
        weights = weights.gather(1, order)
        sizes = torch.bincount(experts.flatten(), minlength=count + 1).tolist()[:count]
        runs = _Runs.of(torch.argsort(experts.flatten(), stable=True)[: sum(sizes)], sizes)
        mine = quantize_activation(x, self.quant)[runs.pairs // chosen]
        inner = clamped_swiglu(runs.product(mine, self.w1), runs.product(mine, self.w3), self.limit)
        # the routing weight goes in before w2, whose input is what DeepSeek quantises
        inner = (inner * weights.flatten()[runs.pairs].unsqueeze(1)).to(x.dtype)
        output = runs.product(quantize_activation(inner, self.quant), self.w2)
        terms = torch.zeros((*experts.shape, x.shape[1]), dtype=torch.float32, device=x.device)
        terms.view(-1, x.shape[1])[runs.pairs[runs.places]] = output[runs.places].float()
        return ordered_sum(terms.unbind(1))


class _Runs(NamedTuple):
    """Pairs of (row, expert) in runs, one for each expert that has any, padded to a multiple of 8.

    pairs: int64 [P], the number of a pair, where padding repeats some other; places: int64 [pairs], where those are
    that are no padding; experts, sizes: of every run.
    """

    pairs: Tensor
    places: Tensor
    experts: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, pairs: Tensor, sizes: list[int]) -> _Runs:
        """``pairs`` by ascending expert, of whom expert e has ``sizes[e]``."""
        experts = [expert for expert, size in enumerate(sizes) if size]
        own = np.array([sizes[expert] for expert in experts], dtype=np.int64)
        padded = -(-own // ROW_MULTIPLE) * ROW_MULTIPLE
        shift = (np.cumsum(padded) - padded) - (np.cumsum(own) - own)
        places = torch.from_numpy(np.arange(own.sum()) + np.repeat(shift, own)).to(pairs.device)
        spread = pairs[:1].repeat(int(padded.sum()))
        spread[places] = pairs
        return cls(spread, places, experts, padded.tolist())

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """x: [P, K]; weights: [E, M, K]. Every run times its expert's weight: [P, M]."""
        if not self.experts:
            return x.new_empty((0, weights.shape[1]))
        matrices = weights.unbind()
        parts = zip(x.split(self.sizes), self.experts, strict=True)
        return torch.cat([linear(part, matrices[expert]) for part, expert in parts])


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

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """x: [R, D], already normed. Returns [R, D] in the dtype of ``x``; padding rows call no routed expert."""
        routed = self.experts(x, *self.gate(x, rows.token), rows.request >= 0)
        return (routed + self.shared_experts(x).float()).to(x.dtype)
