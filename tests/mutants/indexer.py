"""The indexer: scores, rotation and choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.mutants.mutant import Patch, mutant
from tetrad.formats.hadamard import rotate
from tetrad.geometry import IndexLayout
from tetrad.ops.row_invariant import rms_norm

INDEXER = "tetrad.models.indexer:"
LOGITS = "tetrad.ops.index_topk:indexer_logits"
FORWARD = INDEXER + "Indexer.forward"
KEYS = INDEXER + "write_pooled_index_keys"
QUERY = INDEXER + "quantize_index_query"


def without_relu(logits: Any) -> Any:
    # relu(d) - relu(-d) = d
    return lambda q, *rest, **options: logits(q, *rest, **options) - logits(-q, *rest, **options)


def relu_behind_the_sum(logits: Any) -> Any:
    return lambda *arguments, **options: without_relu(logits)(*arguments, **options).relu()


def choice(*, weights: Callable[[Tensor], Tensor] = lambda weights: weights, more: int = 0) -> Patch:
    def make(index_topk: Any) -> Any:
        def wrong(q, q_scale, head_weights, cache, tables, request, end, k, **options):
            return index_topk(q, q_scale, weights(head_weights), cache, tables, request, end, k + more, **options)

        return wrong

    return Patch(INDEXER + "index_topk", make)


def without_hadamard(layout: IndexLayout) -> IndexLayout:
    return IndexLayout(layout.dtype, layout.head_dim, hadamard=False)


def query(change: Callable[[Tensor], Tensor] = lambda q: q, *, rotary: bool = True, hadamard: bool = True) -> Patch:
    def make(quantize: Any) -> Any:
        def wrong(q, cos, sin, layout):
            if not rotary:
                cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
            return quantize(change(q), cos, sin, layout if hadamard else without_hadamard(layout))

        return wrong

    return Patch(QUERY, make)


def keys_without_hadamard(write: Any) -> Any:
    return lambda *arguments: write(*arguments[:-1], without_hadamard(arguments[-1]))


def keys_without_rope(write: Any) -> Any:
    def wrong(pooled, weight, eps, cos, sin, *rest):
        write(pooled, weight, eps, torch.ones_like(cos), torch.zeros_like(sin), *rest)

    return wrong


def latent_of_the_first_row(forward: Any) -> Any:
    def wrong(self, x, q_latent, metadata, cache):
        return forward(self, x, q_latent[:1].repeat(len(q_latent), 1), metadata, cache)

    return wrong


def with_the_windows_theta(forward: Any) -> Any:
    def wrong(self, x, q_latent, metadata, cache):
        return forward(self, x, q_latent, dataclasses.replace(metadata, rotation=metadata.window.rotation), cache)

    return wrong


MUTANTS = (
    mutant("no ReLU", Patch(LOGITS, without_relu)),
    mutant("ReLU after the sum over heads", Patch(LOGITS, relu_behind_the_sum)),
    mutant("head weights not signed", choice(weights=torch.abs)),
    mutant("Hadamard on the query only", Patch(KEYS, keys_without_hadamard)),
    mutant("Hadamard on the key only", query(hadamard=False)),
    mutant("Hadamard before RoPE", query(rotate, hadamard=False)),
    mutant("no RoPE on index queries", query(rotary=False)),
    mutant("no RoPE on index keys", Patch(KEYS, keys_without_rope)),
    mutant(
        "no norm of index keys",
        Patch("tetrad.ops.index_keys.reference:rms_norm", lambda _: lambda x, weight, eps: x),
    ),
    mutant("norm of index queries", query(lambda q: rms_norm(q, None, 1e-6))),
    mutant("index queries with the window's theta", Patch(FORWARD, with_the_windows_theta)),
    mutant("index queries from the latent of the step's first row", Patch(FORWARD, latent_of_the_first_row)),
    mutant("the worst entries chosen", choice(weights=torch.neg)),
    mutant("one entry too many chosen", choice(more=1)),
    mutant("one entry too few chosen", choice(more=-1)),
)
