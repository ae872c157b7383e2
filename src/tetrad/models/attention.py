"""Attention layers: a window of raw keys, and beside it compressed keys, chosen (CSA) or all (HCA)."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from tetrad.geometry import CSA_ENTRIES, CSA_RATIO, PagedKV, entry_slots
from tetrad.models.caches import CsaCache, HcaCache, LayerCache, WindowCache
from tetrad.models.compressor import Compressor
from tetrad.models.config import LayerKind, ModelConfig
from tetrad.models.indexer import Indexer, IndexerOptions
from tetrad.models.linear import ActivationQuant, Linear, Norm
from tetrad.models.step import CompressedMetadata, Metadata, Rotation
from tetrad.ops.kv_entries import copy_kv_entries, write_kv_entries, write_pooled_kv_entries
from tetrad.ops.rotary import apply_rotary
from tetrad.ops.row_invariant import linear, rms_norm
from tetrad.ops.sparse_attention import History, sparse_attention

Cache = TypeVar("Cache", bound=LayerCache)


class Attention(nn.Module, Generic[Cache]):
    """Queries of many heads over one shared key-value head, a learned sink, and a grouped output projection."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, quant: ActivationQuant) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
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

    def forward(self, x: Tensor, metadata: Metadata, cache: Cache) -> Tensor:
        """x: [R, D], already normed, in the compute dtype -> [R, D]. Writes this step's keys before any is read."""
        config, eps, window = self.config, self.config.rms_norm_eps, metadata.window
        rotation = self.rotation(metadata)

        q_latent = rms_norm(self.wq_a(x), self.q_norm.weight, eps)
        query = rms_norm(self.wq_b(q_latent).unflatten(1, (-1, config.head_dim)), None, eps)
        key = rms_norm(self.wkv(x), self.kv_norm.weight, eps)
        query, key = apply_rotary(torch.cat((query, key.unsqueeze(1)), dim=1), *rotation).split(
            (query.shape[1], 1), dim=1
        )
        write_kv_entries(key.squeeze(1), cache.window, window.own)
        compressed = self.compressed(x, q_latent, metadata, cache)

        scale = config.head_dim**-0.5
        output = sparse_attention(query, self.attn_sink, cache.window, window.visible, *compressed, scale=scale)
        if metadata.rows.shape.chunks:
            copy_kv_entries(cache.window, window.kept_from, window.kept_to)
        return self._project(apply_rotary(output, *rotation, inverse=True))

    def rotation(self, metadata: Metadata) -> Rotation:
        """Of this layer's queries and window keys."""
        return metadata.rotation

    def compressed(
        self, x: Tensor, q_latent: Tensor, metadata: Metadata, cache: Cache
    ) -> tuple[PagedKV | None, Tensor | History | None]:
        """Writes the step's compressed entries. (where they lie, which of them each row sees), as the op takes them."""
        raise NotImplementedError

    def write_compressed(
        self, pooled: Tensor, compressor: Compressor, entries: CompressedMetadata, cache: PagedKV
    ) -> None:
        """Norm, rotate and store the entries that the compressor pooled, fp32 [R, d]."""
        write_pooled_kv_entries(
            pooled,
            compressor.norm.weight,
            self.config.rms_norm_eps,
            *entries.rotation,
            self.dtype,
            cache,
            entries.entry_slot,
        )

    def _project(self, output: Tensor) -> Tensor:
        """Grouped low-rank output projection: every group of heads has its own wo_a, one wo_b joins them."""
        config = self.config
        grouped = output.reshape(output.shape[0], config.o_groups, -1)
        weights = self.wo_a.weight.unflatten(0, (config.o_groups, config.o_lora_rank))
        latent = torch.cat([linear(grouped[:, g], weights[g]) for g in range(config.o_groups)], dim=1)
        return self.wo_b(latent)


class WindowAttention(Attention[WindowCache]):
    """SWA: the window alone."""

    def rotation(self, metadata: Metadata) -> Rotation:
        """Without YaRN, at a base of its own."""
        return metadata.window.rotation

    def compressed(
        self, x: Tensor, q_latent: Tensor, metadata: Metadata, cache: WindowCache
    ) -> tuple[PagedKV | None, Tensor | History | None]:
        """There are none."""
        return None, None


class CsaAttention(Attention[CsaCache]):
    """Compressed sparse attention: the entries that the indexer chose, one for 4 tokens."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, quant: ActivationQuant, options: IndexerOptions
    ) -> None:
        super().__init__(config, dtype, quant)
        self.compressor = Compressor(config.hidden_size, config.head_dim, CSA_RATIO)
        self.indexer = Indexer(config, dtype, quant, options)

    def compressed(
        self, x: Tensor, q_latent: Tensor, metadata: Metadata, cache: CsaCache
    ) -> tuple[PagedKV | None, Tensor | History | None]:
        """The indexer's choice, as slots."""
        entries, rows = metadata.csa, metadata.rows
        assert entries is not None
        self.write_compressed(self.compressor(x, rows, entries, cache.ring), self.compressor, entries, cache.compressed)
        chosen = self.indexer(x, q_latent, metadata, cache)
        request = rows.request.clamp_min(0).unsqueeze(1)
        slots = entry_slots(rows.block_table, request, chosen.clamp_min(0), CSA_ENTRIES)
        return cache.compressed, slots.masked_fill(chosen < 0, -1)


class HcaAttention(Attention[HcaCache]):
    """Heavily compressed attention: every entry of the history, one for 128 tokens."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, quant: ActivationQuant) -> None:
        super().__init__(config, dtype, quant)
        assert config.hca_ratio is not None
        self.compressor = Compressor(config.hidden_size, config.head_dim, config.hca_ratio)

    def compressed(
        self, x: Tensor, q_latent: Tensor, metadata: Metadata, cache: HcaCache
    ) -> tuple[PagedKV | None, Tensor | History | None]:
        """All that a row sees."""
        entries, rows = metadata.hca, metadata.rows
        assert entries is not None
        self.write_compressed(self.compressor(x, rows, entries, cache.ring), self.compressor, entries, cache.compressed)
        return cache.compressed, History(rows.block_table, rows.request, entries.visible, entries.width)


def attention_layer(
    config: ModelConfig, kind: LayerKind, dtype: torch.dtype, quant: ActivationQuant, options: IndexerOptions
) -> Attention:
    """The attention of a layer of this kind."""
    if kind is LayerKind.CSA:
        return CsaAttention(config, dtype, quant, options)
    if kind is LayerKind.HCA:
        return HcaAttention(config, dtype, quant)
    return WindowAttention(config, dtype, quant)
