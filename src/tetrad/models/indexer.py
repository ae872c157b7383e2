"""The lightning indexer: a small scorer that chooses which compressed entries a query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tetrad.geometry import CSA_RATIO
from tetrad.models.caches import CsaCache
from tetrad.models.compressor import Compressor
from tetrad.models.config import ModelConfig
from tetrad.models.linear import ActivationQuant, Linear
from tetrad.models.step import Metadata
from tetrad.ops import index_topk, quantize_index_query, write_pooled_index_keys
from tetrad.ops.index_topk import DEFAULT_LOGITS_BUDGET


@dataclass(frozen=True, slots=True)
class IndexerOptions:
    """How the indexer is run: bytes of scores held at a time (0 is unlimited).

    ``plan``: whether the scorer's back end makes use of a plan. Whether queries and keys are rotated is not among it:
    that belongs to the cache that holds the keys.
    """

    logits_budget_bytes: int = DEFAULT_LOGITS_BUDGET
    plan: bool = True


DEFAULT_OPTIONS = IndexerOptions()


class Indexer(nn.Module):
    """score(p, j) = sum_h w_h relu(q_h . k_j) over the stored, quantised keys; the top ``index_topk`` are attended.

    Queries and keys are rotated by RoPE, and by a Hadamard matrix if the layout of the index cache says so, before
    they are quantised. The keys come from a compressor of the indexer's own, at ratio 4.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, quant: ActivationQuant, options: IndexerOptions
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.eps, self.dtype, self.options = config.rms_norm_eps, dtype, options
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.head_dim, dtype, quant)
        # fp32 on purpose: head weights are not rounded, so equal scores stay rare
        self.weights_proj = Linear(config.hidden_size, self.heads, torch.float32)
        self.compressor = Compressor(config.hidden_size, self.head_dim, CSA_RATIO)
        self.weight_scale = self.head_dim**-0.5 * self.heads**-0.5

    def forward(self, x: Tensor, q_latent: Tensor, metadata: Metadata, cache: CsaCache) -> Tensor:
        """x: [R, D]; q_latent: [R, q_lora_rank], already normed. Returns the chosen entries, int32 [R, topk]."""
        entries, rows, index = metadata.csa, metadata.rows, cache.index
        assert entries is not None
        write_pooled_index_keys(
            self.compressor(x, rows, entries, cache.index_ring),
            self.compressor.norm.weight,
            self.eps,
            *entries.rotation,
            self.dtype,
            index.pages,
            entries.entry_slot,
            index.layout,
        )
        query, query_scale = quantize_index_query(
            self.wq_b(q_latent).unflatten(1, (self.heads, self.head_dim)),
            *metadata.rotation,
            index.layout,
        )
        return index_topk(
            query,
            query_scale,
            self.weights_proj(x) * self.weight_scale,
            index.pages,
            rows.block_table,
            rows.request,
            entries.visible,
            self.topk,
            width=entries.width,
            logits_budget_bytes=self.options.logits_budget_bytes,
            plan=metadata.indexer_plan,
        )
