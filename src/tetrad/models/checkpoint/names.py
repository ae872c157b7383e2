"""From the names in a file to the native names.

Three spellings are understood, and any mixture of them, since what transformers saves is one:

* native: ``layers.0.attn.wq_a.weight``, ``layers.0.ffn.experts.3.w1.weight`` and ``.scale`` beside a quantised weight;
* the module names of transformers: ``model.layers.0.self_attn.q_a_proj.weight``, ``.weight_scale_inv``, experts
  stacked as ``experts.gate_up_proj`` [experts, 2 * inter, hidden] (gate first) and ``experts.down_proj`` [experts,
  hidden, inter];
* what ``save_pretrained`` of transformers writes: native names under ``model.``, a bare ``head.weight``, the norm of
  the KV vector as ``attn.norm``, the embedding and the hyper-connection head by their module names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_TOP = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}

_BLOCK = {
    "self_attn": "attn",
    "mlp": "ffn",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
}

_COMPRESSOR = {"kv_proj": "wkv", "gate_proj": "wgate", "position_bias": "ape", "kv_norm": "norm"}

_ATTENTION = {
    "sinks": "attn_sink",
    "q_a_proj": "wq_a",
    "q_a_norm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "norm": "kv_norm",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "compressor.indexer.q_b_proj": "indexer.wq_b",
    "compressor.indexer.scorer.weights_proj": "indexer.weights_proj",
    **{f"compressor.{theirs}": f"compressor.{ours}" for theirs, ours in _COMPRESSOR.items()},
    **{f"compressor.indexer.{theirs}": f"indexer.compressor.{ours}" for theirs, ours in _COMPRESSOR.items()},
}

_FEED_FORWARD = {"gate.e_score_correction_bias": "gate.bias"}

_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

# a stack of all experts' weights -> the weights that it holds one below the other
_STACKS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",), "w1": ("w1",), "w2": ("w2",), "w3": ("w3",)}

_STACK = re.compile(r"(layers\.\d+\.ffn\.experts)\.(gate_up_proj|down_proj|w[123])(_scale_inv)?")


class Part(NamedTuple):
    """A native tensor inside a stored one: all of it, or ``[expert, start:stop]`` of a stack of experts."""

    native: str
    expert: int | None = None
    start: int = 0
    stop: int = 0


def is_ignored(name: str) -> bool:
    """Whether a stored tensor belongs to the multi-token-prediction layers, which are not part of the model."""
    return name.removeprefix("model.").startswith("mtp.")


def native_parts(name: str, shape: Sequence[int]) -> list[Part]:
    """The native tensors (weights and scales) that a stored tensor holds.

    Args:
        name: its name in the file, in any of the three spellings. An unknown name comes back as it is.
        shape: its shape in the file, which says how many experts a stack has.
    """
    native = native_name(name)
    stack = _STACK.fullmatch(native)
    if stack is None or len(shape) != 3:
        return [Part(native)]
    weights, suffix = _STACKS[stack[2]], "scale" if stack[3] else "weight"
    if shape[1] % len(weights):
        return [Part(native)]
    rows = shape[1] // len(weights)
    return [
        Part(f"{stack[1]}.{expert}.{weight}.{suffix}", expert, index * rows, (index + 1) * rows)
        for expert in range(shape[0])
        for index, weight in enumerate(weights)
    ]


def native_name(name: str) -> str:
    """One name in any of the three spellings as the native one; stacks of experts keep their last component."""
    name = name.removeprefix("model.")
    if name.endswith(".weight_scale_inv"):
        name = name.removesuffix(".weight_scale_inv") + ".scale"
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".", 2)
    if parts[0] != "layers" or len(parts) < 3:
        return name
    rest = _replace_start(parts[2], _BLOCK)
    block, _, inner = rest.partition(".")
    if block == "attn":
        inner = _replace_start(inner, _ATTENTION)
    elif block == "ffn":
        inner = _replace_start(inner, _FEED_FORWARD)
        where, _, leaf = inner.partition(".")
        if where == "shared_experts":
            inner = f"{where}.{_replace_start(leaf, _EXPERT)}"
        elif where == "experts" and leaf.partition(".")[0].isdigit():
            expert, _, leaf = leaf.partition(".")
            inner = f"{where}.{expert}.{_replace_start(leaf, _EXPERT)}"
    return ".".join(part for part in ("layers", parts[1], block, inner) if part)


def _replace_start(name: str, table: dict[str, str]) -> str:
    """``name`` with its longest start (of whole components) that stands in the table replaced."""
    components = name.split(".")
    for length in range(len(components), 0, -1):
        start = ".".join(components[:length])
        if start in table:
            return ".".join([table[start], *components[length:]])
    return name
