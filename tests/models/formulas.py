"""DeepSeek-V4's formulas in fp64, as plainly as they can be said: the oracle of the model's parts.

They take a whole sequence at once and know nothing of steps, caches, pages or blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tetrad.models.attention import Attention, CsaAttention, HcaAttention
from tetrad.models.compressor import Compressor
from tetrad.models.config import ModelConfig


def fp8_rounded(x: Tensor, group: int) -> Tensor:
    """fp64 ``x`` after E4M3 with one power-of-two scale for every ``group`` channels: nearest, ties to even."""
    result = torch.empty_like(x)
    for start in range(0, x.shape[-1], group):
        part = x[..., start : start + group]
        scale = 2.0 ** torch.ceil(torch.log2(part.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448))
        value = part / scale
        # three mantissa bits; below 2^-6 the steps grow no finer
        step = 2.0 ** (torch.floor(torch.log2(value.abs().clamp_min(2.0**-6))) - 3)
        result[..., start : start + group] = torch.round(value / step) * step * scale
    return result


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps)."""
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight.double()


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, *, inverse: bool = False) -> Tensor:
    """The last channels of x [N, ..., d] as complex numbers, turned by the fp32 product position * frequency."""
    angle = (positions.float().unsqueeze(1) * frequencies).double()
    angle = angle.view(len(x), *(1 for _ in x.shape[1:-1]), -1)
    rope = 2 * angle.shape[-1]
    pairs = torch.view_as_complex(x[..., -rope:].unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angle), -angle if inverse else angle)
    return torch.cat((x[..., :-rope], torch.view_as_real(turned).flatten(-2)), dim=-1)


def pooled_entries(compressor: Compressor, x: Tensor) -> Tensor:
    """The compressor's entries of a sequence x fp64 [L, D]: fp64 [L // ratio, e]."""
    ratio = compressor.ratio
    value = x @ compressor.wkv.weight.double().T
    bias = compressor.ape.double()[torch.arange(len(x)) % ratio]
    gate = x @ compressor.wgate.weight.double().T + bias
    dim = compressor.norm.weight.shape[0]
    entries = []
    for first in range(0, len(x) - ratio + 1, ratio):
        own = slice(first, first + ratio)
        if not compressor.overlap:
            values, gates = value[own], gate[own]
        else:
            # the first half of the channels is for the block after the token's own
            before = slice(max(0, first - ratio), first)
            values = torch.cat((value[before, :dim], value[own, dim:]))
            gates = torch.cat((gate[before, :dim], gate[own, dim:]))
        entries.append((torch.softmax(gates, dim=0) * values).sum(0))
    return torch.stack(entries) if entries else x.new_zeros(0, dim)


def compressed_keys(config: ModelConfig, compressor: Compressor, x: Tensor, frequencies: Tensor) -> Tensor:
    """Pooled, normed, and rotated to the position of the block's first token."""
    entries = rms_norm(pooled_entries(compressor, x), compressor.norm.weight, config.rms_norm_eps)
    return rotate(entries, torch.arange(len(entries)) * compressor.ratio, frequencies)


def chosen_entries(
    config: ModelConfig, layer: CsaAttention, x: Tensor, q_latent: Tensor, frequencies: Tensor, quant: bool = False
) -> list[list[int]]:
    """The index entries of every position. (Query and key are not turned by Hadamard here: it cancels.)"""
    indexer = layer.indexer
    source = fp8_rounded(q_latent, 128) if quant else q_latent
    query = (source @ indexer.wq_b.weight.double().T).unflatten(1, (indexer.heads, indexer.head_dim))
    query = rotate(query, torch.arange(len(x)), frequencies)
    keys = compressed_keys(config, indexer.compressor, x, frequencies)
    weights = x @ indexer.weights_proj.weight.double().T / math.sqrt(indexer.head_dim * indexer.heads)
    result = []
    for position in range(len(x)):
        visible = keys[: (position + 1) // 4]
        scores = torch.relu(query[position] @ visible.T).T @ weights[position]
        result.append(scores.topk(min(config.index_topk, len(visible))).indices.tolist())
    return result


def attention(
    config: ModelConfig, layer: Attention, x: Tensor, frequencies: Tensor, *, quant: str = "", fp8_keys: bool = False
) -> Tensor:
    """One attention layer over a sequence x fp64 [L, D], already normed: fp64 [L, D].

    ``frequencies``: those of the layer's kind. ``quant``: the names of the linears whose input is rounded to FP8,
    apart by spaces. ``fp8_keys``: the rope-free channels of all keys are rounded to FP8 in groups of 64.
    """
    eps, heads, dim = config.rms_norm_eps, config.num_attention_heads, config.head_dim
    positions = torch.arange(len(x))

    def linear(name: str, value: Tensor) -> Tensor:
        source = fp8_rounded(value, 128) if name in quant.split() else value
        return source @ getattr(layer, name).weight.double().T

    def stored(keys: Tensor) -> Tensor:
        nope = config.nope_head_dim
        return torch.cat((fp8_rounded(keys[:, :nope], 64), keys[:, nope:]), dim=1) if fp8_keys else keys

    q_latent = rms_norm(linear("wq_a", x), layer.q_norm.weight, eps)
    query = rms_norm(linear("wq_b", q_latent).unflatten(1, (heads, dim)), None, eps)
    query = rotate(query, positions, frequencies)
    window = stored(rotate(rms_norm(linear("wkv", x), layer.kv_norm.weight, eps), positions, frequencies))
    compressed, choice = window[:0], [[] for _ in range(len(x))]
    if isinstance(layer, (CsaAttention, HcaAttention)):
        compressed = stored(compressed_keys(config, layer.compressor, x, frequencies))
        ratio = layer.compressor.ratio
        choice = [list(range((position + 1) // ratio)) for position in range(len(x))]
    if isinstance(layer, CsaAttention):
        choice = chosen_entries(config, layer, x, q_latent, frequencies, "indexer.wq_b" in quant.split())

    outputs = []
    for position in range(len(x)):
        first = max(0, position - config.sliding_window + 1)
        keys = torch.cat((window[first : position + 1], compressed[choice[position]]))
        scores = query[position] @ keys.T / math.sqrt(dim)
        # the sink is one more score, whose value is nothing
        weights = torch.softmax(torch.cat((scores, layer.attn_sink.double().unsqueeze(1)), dim=1), dim=1)
        outputs.append(weights[:, :-1] @ keys)
    output = rotate(torch.stack(outputs), positions, frequencies, inverse=True)

    groups = output.flatten(1).chunk(config.o_groups, dim=1)
    if "wo_a" in quant.split():
        groups = [fp8_rounded(group, 128) for group in groups]
    weights = layer.wo_a.weight.double().chunk(config.o_groups)
    latent = torch.cat([group @ weight.T for group, weight in zip(groups, weights, strict=True)], dim=1)
    return linear("wo_b", latent)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(g, limit)) * clamp(u, -limit, limit)."""
    gate = gate.clamp(max=limit)
    return gate / (1 + torch.exp(-gate)) * up.clamp(-limit, limit)
