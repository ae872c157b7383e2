"""The three forms in which a configuration is written, translated to the names of ``ModelConfig``.

* the released config.json: ``compress_ratios`` (with entries for the multi-token-prediction layers behind those of the
  model's own layers) and ``rope_scaling``;
* the one for DeepSeek's own inference code: other names for most values, the YaRN numbers at the top level;
* what transformers writes: ``layer_types``, ``mlp_layer_types``, ``compress_rates`` and ``rope_parameters`` with a
  ``main`` and a ``compress`` part.

Overrides are read as one more document, in the form of the one that they change. What a document says twice must agree.
Nothing else is checked here but what the translation itself needs; ``config_checks`` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tetrad.geometry import CSA_RATIO
from tetrad.models import config_layers, config_rope
from tetrad.models.config_checks import Problem, unknown_override
from tetrad.models.config_layers import DEFAULT_RATES, HEAVY, SLIDING, SPARSE
from tetrad.models.config_reading import Reading

MODEL_TYPE = "deepseek_v4"

# names in the configuration of DeepSeek's inference code -> names in the released config.json
_INFERENCE_NAMES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_hash_layers": "num_hash_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "norm_eps": "rms_norm_eps",
}

# "dtype" in the configuration of DeepSeek's inference code says whether the linears are FP8
_LINEAR_DTYPE = "_linear_dtype"
_LINEAR_DTYPES = ("bf16", "fp8")

_SAME_NAMES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "routed_scaling_factor",
    "num_hash_layers",
    "swiglu_limit",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "rms_norm_eps",
    "rope_theta",
    "compress_rope_theta",
    "max_position_embeddings",
    "compress_ratios",
)

# values that the model's formulas take for granted; a document may leave them out
_FIXED: dict[str, Any] = {
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}

# the same, for values that earlier DeepSeek models have and this one's documents do not
_FIXED_ELSEWHERE: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1}

# where null means that there is none of it, which this model cannot do without
_NULL_IS_NONE = ("n_shared_experts", "swiglu_limit")

# other names of a value, as transformers knows them
_ALIASES = {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"}

_TRANSLATED = (
    "model_type",
    "bos_token_id",
    "eos_token_id",
    "torch_dtype",
    "dtype",
    "expert_dtype",
    "quantization_config",
    "layer_types",
    "mlp_layer_types",
    "compress_rates",
    "compress_rate_csa",
    "compress_rate_hca",
    "partial_rotary_factor",
    *config_rope.NAMES,
)

_READ = (*_SAME_NAMES, *_FIXED, *_FIXED_ELSEWHERE, *_ALIASES, *_TRANSLATED)

_LOOSE = (*config_rope.INFERENCE_NAMES, _LINEAR_DTYPE)

# names that say the same thing: an override by one of them replaces what the document says by any
_GROUPS = (
    ("compress_ratios", "layer_types"),
    ("compress_rates", "compress_rate_csa", "compress_rate_hca"),
    ("num_hash_layers", "mlp_layer_types"),
    ("qk_rope_head_dim", "partial_rotary_factor"),
    ("torch_dtype", "dtype"),
    config_rope.NAMES,
    *((name, alias) for alias, name in _ALIASES.items()),
)

# objects of which an override may hold a part, and the names with which it holds a whole one
_OBJECTS = {
    **dict.fromkeys(config_rope.NAMES, config_rope.TYPE_NAMES),
    "quantization_config": ("quant_method",),
    "compress_rates": (),
}

# the size of the tiles and what is not converted follow from the tensors themselves
_QUANTIZATION = (
    *("quant_method", "fmt", "activation_scheme", "expert_dtype", "scale_fmt", "weight_block_size"),
    *("modules_to_not_convert", "ignored_layers", "dequantize"),
)

_DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}

# what a configuration may hold that has no part in computing the next token
_UNREAD = (
    *("architectures", "auto_map", "transformers_version", "name_or_path", "pad_token_id", "sep_token_id"),
    *("use_cache", "initializer_range", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    *("aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "attention_dropout", "num_nextn_predict_layers"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type", "max_batch_size", "max_seq_len", "scale_fmt", "scale_dtype"),
    *("n_mtp_layers", "unsloth_version"),
)
_UNREAD_STARTS = ("_", "dspark_")


def read(
    document: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, fields: Sequence[str] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Translates a parsed configuration and what overrides it.

    Args:
        document: the configuration, in any of the forms.
        overrides: by the names of that form, or by the names of fields.
        fields: the fields of ``ModelConfig``.

    Returns:
        the values by field (``compress_ratios`` untruncated, a value that the document lacks is absent), and what
        cannot be translated.
    """
    inference = "model_type" not in document and "dim" in document and "n_layers" in document
    overrides = dict(overrides or {})
    if inference:
        document, overrides = _renamed(document), _renamed(overrides, overriding=True)
    kept = {name: value for name, value in document.items() if name not in _replaced(overrides)}
    # a list of layers is measured against the number that counts, and the numbers of YaRN come in pairs
    together = ("num_hidden_layers", *(config_rope.INFERENCE_NAMES if inference else ()))
    kept |= {name: overrides[name] for name in together if name in overrides}
    reading = Reading(kept)
    if not inference and "model_type" not in overrides and document.get("model_type") != MODEL_TYPE:
        reading.report("model_type", _wrong_model_type(document.get("model_type")))
    _translate(reading, inference)
    changes = Reading({}, {})
    if overrides:
        whole = Reading(document)
        _translate(whole, inference)
        changes = Reading(overrides, whole.values)
        if (model_type := overrides.get("model_type", MODEL_TYPE)) != MODEL_TYPE:
            changes.report("model_type", _wrong_model_type(model_type))
        _translate(changes, inference)
        _read_other_overrides(changes, [*_READ, *(_LOOSE if inference else ())], fields)
    return reading.values | changes.values, reading.problems + changes.problems


def _renamed(document: Mapping[str, Any], *, overriding: bool = False) -> dict[str, Any]:
    """A document of DeepSeek's inference code in the names of the released form, as far as that has the values."""
    result = {_INFERENCE_NAMES.get(name, name): value for name, value in document.items()}
    # an override may also give the dtype of the weights, which the released form calls so
    if "dtype" in result and (not overriding or result["dtype"] in _LINEAR_DTYPES):
        result[_LINEAR_DTYPE] = result.pop("dtype")
    return result


def is_known(name: str) -> bool:
    """Whether any form of a configuration has this name, be it read or not."""
    return name in (*_READ, *_INFERENCE_NAMES, *config_rope.INFERENCE_NAMES) or _is_unread(name)


def _is_unread(name: str) -> bool:
    return name in _UNREAD or name.startswith(_UNREAD_STARTS)


def _read_other_overrides(reading: Reading, read: Sequence[str], fields: Sequence[str]) -> None:
    """Those by the name of a field that no form of a configuration has; any other name is reported."""
    for name, value in reading.document.items():
        if name in read:
            continue
        if name in fields:
            reading.put(name, value, name)
        elif _is_unread(name):
            reading.report(name, "is not read here, so that an override of it would change nothing; leave it out")
        else:
            reading.problems.append(unknown_override(name, [*fields, *read]))


def _replaced(overrides: Mapping[str, Any]) -> set[str]:
    """The names of the document that overrides replace, be it under another name; not those that get a part changed."""
    names: set[str] = set()
    for name, value in overrides.items():
        whole = _OBJECTS.get(name)
        if whole is not None and isinstance(value, Mapping) and value and not any(key in value for key in whole):
            continue
        names |= {name}.union(*(group for group in _GROUPS if name in group))
    return names


def _translate(reading: Reading, inference: bool) -> None:
    document = reading.document
    for name, only in (_FIXED | _FIXED_ELSEWHERE).items():
        value = document.get(name, only)
        if value is None and (only is False or name in _FIXED_ELSEWHERE):
            continue  # null says the same as leaving it out
        if type(value) is not type(only) or value != only:
            reading.report(name, f"is {value!r}, must be {only!r}: nothing else is implemented")
    for name in _SAME_NAMES:
        null_counts = reading.is_override or name in _NULL_IS_NONE
        if document.get(name) is not None or (null_counts and name in document):
            reading.put(name, document[name], name)
    for alias, name in _ALIASES.items():
        if document.get(alias) is not None:
            reading.put(name, document[alias], alias)
    if "bos_token_id" in document:
        reading.put("bos_token_id", document["bos_token_id"], "bos_token_id")
    if "eos_token_id" in document:
        ends = document["eos_token_id"]
        reading.put("eos_token_id", () if ends is None else ends, "eos_token_id")
    config_layers.read(reading)
    if inference:
        config_rope.read_inference(reading)
    if not inference or reading.is_override:
        config_rope.read(reading)
    if inference:
        _read_linear_dtype(reading)
    if not inference or reading.is_override:
        _read_dtype(reading)
        _read_quantization(reading)
    _read_expert_dtype(reading)


def truncate_ratios(values: dict[str, Any]) -> None:
    """Cuts ``compress_ratios`` to the model's own layers; the released lists go on with the prediction layers'."""
    ratios, layers = values.get("compress_ratios"), values.get("num_hidden_layers")
    if isinstance(ratios, list | tuple) and isinstance(layers, int) and layers > 0:
        values["compress_ratios"] = tuple(ratios[:layers])


def write_native(values: Mapping[str, Any]) -> dict[str, Any]:
    """The released form of a configuration, from the fields of ``ModelConfig``."""
    document: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": MODEL_TYPE}
    document |= {name: values[name] for name in _SAME_NAMES} | _FIXED
    document["compress_ratios"] = list(values["compress_ratios"])
    document["num_nextn_predict_layers"] = 0
    document["bos_token_id"] = values["bos_token_id"]
    ends = values["eos_token_id"]
    document["eos_token_id"] = ends[0] if len(ends) == 1 else (list(ends) or None)
    document["torch_dtype"] = values["torch_dtype"]
    document["rope_scaling"] = None
    if values["rope_factor"] != 1.0:
        document["rope_scaling"] = {
            "type": "yarn",
            "factor": values["rope_factor"],
            "original_max_position_embeddings": values["rope_original_max_position_embeddings"],
            "beta_fast": values["rope_beta_fast"],
            "beta_slow": values["rope_beta_slow"],
        }
    if values["expert_dtype"] is not None:
        document["expert_dtype"] = values["expert_dtype"]
    if values["quantized"]:
        document["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }
    heavy = {ratio for ratio in values["compress_ratios"] if ratio not in (0, CSA_RATIO)}
    if heavy - {128}:
        # transformers knows the HCA ratio 128 alone by number, any other only by these two
        kinds = {0: SLIDING, CSA_RATIO: SPARSE}
        document["layer_types"] = [kinds.get(ratio, HEAVY) for ratio in values["compress_ratios"]]
        document["compress_rates"] = DEFAULT_RATES | {HEAVY: heavy.pop()}
    return document


def _wrong_model_type(model_type: Any) -> str:
    if model_type is None:
        return f"is missing, must be {MODEL_TYPE!r}"
    if model_type == "deepseek_v41":
        return f"is {model_type!r}: DeepSeek-V4.1 is another architecture and not supported; use a {MODEL_TYPE!r} model"
    return f"is {model_type!r}, must be {MODEL_TYPE!r}"


def _read_linear_dtype(reading: Reading) -> None:
    dtype = reading.document.get(_LINEAR_DTYPE, None if reading.is_override else "bf16")
    if dtype is None and reading.is_override:
        return
    if dtype not in _LINEAR_DTYPES:
        reading.report("dtype", f"is {dtype!r}, must be 'bf16' or 'fp8'")
    reading.put("quantized", dtype == "fp8", "dtype", dtype)


def _read_dtype(reading: Reading) -> None:
    for name in ("torch_dtype", "dtype"):  # transformers 5 writes the second
        value = reading.document.get(name)
        if value is not None:
            reading.put("torch_dtype", _dtype_name(value), name, value)


def _dtype_name(value: Any) -> Any:
    """``float32`` for "float32", "torch.float32", "fp32" and the dtype of torch itself; what is no name as it is."""
    if type(value).__name__ == "dtype":
        value = str(value)
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    return _DTYPE_NAMES.get(name, name)


def _read_quantization(reading: Reading) -> None:
    given = reading.document.get("quantization_config")
    if given is not None and not isinstance(given, Mapping):
        reading.report("quantization_config", f"is {given!r}, must be an object or null")
        given = None
    if given:
        _check_quantization(reading, given)
    if "quantization_config" in reading.document or not reading.is_override:
        reading.put("quantized", bool(given), "quantization_config", given)  # an empty object says nothing


def _check_quantization(reading: Reading, given: Mapping[str, Any]) -> None:
    for name in given:
        if reading.is_override and name not in _QUANTIZATION:
            reading.report(f"quantization_config.{name}", f"is not known; known are {', '.join(_QUANTIZATION)}")
    extends = reading.is_override and reading.base.get("quantized") is True
    for name, only in (("quant_method", "fp8"), ("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        value = given.get(name)
        if value is None and name == "quant_method" and not extends:
            reading.report(f"quantization_config.{name}", f"is missing, must be {only!r}")
        elif value is not None and value != only:
            reading.report(f"quantization_config.{name}", f"is {value!r}, must be {only!r}")


def _read_expert_dtype(reading: Reading) -> None:
    document = reading.document
    if document.get("expert_dtype") is not None or (reading.is_override and "expert_dtype" in document):
        reading.put("expert_dtype", document["expert_dtype"], "expert_dtype")
    nested = document.get("quantization_config")
    if isinstance(nested, Mapping) and nested.get("expert_dtype") is not None:
        reading.put("expert_dtype", nested["expert_dtype"], "quantization_config.expert_dtype")
