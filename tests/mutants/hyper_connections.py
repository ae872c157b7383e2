"""The mixing of the residual streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.mutants.mutant import Patch, mutant
from tetrad.models.hyper_connections import MixWeights

MIX = "tetrad.models.deepseek_v4:mix_weights"
HEAD = "tetrad.models.deepseek_v4:head_collapse"
MIXES = "tetrad.models.hyper_connections:_mixes"
SINKHORN = "tetrad.models.hyper_connections:sinkhorn"


def mixed(change: Callable[[MixWeights, float], MixWeights]) -> Patch:
    """``change(weights, eps)`` of a sub-layer's weights."""

    def make(mix_weights: Any) -> Any:
        return lambda *arguments, hc_eps, **named: change(mix_weights(*arguments, hc_eps=hc_eps, **named), hc_eps)

    return Patch(MIX, make)


def named(target: str, **values: Any) -> Patch:
    return Patch(target, lambda mix: lambda *arguments, **options: mix(*arguments, **options | values))


def scale_of_pre_for_post(mix_weights: Any) -> Any:
    return lambda streams, fn, scale, base, **options: mix_weights(streams, fn, scale[[0, 0, 2]], base, **options)


def sinkhorn(*, first: int = -1, eps_behind: bool = True) -> Any:
    """Sinkhorn that begins with the dimension ``first``, with or without eps behind the softmax."""

    def wrong(logits: Tensor, eps: float, iterations: int) -> Tensor:
        comb = torch.exp(logits - logits.amax(-1, keepdim=True))
        comb = comb / comb.sum(first, keepdim=True) + eps * eps_behind
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return comb

    return lambda _: wrong


def a_round_more(right: Any) -> Any:
    return lambda logits, eps, iterations: right(logits, eps, iterations + 1)


def of_attention_for_both(mix_weights: Any) -> Any:
    last: list[MixWeights] = []

    def wrong(*arguments: Any, **options: Any) -> MixWeights:
        if last:
            return last.pop()
        last.append(mix_weights(*arguments, **options))
        return last[0]

    return wrong


MUTANTS = (
    mutant("comb not transposed", mixed(lambda weights, eps: weights._replace(comb=weights.comb.mT))),
    mutant(
        "no eps in the collapse before a sub-layer",
        mixed(lambda weights, eps: weights._replace(pre=weights.pre - eps)),
    ),
    mutant("no eps in the collapse before the head", named(HEAD, hc_eps=0.0)),
    mutant("no eps after the row softmax", Patch(SINKHORN, sinkhorn(eps_behind=False))),
    mutant("no factor 2 in post", mixed(lambda weights, eps: weights._replace(post=weights.post / 2))),
    mutant("scale of pre for post", Patch(MIX, scale_of_pre_for_post)),
    mutant("one Sinkhorn round too many", Patch(SINKHORN, a_round_more)),
    mutant("columns before rows", Patch(SINKHORN, sinkhorn(first=-2))),
    mutant(
        "no norm of the mixes",
        Patch(MIXES, lambda _: lambda streams, fn, norm_eps: streams.flatten(1).float() @ fn.T),
    ),
    mutant("no eps in the norm of the mixes", named(MIX, norm_eps=0.0), named(HEAD, norm_eps=0.0)),
    mutant("mixing weights of attention for the experts as well", Patch(MIX, of_attention_for_both)),
)

CONTROLS = (mutant("Sinkhorn by hand", Patch(SINKHORN, sinkhorn())),)
