"""The tensors of a DeepSeek-V4 checkpoint, by their native names."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from tetrad.models.config import LayerKind, ModelConfig


class TensorKind(enum.Enum):
    """How the released checkpoints store a tensor, and thereby what else it may be stored as."""

    LINEAR = "linear"  # FP8 with a scale per 128x128 tile
    EXPERT = "expert"  # FP4 with a scale per 32 inputs (or FP8, in the base models)
    BF16 = "bf16"
    F32 = "f32"
    I64 = "i64"


class TensorSpec(NamedTuple):
    """One tensor of the model: its shape (unpacked) and its kind."""

    shape: tuple[int, ...]
    kind: TensorKind

    @property
    def has_scale(self) -> bool:
        """Whether the released checkpoints store a scale beside it."""
        return self.kind in (TensorKind.LINEAR, TensorKind.EXPERT)


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint of this configuration must hold.

    Returns:
        native name -> shape and kind, in the order of the layers. Routed experts are named one by one
        (``layers.3.ffn.experts.7.w1.weight``); scales and the multi-token-prediction layers are not named.
    """
    hidden, streams = config.hidden_size, config.hc_mult
    tensors = {
        "embed.weight": TensorSpec((config.vocab_size, hidden), TensorKind.BF16),
        "head.weight": TensorSpec((config.vocab_size, hidden), TensorKind.BF16),
        "norm.weight": TensorSpec((hidden,), TensorKind.BF16),
        "hc_head_fn": TensorSpec((streams, streams * hidden), TensorKind.F32),
        "hc_head_base": TensorSpec((streams,), TensorKind.F32),
        "hc_head_scale": TensorSpec((1,), TensorKind.F32),
    }
    for layer, kind in enumerate(config.layer_kinds):
        for name, spec in _layer(config, layer, kind).items():
            tensors[f"layers.{layer}.{name}"] = spec
    return tensors


_EXPERT_WEIGHT = re.compile(r"(layers\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight")


def parameter_name(native: str) -> tuple[str, int | None]:
    """Where a native tensor lives in the model: its parameter, and its index in that stack for a routed expert.

    ``layers.3.ffn.experts.7.w1.weight`` is row 7 of the parameter ``layers.3.ffn.experts.w1`` [experts, out, in]; every
    other tensor is the parameter (or buffer) of the same name.
    """
    if match := _EXPERT_WEIGHT.fullmatch(native):
        return f"{match[1]}.{match[3]}", int(match[2])
    return native, None


def scale_name(native: str) -> str:
    """The native name of the scale of a quantised weight."""
    return native.removesuffix(".weight") + ".scale"


def _layer(config: ModelConfig, layer: int, kind: LayerKind) -> dict[str, TensorSpec]:
    hidden, streams = config.hidden_size, config.hc_mult
    mixes = streams * (streams + 2)
    tensors = {}
    for part in ("attn", "ffn"):
        tensors[f"{part}_norm.weight"] = TensorSpec((hidden,), TensorKind.BF16)
        tensors[f"hc_{part}_fn"] = TensorSpec((mixes, streams * hidden), TensorKind.F32)
        tensors[f"hc_{part}_base"] = TensorSpec((mixes,), TensorKind.F32)
        tensors[f"hc_{part}_scale"] = TensorSpec((3,), TensorKind.F32)
    tensors |= {f"attn.{name}": spec for name, spec in _attention(config, layer, kind).items()}
    tensors |= {f"ffn.{name}": spec for name, spec in _feed_forward(config, layer).items()}
    return tensors


def _attention(config: ModelConfig, layer: int, kind: LayerKind) -> dict[str, TensorSpec]:
    hidden, heads, dim, rank = config.hidden_size, config.num_attention_heads, config.head_dim, config.q_lora_rank
    tensors = {
        "attn_sink": TensorSpec((heads,), TensorKind.F32),
        "wq_a.weight": TensorSpec((rank, hidden), TensorKind.LINEAR),
        "q_norm.weight": TensorSpec((rank,), TensorKind.BF16),
        "wq_b.weight": TensorSpec((heads * dim, rank), TensorKind.LINEAR),
        "wkv.weight": TensorSpec((dim, hidden), TensorKind.LINEAR),
        "kv_norm.weight": TensorSpec((dim,), TensorKind.BF16),
        "wo_a.weight": TensorSpec(
            (config.o_groups * config.o_lora_rank, heads // config.o_groups * dim), TensorKind.LINEAR
        ),
        "wo_b.weight": TensorSpec((hidden, config.o_groups * config.o_lora_rank), TensorKind.LINEAR),
    }
    ratio = config.compress_ratios[layer]
    if kind is LayerKind.HCA:
        tensors |= _compressor("compressor", hidden, dim, ratio)
    if kind is LayerKind.CSA:  # overlapping entries: every token feeds its own block and the next
        index_dim = config.index_head_dim
        tensors |= _compressor("compressor", hidden, 2 * dim, ratio, dim)
        tensors["indexer.wq_b.weight"] = TensorSpec((config.index_n_heads * index_dim, rank), TensorKind.LINEAR)
        tensors["indexer.weights_proj.weight"] = TensorSpec((config.index_n_heads, hidden), TensorKind.BF16)
        tensors |= _compressor("indexer.compressor", hidden, 2 * index_dim, ratio, index_dim)
    return tensors


def _compressor(prefix: str, hidden: int, width: int, ratio: int, entry: int | None = None) -> dict[str, TensorSpec]:
    return {
        f"{prefix}.wkv.weight": TensorSpec((width, hidden), TensorKind.BF16),
        f"{prefix}.wgate.weight": TensorSpec((width, hidden), TensorKind.BF16),
        f"{prefix}.ape": TensorSpec((ratio, width), TensorKind.F32),
        f"{prefix}.norm.weight": TensorSpec((entry or width,), TensorKind.BF16),
    }


def _feed_forward(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    hidden, inter, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    tensors = {"gate.weight": TensorSpec((experts, hidden), TensorKind.BF16)}
    if config.is_hash_layer(layer):
        tensors["gate.tid2eid"] = TensorSpec((config.vocab_size, config.num_experts_per_tok), TensorKind.I64)
    else:
        tensors["gate.bias"] = TensorSpec((experts,), TensorKind.F32)
    shapes = {"w1": (inter, hidden), "w2": (hidden, inter), "w3": (inter, hidden)}
    for name, shape in shapes.items():
        tensors[f"shared_experts.{name}.weight"] = TensorSpec(shape, TensorKind.LINEAR)
    for expert in range(experts):
        for name, shape in shapes.items():
            tensors[f"experts.{expert}.{name}.weight"] = TensorSpec(shape, TensorKind.EXPERT)
    return tensors
