"""The feed-forward of a layer: routed experts, chosen by token or by score, and a shared one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from parts import Linear, Pass
from shape import Shape
from torch import nn


class Gate(nn.Module):
    """Scores the experts; hash layers choose by token id, the others by score and bias."""

    tid2eid: torch.Tensor
    bias: torch.Tensor

    def __init__(self, shape: Shape, hashed: bool, seed: int) -> None:
        super().__init__()
        self.hashed = hashed
        self.weight = nn.Parameter(torch.randn(shape.n_routed_experts, shape.hidden_size) * shape.hidden_size**-0.5)
        if hashed:
            generator = torch.Generator().manual_seed(seed)
            draws = torch.rand(shape.vocab_size, shape.n_routed_experts, generator=generator)
            self.register_buffer("tid2eid", draws.argsort(-1)[:, : shape.num_experts_per_tok].contiguous())
        else:
            self.register_buffer("bias", torch.zeros(shape.n_routed_experts))


class Experts(nn.Module):
    """All routed experts, stacked."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        count, hidden, inner = shape.n_routed_experts, shape.hidden_size, shape.moe_intermediate_size
        self.w1 = Linear(count, inner, hidden, stored="fp4")
        self.w2 = Linear(count, hidden, inner, stored="fp4")
        self.w3 = Linear(count, inner, hidden, stored="fp4")


class Shared(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = Linear(shape.moe_intermediate_size, shape.hidden_size)
        self.w2 = Linear(shape.hidden_size, shape.moe_intermediate_size)
        self.w3 = Linear(shape.moe_intermediate_size, shape.hidden_size)


class FeedForward(nn.Module):
    """Every expert runs on every token, and unchosen ones get weight 0: for experts this small that is fastest."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Gate(shape, layer < shape.num_hash_layers, 1000 + layer)
        self.experts = Experts(shape)
        self.shared_experts = Shared(shape)

    def _activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        limit = self.shape.swiglu_limit
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, run: Pass, layer: int) -> torch.Tensor:
        shape, gate = self.shape, self.gate
        flat = x.flatten(0, 1)
        scores = F.softplus(F.linear(flat.float(), gate.weight)).sqrt()
        if gate.hashed:
            chosen = gate.tid2eid[tokens.flatten()]
        else:
            chosen = (scores + gate.bias).topk(shape.num_experts_per_tok, sorted=False).indices
        picked = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        if not gate.hashed:
            run.loads[layer] = picked.mean(0).detach()
        weights = scores * picked
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * shape.routed_scaling_factor
        w1, w2, w3 = (part.value(run, x.dtype) for part in (self.experts.w1, self.experts.w2, self.experts.w3))
        inner = self._activate(F.linear(flat, w1.flatten(0, 1)), F.linear(flat, w3.flatten(0, 1)))
        inner = inner.unflatten(-1, (shape.n_routed_experts, -1)) * weights.to(x.dtype).unsqueeze(-1)
        routed = inner.flatten(1) @ w2.mT.flatten(0, 1)
        shared = self.shared_experts
        out = routed + shared.w2(self._activate(shared.w1(flat, run), shared.w3(flat, run)), run)
        return out.view_as(x)
