"""One attention layer: a window of raw keys, and beside it compressed keys, chosen (CSA) or all (HCA)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tetrad.cache.kv_cache import LayerCache
from tetrad.geometry import CSA_RATIO
from tetrad.models.compressor import Compressor
from tetrad.models.config import LayerKind, ModelConfig
from tetrad.models.indexer import Indexer, IndexerOptions
from tetrad.models.linear import ActivationQuant, Linear, Norm
from tetrad.models.step import AttentionMetadata
from tetrad.ops.kv_entries import write_kv_entries
from tetrad.ops.rotary import apply_rotary
from tetrad.ops.row_invariant import linear, rms_norm
from tetrad.ops.sparse_attention import KeySegment, sparse_attention

_KEY_BLOCK = 64


def _key_block(width: int) -> int:
    """Keys summed at once: 64, or fewer where a segment never has as many. From the configuration alone."""
    return min(_KEY_BLOCK, -(-width // 8) * 8)


class Attention(nn.Module):
    """Queries of many heads over one shared key-value head, a learned sink, and a grouped output projection."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, dtype: torch.dtype, quant: ActivationQuant, options: IndexerOptions
    ) -> None:
        super().__init__()
        self.config, self.kind, self.dtype = config, kind, dtype
        heads, dim = config.num_attention_heads, config.head_dim
        group_inputs = heads // config.o_groups * dim
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, dtype, quant)
        self.q_norm = Norm(config.q_lora_rank)
        self.wq_b = Linear(config.q_lora_rank, heads * dim, dtype, quant)
        self.wkv = Linear(config.hidden_size, dim, dtype, quant)
        self.kv_norm = Norm(dim)
        self.wo_a = Linear(group_inputs, config.o_groups * config.o_lora_rank, dtype)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, config.hidden_size, dtype, quant)
        self.attn_sink = nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if kind is LayerKind.CSA:
            self.compressor = Compressor(config.hidden_size, dim, CSA_RATIO)
            self.indexer = Indexer(config, dtype, quant, options)
        elif kind is LayerKind.HCA:
            assert config.hca_ratio is not None
            self.compressor = Compressor(config.hidden_size, dim, config.hca_ratio)

    def forward(self, x: Tensor, metadata: AttentionMetadata, cache: LayerCache) -> Tensor:
        """x: [R, D], already normed, in the compute dtype -> [R, D]. Writes this step's keys before any is read."""
        config, inputs = self.config, metadata.inputs
        rows, eps = inputs.rows, config.rms_norm_eps
        rotation = metadata.window_rotation if self.kind is LayerKind.SWA else metadata.compress_rotation

        q_latent = rms_norm(self.wq_a(x), self.q_norm.weight, eps)
        query = self.wq_b(q_latent).unflatten(1, (config.num_attention_heads, config.head_dim))
        query = apply_rotary(rms_norm(query, None, eps), *rotation)
        key = apply_rotary(rms_norm(self.wkv(x), self.kv_norm.weight, eps), *rotation)
        write_kv_entries(key[:rows], cache.window_pages, metadata.window_slots, cache.window_layout)

        segments = [self._window(metadata, cache)]
        if self.compressor is not None:
            self._compress(self.compressor, x, metadata, cache)
        if self.indexer is not None:
            chosen = self.indexer(x, q_latent, metadata, cache)
            segments.append(self._chosen(chosen[:rows], metadata, cache))
        elif self.compressor is not None:
            segments.append(self._all_compressed(metadata, cache))

        output = sparse_attention(
            query[:rows], self.attn_sink, segments, inputs.row_request[:rows], scale=config.head_dim**-0.5
        )
        output = apply_rotary(output, rotation.cos[:rows], rotation.sin[:rows], inverse=True)
        return self._project(output, x.shape[0])

    def _compress(self, compressor: Compressor, x: Tensor, metadata: AttentionMetadata, cache: LayerCache) -> None:
        plan = metadata.csa if self.kind is LayerKind.CSA else metadata.hca
        assert plan is not None
        assert cache.state is not None
        assert cache.compressed_pages is not None
        assert cache.compressed_layout is not None
        pooled = compressor(x, metadata.inputs.positions, plan, cache.state)
        entry = rms_norm(pooled.to(self.dtype), compressor.norm.weight, self.config.rms_norm_eps)
        entry = apply_rotary(entry, *plan.rotation)
        write_kv_entries(entry, cache.compressed_pages, plan.entry_slots, cache.compressed_layout)

    def _window(self, metadata: AttentionMetadata, cache: LayerCache) -> KeySegment:
        """Positions max(0, p - window + 1) to p, the row's own included."""
        window = self.config.sliding_window
        return KeySegment(
            cache.window_pages,
            cache.window_layout,
            metadata.inputs.window_tables,
            window,
            _key_block(window),
            start=metadata.window_start,
            end=metadata.inputs.positions[: metadata.inputs.rows] + 1,
        )

    def _chosen(self, entries: Tensor, metadata: AttentionMetadata, cache: LayerCache) -> KeySegment:
        """The indexer's choice among the 4:1 compressed entries."""
        assert cache.compressed_pages is not None
        assert cache.compressed_layout is not None
        return KeySegment(
            cache.compressed_pages,
            cache.compressed_layout,
            metadata.inputs.block_tables,
            min(self.config.index_topk, metadata.index_width),
            _key_block(self.config.index_topk),
            entries=entries,
        )

    def _all_compressed(self, metadata: AttentionMetadata, cache: LayerCache) -> KeySegment:
        """Every entry of the heavily compressed history."""
        assert cache.compressed_pages is not None
        assert cache.compressed_layout is not None
        end = metadata.visible_hca[: metadata.inputs.rows]
        return KeySegment(
            cache.compressed_pages,
            cache.compressed_layout,
            metadata.inputs.block_tables,
            metadata.hca_width,
            _KEY_BLOCK,
            start=torch.zeros_like(end),
            end=end,
        )

    def _project(self, output: Tensor, rows: int) -> Tensor:
        """Grouped low-rank output projection: every group of heads has its own wo_a, one wo_b joins them."""
        config = self.config
        grouped = output.reshape(output.shape[0], config.o_groups, -1)
        weights = self.wo_a.weight.unflatten(0, (config.o_groups, config.o_lora_rank))
        latent = torch.cat([linear(grouped[:, g], weights[g]) for g in range(config.o_groups)], dim=1)
        result = self.wo_b(latent)
        return torch.nn.functional.pad(result, (0, 0, 0, rows - result.shape[0]))
