"""DeepSeek-V4: embedding, layers of attention and experts joined by hyper-connections, head.

Module and parameter names are those of the released checkpoints, so a tensor's name is its address here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tetrad.models.attention import attention_layer
from tetrad.models.caches import LayerCache
from tetrad.models.config import LayerKind, ModelConfig
from tetrad.models.hyper_connections import MixWeights, collapse, expand, head_collapse, mix_weights
from tetrad.models.indexer import DEFAULT_OPTIONS, IndexerOptions
from tetrad.models.linear import ActivationQuant, Linear, Norm
from tetrad.models.moe import MoE
from tetrad.models.rotary import inverse_frequencies
from tetrad.models.step import Metadata, Rows
from tetrad.ops.row_invariant import rms_norm


def _fp32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)


class Layer(nn.Module):
    """Attention, then experts, each between a collapse and an expansion of the residual streams."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        quant: ActivationQuant,
        options: IndexerOptions,
    ) -> None:
        super().__init__()
        self.config = config
        count = config.hc_mult
        mixes = 2 * count + count * count
        kind: LayerKind = config.layer_kinds[index]
        self.attn = attention_layer(config, kind, dtype, quant, options)
        self.ffn = MoE(config, index < config.num_hash_layers, dtype, quant)
        self.attn_norm = Norm(config.hidden_size)
        self.ffn_norm = Norm(config.hidden_size)
        self.hc_attn_fn, self.hc_ffn_fn = (
            _fp32(mixes, count * config.hidden_size),
            _fp32(mixes, count * config.hidden_size),
        )
        self.hc_attn_base, self.hc_ffn_base = _fp32(mixes), _fp32(mixes)
        self.hc_attn_scale, self.hc_ffn_scale = _fp32(3), _fp32(3)

    def _mix(self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> MixWeights:
        config = self.config
        return mix_weights(
            streams,
            fn,
            scale,
            base,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            sinkhorn_iters=config.hc_sinkhorn_iters,
        )

    def forward(self, streams: Tensor, metadata: Metadata, cache: LayerCache) -> Tensor:
        """streams: [R, N, D] -> [R, N, D]."""
        eps = self.config.rms_norm_eps
        weights = self._mix(streams, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        x = rms_norm(collapse(streams, weights.pre), self.attn_norm.weight, eps)
        streams = expand(streams, self.attn(x, metadata, cache), weights)

        weights = self._mix(streams, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        x = rms_norm(collapse(streams, weights.pre), self.ffn_norm.weight, eps)
        return expand(streams, self.ffn(x, metadata.rows), weights)


class Embedding(nn.Module):
    """One vector per token id, [vocabulary, D] in the compute dtype."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((vocab_size, hidden_size), dtype=dtype), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [R] -> [R, D]."""
        return self.weight[input_ids]


class DeepseekV4(nn.Module):
    """The model. ``dtype`` is the compute dtype; norms, gates, compressors, mHC and the head stay fp32."""

    window_frequencies: Tensor
    compress_frequencies: Tensor

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        quant: ActivationQuant = ActivationQuant.NONE,
        indexer_options: IndexerOptions = DEFAULT_OPTIONS,
    ) -> None:
        super().__init__()
        self.config, self.indexer_options = config, indexer_options
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(
            Layer(config, index, dtype, quant, indexer_options) for index in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size)
        self.head = Linear(config.hidden_size, config.vocab_size, torch.float32)
        self.hc_head_fn = _fp32(config.hc_mult, config.hc_mult * config.hidden_size)
        self.hc_head_base, self.hc_head_scale = _fp32(config.hc_mult), _fp32(1)
        for name, compressed in (("window_frequencies", False), ("compress_frequencies", True)):
            frequencies = inverse_frequencies(config, compressed=compressed).to(self.norm.weight.device)
            self.register_buffer(name, frequencies, persistent=False)

    def metadata(self, rows: Rows) -> Metadata:
        """The step's metadata, to be built once and given to ``forward``."""
        return Metadata.build(
            rows, self.config, self.window_frequencies, self.compress_frequencies, plan=self.indexer_options.plan
        )

    @torch.no_grad()
    def forward(self, metadata: Metadata, caches: Sequence[LayerCache]) -> Tensor:
        """Run the rows of one step, writing their keys into ``caches``.

        Returns logits fp32 [S, vocabulary] of the wanted rows; those of padding are anything.
        """
        return self.logits(self.streams(metadata, caches)[metadata.rows.wanted.clamp_min(0)])

    def streams(self, metadata: Metadata, caches: Sequence[LayerCache]) -> Tensor:
        """The residual streams after the last layer, [R, N, D]."""
        streams = self.embed(metadata.rows.token).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for layer, cache in zip(self.layers, caches, strict=True):
            streams = layer(streams, metadata, cache)
        return streams

    def logits(self, streams: Tensor) -> Tensor:
        """Collapse, norm and head of the chosen rows: [S, N, D] -> fp32 [S, vocabulary]."""
        config = self.config
        hidden = head_collapse(
            streams,
            self.hc_head_fn,
            self.hc_head_scale,
            self.hc_head_base,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
        )
        return self.head(rms_norm(hidden, self.norm.weight, config.rms_norm_eps).float())
