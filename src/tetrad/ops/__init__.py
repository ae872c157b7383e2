"""What the model computes on paged caches: stateless functions, usable without an engine.

Store 100 keys in FP4, score them for one query row, choose the best 8, and compare with the definition::

    import torch
    from tetrad.geometry import IndexLayout
    from tetrad.ops import index_topk, quantize_index_query, write_index_keys

    torch.manual_seed(0)
    keys, query, weights = torch.randn(100, 128), torch.randn(1, 64, 128), torch.rand(1, 64)

    layout = IndexLayout("fp4", 128)  # says how keys are stored, and that both sides are rotated by Hadamard
    cache = torch.zeros((2, layout.page_bytes), dtype=torch.uint8)  # two pages of 64 keys
    write_index_keys(keys, cache, torch.arange(100), layout)  # rotate, quantise, store
    cos, sin = torch.ones(1, 32), torch.zeros(1, 32)  # RoPE at position 0
    q, q_scale = quantize_index_query(query, cos, sin, layout)  # rotate, quantise
    table, request, end = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1]], [0], [100]))
    best = index_topk(q, q_scale, weights, cache, table, request, end, 8, width=100)

    scores = torch.einsum("rhd,jd->rhj", query, keys)  # the definition, without quantisation
    scores = (weights[:, :, None] * scores.relu()).sum(1)
    exact = scores.topk(8).indices
    assert torch.isin(best.long(), exact).sum() >= 6  # FP4 finds nearly all of them

Each op is a folder: the public function with its contract, ``reference.py`` in torch, and faster back ends beside it.
The fastest back end that supports a call is taken by itself. :mod:`tetrad.ops.backends` lists them, and
:func:`forced_backends` sends calls to the one that you name. :func:`checked` makes the ops look at values too, where
they otherwise only look at types and shapes.

``docs/ops.md`` shows the ops in an engine that captures CUDA graphs, on DeepGEMM's pages, and in front of FlashMLA. The
rules for a capture: call every op once before it, on the same shapes, so that kernels are compiled and back ends
chosen; keep all tensors at their addresses, ``width`` and the number of rows as they are (padding rows have request -1
and visible end 0); and make the plan anew inside of the graph, with ``plan_indexer(..., out=plan)``.
"""

from __future__ import annotations

from tetrad.ops.backends import forced_backends
from tetrad.ops.checked import checked
from tetrad.ops.index_keys import quantize_index_query, write_index_keys, write_pooled_index_keys
from tetrad.ops.index_topk import index_topk
from tetrad.ops.indexer_logits import indexer_logits
from tetrad.ops.physical_slots import physical_slots
from tetrad.ops.plan_indexer import IndexerPlan, plan_indexer
from tetrad.ops.topk_indices import topk_indices

__all__ = [
    "IndexerPlan",
    "checked",
    "forced_backends",
    "index_topk",
    "indexer_logits",
    "physical_slots",
    "plan_indexer",
    "quantize_index_query",
    "topk_indices",
    "write_index_keys",
    "write_pooled_index_keys",
]
