"""What every value of a model configuration may be."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tetrad.geometry import BLOCK_SIZE, CSA_RATIO


class Problem(NamedTuple):
    """One value that cannot be used: the field and what is wrong with it."""

    field: str
    text: str


# smallest and largest value; None is no bound
_INTEGERS: dict[str, tuple[int, int | None]] = {
    "vocab_size": (1, None),
    "hidden_size": (1, None),
    "num_hidden_layers": (1, None),
    "num_attention_heads": (1, None),
    "head_dim": (1, None),
    "qk_rope_head_dim": (2, None),
    "q_lora_rank": (1, None),
    "o_groups": (1, None),
    "o_lora_rank": (1, None),
    "sliding_window": (1, BLOCK_SIZE),
    "index_n_heads": (1, None),
    "index_head_dim": (2, None),
    "index_topk": (1, None),
    "moe_intermediate_size": (1, None),
    "n_routed_experts": (1, None),
    "num_experts_per_tok": (1, None),
    "n_shared_experts": (1, 1),
    "num_hash_layers": (0, None),
    "hc_mult": (1, 32),  # sums over more streams would depend on the rows of a step
    "hc_sinkhorn_iters": (1, None),
    "rope_original_max_position_embeddings": (1, None),
    "max_position_embeddings": (1, None),
}

# the value must be above this (or, where the flag is set, may equal it)
_NUMBERS: dict[str, tuple[float, bool]] = {
    "routed_scaling_factor": (0.0, False),
    "swiglu_limit": (0.0, False),
    "hc_eps": (0.0, True),
    "rms_norm_eps": (0.0, True),
    "rope_theta": (1.0, False),
    "compress_rope_theta": (1.0, False),
    "rope_factor": (1.0, True),
    "rope_beta_fast": (0.0, False),
    "rope_beta_slow": (0.0, False),
}

_CHOICES: dict[str, tuple[Any, ...]] = {
    "torch_dtype": ("bfloat16", "float32"),
    "expert_dtype": ("fp4", "fp8", None),
    "quantized": (True, False),
}


def problems(values: Mapping[str, Any], required: Sequence[str] | None = None) -> list[Problem]:
    """Everything that is wrong with a configuration's values, by field name.

    Args:
        values: field name to value.
        required: names that must be there; default: those in ``values``.
    """
    found: list[Problem] = []
    bad: set[str] = set()

    def report(field: str, text: str) -> None:
        bad.add(field)
        found.append(Problem(field, text))

    def usable(*fields: str) -> bool:
        return not any(field in bad or field not in values for field in fields)

    for field in required or ():
        if field not in values:
            report(field, "is missing")
    for field, (low, high) in _INTEGERS.items():
        if usable(field) and not (_is_integer(values[field]) and low <= values[field] <= (high or values[field])):
            report(field, f"is {values[field]!r}, must be {_integer_range(low, high)}")
    for field, (low, inclusive) in _NUMBERS.items():
        if usable(field) and not _is_number_above(values[field], low, inclusive):
            report(field, f"is {values[field]!r}, must be a number {'>=' if inclusive else '>'} {low:g}")
    for field, choices in _CHOICES.items():
        # the type is compared too, since 1 == True
        if usable(field) and not any(values[field] is c or (values[field] == c and type(c) is str) for c in choices):
            report(field, f"is {values[field]!r}, must be one of {', '.join(map(repr, choices))}")

    if usable("compress_ratios"):
        for text in _ratio_problems(values["compress_ratios"], values if usable("num_hidden_layers") else {}):
            report("compress_ratios", text)
    if usable("head_dim", "qk_rope_head_dim") and values["qk_rope_head_dim"] >= values["head_dim"]:
        report("qk_rope_head_dim", f"is {values['qk_rope_head_dim']}, must be below head_dim {values['head_dim']}")
    if usable("qk_rope_head_dim") and values["qk_rope_head_dim"] % 2:
        report("qk_rope_head_dim", f"is {values['qk_rope_head_dim']}, must be even: RoPE turns pairs")
    if usable("index_head_dim") and values["index_head_dim"].bit_count() != 1:
        report(
            "index_head_dim", f"is {values['index_head_dim']}, must be a power of two: the Hadamard rotation needs it"
        )
    if usable("index_head_dim", "qk_rope_head_dim") and values["qk_rope_head_dim"] > values["index_head_dim"]:
        report(
            "index_head_dim", f"is {values['index_head_dim']}, must be >= qk_rope_head_dim {values['qk_rope_head_dim']}"
        )
    if usable("num_attention_heads", "o_groups") and values["num_attention_heads"] % values["o_groups"]:
        report("o_groups", f"is {values['o_groups']}, must divide num_attention_heads {values['num_attention_heads']}")
    if usable("num_experts_per_tok", "n_routed_experts") and values["num_experts_per_tok"] > values["n_routed_experts"]:
        allowed = f"at most n_routed_experts {values['n_routed_experts']}"
        report("num_experts_per_tok", f"is {values['num_experts_per_tok']}, must be {allowed}")
    if usable("num_hash_layers", "num_hidden_layers") and values["num_hash_layers"] > values["num_hidden_layers"]:
        allowed = f"at most num_hidden_layers {values['num_hidden_layers']}"
        report("num_hash_layers", f"is {values['num_hash_layers']}, must be {allowed}")
    if usable("rope_beta_fast", "rope_beta_slow") and values["rope_beta_fast"] < values["rope_beta_slow"]:
        report("rope_beta_fast", f"is {values['rope_beta_fast']}, must be >= rope_beta_slow {values['rope_beta_slow']}")
    if usable("expert_dtype") and values["expert_dtype"] == "fp4":
        for field in ("hidden_size", "moe_intermediate_size"):
            if usable(field) and values[field] % 32:
                report(field, f"is {values[field]}, must be a multiple of 32 where expert_dtype is 'fp4'")
    if usable("eos_token_id"):
        ids = values["eos_token_id"]
        if not isinstance(ids, tuple | list):
            ids = [ids]
        if not all(_is_token(i, values if usable("vocab_size") else {}) for i in ids):
            report(
                "eos_token_id",
                f"is {values['eos_token_id']!r}, must be a token id (or a list of them) below vocab_size",
            )
    start = values.get("bos_token_id")
    if start is not None and not _is_token(start, values if usable("vocab_size") else {}):
        report("bos_token_id", f"is {start!r}, must be a token id below vocab_size, or null")
    return found


def normalised(values: Mapping[str, Any]) -> dict[str, Any]:
    """The checked values in the types that the record declares: floats, tuples, a tuple of end-of-sequence ids."""
    result: dict[str, Any] = {field: float(values[field]) for field in _NUMBERS}
    result["compress_ratios"] = tuple(values["compress_ratios"])
    ids = values["eos_token_id"]
    result["eos_token_id"] = tuple(ids) if isinstance(ids, tuple | list) else (ids,)
    return result


def unknown_override(name: str, known: list[str]) -> Problem:
    """The problem of an override that names no field, with the nearest name that exists."""
    near = difflib.get_close_matches(name, known, n=1)
    return Problem(name, "is no field of the configuration" + (f", did you mean {near[0]}?" if near else ""))


def _ratio_problems(ratios: Any, values: Mapping[str, Any]) -> list[str]:
    if not isinstance(ratios, tuple | list) or not all(_is_integer(ratio) for ratio in ratios):
        return [f"is {ratios!r}, must be a list of integers, one per layer"]
    found = []
    if "num_hidden_layers" in values and len(ratios) != values["num_hidden_layers"]:
        found.append(f"has {len(ratios)} entries, must have one for each of the {values['num_hidden_layers']} layers")
    allowed = "allowed are 0 (window only), 4 (CSA) and one other divisor of 256 (HCA)"
    wrong = sorted({ratio for ratio in ratios if ratio < 0 or (ratio and BLOCK_SIZE % ratio)})
    if wrong:
        found.append(f"holds {', '.join(map(str, wrong))}; {allowed}")
    heavy = sorted({ratio for ratio in ratios if ratio not in (0, CSA_RATIO)} - set(wrong))
    if len(heavy) > 1:
        found.append(f"holds the HCA ratios {', '.join(map(str, heavy))}; {allowed}, the same in every HCA layer")
    return found


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number_above(value: Any, low: float, inclusive: bool) -> bool:
    if not (_is_integer(value) or isinstance(value, float)):
        return False
    # an integer may be too large for a float, and NaN compares as false
    return low < value <= sys.float_info.max or (inclusive and value == low)


def _is_token(value: Any, values: Mapping[str, Any]) -> bool:
    return _is_integer(value) and 0 <= value < values.get("vocab_size", value + 1)


def _integer_range(low: int, high: int | None) -> str:
    if high is None:
        return f"an integer >= {low}"
    return f"{low}" if low == high else f"an integer from {low} to {high}"
