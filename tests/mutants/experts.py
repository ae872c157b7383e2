"""Routing, routed experts and the shared one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.mutants.mutant import Patch, holding, mutant

MOE = "tetrad.models.moe:"
GATE = MOE + "Gate.forward"
SWIGLU = MOE + "clamped_swiglu"


def unclamped(init: Any) -> Any:
    def wrong(self, *arguments):
        init(self, *arguments)
        self.limit = math.inf

    return wrong


def gate_and_up_swapped(forward: Any) -> Any:
    def wrong(self, *arguments):
        w1, w3 = self.w1.data, self.w3.data
        with holding(self.w1, w3), holding(self.w3, w1):
            return forward(self, *arguments)

    return wrong


def swiglu(product: Callable[[Tensor, Tensor, float], Tensor]) -> Patch:
    return Patch(SWIGLU, lambda _: lambda gate, up, limit: product(gate.float(), up.float(), limit))


def weights(change: Callable[[Any, Tensor, Tensor], Tensor]) -> Patch:
    """The chosen experts with ``change(gate, scores, experts)`` for their weights before they are scaled."""

    def make(forward: Any) -> Any:
        def wrong(self, x, input_ids):
            experts = forward(self, x, input_ids)[1]
            scores = functional.softplus(x.float() @ self.weight.T).sqrt()
            return change(self, scores, experts) * self.scaling, experts

        return wrong

    return Patch(GATE, make)


def normalised(chosen: Tensor) -> Tensor:
    return chosen / chosen.sum(-1, keepdim=True)


def uniform_where_hashed(gate: Any, scores: Tensor, experts: Tensor) -> Tensor:
    chosen = scores.gather(1, experts)
    return normalised(chosen if gate.tid2eid is None else torch.ones_like(chosen))


def of_biased_scores(gate: Any, scores: Tensor, experts: Tensor) -> Tensor:
    return normalised((scores if gate.bias is None else scores + gate.bias).gather(1, experts))


def hash_layers_by_score(forward: Any) -> Any:
    def wrong(self, x, input_ids):
        table = self.tid2eid
        if table is None:
            return forward(self, x, input_ids)
        self.tid2eid, self.bias = None, nn.Parameter(torch.zeros(len(self.weight)), requires_grad=False)
        try:
            return forward(self, x, input_ids)
        finally:
            self.tid2eid, self.bias = table, None

    return wrong


def without_bias(forward: Any) -> Any:
    def wrong(self, x, input_ids):
        if self.bias is None:
            return forward(self, x, input_ids)
        with holding(self.bias, torch.zeros_like(self.bias)):
            return forward(self, x, input_ids)

    return wrong


def without_scaling(forward: Any) -> Any:
    def wrong(self, x, input_ids):
        right, experts = forward(self, x, input_ids)
        return right / self.scaling, experts

    return wrong


MUTANTS = (
    mutant("shared expert unclamped", Patch(MOE + "SharedExpert.__init__", unclamped)),
    mutant("routed experts unclamped", Patch(MOE + "Experts.__init__", unclamped)),
    mutant(
        "gate with a lower clamp",
        swiglu(lambda gate, up, limit: functional.silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit)),
    ),
    mutant(
        "up projection without a lower clamp",
        swiglu(lambda gate, up, limit: functional.silu(gate.clamp_max(limit)) * up.clamp_max(limit)),
    ),
    mutant(
        "clamp after silu",
        swiglu(lambda gate, up, limit: functional.silu(gate).clamp_max(limit) * up.clamp(-limit, limit)),
    ),
    mutant("gate and up projection swapped", Patch(MOE + "Experts.forward", gate_and_up_swapped)),
    mutant("hash layers with uniform weights", weights(uniform_where_hashed)),
    mutant("hash layers by score", Patch(GATE, hash_layers_by_score)),
    mutant("weights from biased scores", weights(of_biased_scores)),
    mutant("no bias in the choice", Patch(GATE, without_bias)),
    mutant("no routed scaling", Patch(GATE, without_scaling)),
    mutant("weights not normalised", weights(lambda gate, scores, experts: scores.gather(1, experts))),
    mutant(
        "no square root in the score",
        Patch(MOE + "softplus", lambda softplus: lambda x: softplus(x).square()),
    ),
    mutant("no shared expert", Patch(MOE + "SharedExpert.forward", lambda _: lambda self, x: torch.zeros_like(x))),
    mutant(
        "experts added up in bf16",
        Patch(MOE + "ordered_sum", lambda add: lambda terms: add([term.bfloat16() for term in terms]).float()),
        test="tests/models/test_moe.py::test_moe_in_bf16_adds_in_fp32",
    ),
)

CONTROLS = (
    mutant(
        "SwiGLU and weights by hand",
        swiglu(lambda gate, up, limit: functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)),
        weights(lambda gate, scores, experts: normalised(scores.gather(1, experts))),
    ),
)
