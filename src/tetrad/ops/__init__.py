"""What the model computes on paged caches: stateless functions, usable without an engine.

Score 100 paged FP4 keys for one query row and choose the best 8::

    import torch
    from tetrad.geometry import IndexDtype, IndexLayout
    from tetrad.ops import index_topk, quantize_index_query, write_index_keys

    layout = IndexLayout(IndexDtype.FP4, head_dim=128)
    cache = torch.zeros((2, layout.page_bytes), dtype=torch.uint8)
    write_index_keys(torch.randn(100, 128), cache, torch.arange(100), layout)
    cos, sin = torch.ones(1, 32), torch.zeros(1, 32)
    q, q_scale = quantize_index_query(torch.randn(1, 64, 128), cos, sin, layout.dtype)
    table, request, end = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1]], [0], [100]))
    best = index_topk(q, q_scale, torch.rand(1, 64), cache, table, request, end, 8, width=100)

Each op is a folder: the public function with its contract, ``reference.py`` in torch, and faster back ends beside it.
:mod:`tetrad.ops.backends` says which of them computes what.
"""

from __future__ import annotations

from tetrad.ops.index_keys import quantize_index_query, write_index_keys, write_pooled_index_keys
from tetrad.ops.index_topk import index_topk
from tetrad.ops.indexer_logits import indexer_logits
from tetrad.ops.plan_indexer import IndexerPlan, plan_indexer
from tetrad.ops.topk_indices import topk_indices

__all__ = [
    "IndexerPlan",
    "index_topk",
    "indexer_logits",
    "plan_indexer",
    "quantize_index_query",
    "topk_indices",
    "write_index_keys",
    "write_pooled_index_keys",
]
