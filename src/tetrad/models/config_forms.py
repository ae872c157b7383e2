"""The three forms in which a configuration is written, translated to the names of ``ModelConfig``.

* the released config.json: ``compress_ratios`` (with entries for the multi-token-prediction layers behind those of the
  model's own layers) and ``rope_scaling``;
* the one for DeepSeek's own inference code: other names for most values, the YaRN numbers at the top level;
* what transformers writes: ``layer_types``, ``mlp_layer_types``, ``compress_rates`` and ``rope_parameters`` with a
  ``main`` and a ``compress`` part.

Nothing is checked here but what the translation itself needs; ``config_checks`` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tetrad.geometry import CSA_RATIO
from tetrad.models.config_checks import Problem

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

_LAYER_TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
_MLP_LAYER_TYPES = ("hash_moe", "moe")
_DEFAULT_RATES = {"compressed_sparse_attention": CSA_RATIO, "heavily_compressed_attention": 128}


def read(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Translates a parsed configuration.

    Returns:
        the values by the field names of ``ModelConfig`` (``compress_ratios`` untruncated, a value that the document
        lacks is absent), and what cannot be translated.
    """
    inference = "model_type" not in document and "dim" in document and "n_layers" in document
    problems: list[Problem] = []
    if inference:
        document = {_INFERENCE_NAMES.get(name, name): value for name, value in document.items()}
    elif document.get("model_type") != MODEL_TYPE:
        problems.append(Problem("model_type", _wrong_model_type(document.get("model_type"))))
    for name, only in _FIXED.items():
        value = document.get(name, only)
        if type(value) is not type(only) or value != only:
            problems.append(Problem(name, f"is {value!r}, must be {only!r}: nothing else is implemented"))

    values = {name: document[name] for name in _SAME_NAMES if document.get(name) is not None}
    if "bos_token_id" in document:
        values["bos_token_id"] = document["bos_token_id"]
    if "eos_token_id" in document:
        values["eos_token_id"] = () if document["eos_token_id"] is None else document["eos_token_id"]
    _read_layer_types(document, values, problems)
    if inference:
        _read_inference_rope(document, values)
        _read_inference_dtype(document, values, problems)
    else:
        _read_rope(document, values, problems)
        _read_dtype(document, values, problems)
    return values, problems


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
        kinds = {0: "sliding_attention", CSA_RATIO: "compressed_sparse_attention"}
        document["layer_types"] = [kinds.get(r, "heavily_compressed_attention") for r in values["compress_ratios"]]
        document["compress_rates"] = _DEFAULT_RATES | {"heavily_compressed_attention": heavy.pop()}
    return document


def _wrong_model_type(model_type: Any) -> str:
    if model_type is None:
        return f"is missing, must be {MODEL_TYPE!r}"
    if model_type == "deepseek_v41":
        return f"is {model_type!r}: DeepSeek-V4.1 is another architecture and not supported; use a {MODEL_TYPE!r} model"
    return f"is {model_type!r}, must be {MODEL_TYPE!r}"


def _read_layer_types(document: Mapping[str, Any], values: dict[str, Any], problems: list[Problem]) -> None:
    rates = document.get("compress_rates")
    if rates is not None and not isinstance(rates, Mapping):
        problems.append(Problem("compress_rates", f"is {rates!r}, must be an object of layer type to ratio"))
        rates = None
    rates = _DEFAULT_RATES | dict(rates or {})
    if (csa := rates["compressed_sparse_attention"]) != CSA_RATIO:
        problems.append(Problem("compress_rates", f"has {csa!r} for compressed_sparse_attention, must be {CSA_RATIO}"))
    if (hca := rates["heavily_compressed_attention"]) in (0, CSA_RATIO):
        problems.append(Problem("compress_rates", f"has {hca!r} for heavily_compressed_attention, must not be that"))

    types = document.get("layer_types")
    if types is not None:
        if text := _wrong_list(types, _LAYER_TYPES):
            problems.append(Problem("layer_types", text))
            if isinstance(types, list | tuple):
                values.setdefault("compress_ratios", [0] * len(types))  # reported already, under the other name
        else:
            ratios = [0 if kind == "sliding_attention" else rates[kind] for kind in types]
            given = values.setdefault("compress_ratios", ratios)
            if isinstance(given, list | tuple) and list(given[: len(ratios)]) != ratios:
                problems.append(Problem("layer_types", "contradicts compress_ratios; leave one of them out"))

    mlp_types = document.get("mlp_layer_types")
    if mlp_types is not None:
        if text := _wrong_list(mlp_types, _MLP_LAYER_TYPES):
            problems.append(Problem("mlp_layer_types", text))
            return
        hashed = list(mlp_types).count("hash_moe")
        if "hash_moe" in mlp_types[hashed:]:
            problems.append(Problem("mlp_layer_types", "has hash_moe behind moe; the hash layers must come first"))
        elif values.setdefault("num_hash_layers", hashed) != hashed:
            problems.append(Problem("mlp_layer_types", "contradicts num_hash_layers; leave one of them out"))


def _wrong_list(given: Any, allowed: tuple[str, ...]) -> str | None:
    """What is wrong with a list of layer types, None if nothing is."""
    must = f"must be a list of: {', '.join(allowed)}"
    if not isinstance(given, list | tuple):
        return f"is {given!r}, {must}"
    wrong = sorted({repr(kind) for kind in given if kind not in allowed})
    return f"holds {', '.join(wrong)}; {must}" if wrong else None


def _read_rope(document: Mapping[str, Any], values: dict[str, Any], problems: list[Problem]) -> None:
    field = "rope_parameters" if document.get("rope_parameters") is not None else "rope_scaling"
    scaling = document.get(field)
    if scaling is not None and not isinstance(scaling, Mapping):
        problems.append(Problem(field, f"is {scaling!r}, must be an object or null"))
        scaling = None
    scaling = dict(scaling or {})
    if "main" in scaling or "compress" in scaling:
        main, compress = scaling.get("main"), scaling.get("compress")
        if not isinstance(main, Mapping) or not isinstance(compress, Mapping):
            problems.append(Problem(field, "must have both of main and compress, as objects"))
            main, compress = {}, {}
        if (kind := main.get("rope_type", "default")) != "default":
            problems.append(Problem(f"{field}.main.rope_type", f"is {kind!r}, must be 'default'"))
        for name, part in (("rope_theta", main), ("compress_rope_theta", compress)):
            if "rope_theta" in part:
                values[name] = part["rope_theta"]
        scaling, field = dict(compress), f"{field}.compress"
    _read_yarn(scaling, field, values, problems)
    _read_rotary_factor(document.get("partial_rotary_factor", scaling.get("partial_rotary_factor")), values, problems)


def _read_yarn(scaling: Mapping[str, Any], field: str, values: dict[str, Any], problems: list[Problem]) -> None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("yarn", "default"):
        problems.append(Problem(f"{field}.type", f"is {kind!r}, must be 'yarn' or 'default'"))
    if kind != "yarn":
        return
    needed = ("factor", "original_max_position_embeddings")
    problems += [
        Problem(f"{field}.{name}", "is missing; YaRN needs it") for name in needed if scaling.get(name) is None
    ]
    for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        if scaling.get(name) is not None:
            values[f"rope_{name}"] = scaling[name]
    if scaling.get("attention_factor") not in (None, 1, 1.0):
        # the model does not scale cos and sin
        problems.append(Problem(f"{field}.attention_factor", f"is {scaling['attention_factor']!r}, must be 1.0"))
    if scaling.get("truncate", True) is not True:
        problems.append(Problem(f"{field}.truncate", f"is {scaling['truncate']!r}, must be true"))


def _read_rotary_factor(factor: Any, values: dict[str, Any], problems: list[Problem]) -> None:
    head_dim = values.get("head_dim")
    if factor is None or not isinstance(head_dim, int):
        return
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        problems.append(Problem("partial_rotary_factor", f"is {factor!r}, must be qk_rope_head_dim / head_dim"))
        return
    if values.setdefault("qk_rope_head_dim", int(head_dim * factor)) != int(head_dim * factor):
        text = (
            f"is {factor!r}, which contradicts qk_rope_head_dim {values['qk_rope_head_dim']!r}; leave one of them out"
        )
        problems.append(Problem("partial_rotary_factor", text))


def _read_inference_rope(document: Mapping[str, Any], values: dict[str, Any]) -> None:
    if document.get("original_seq_len") == 0:  # switches YaRN off
        return
    for name, field in (
        ("original_seq_len", "rope_original_max_position_embeddings"),
        ("rope_factor", "rope_factor"),
        ("beta_fast", "rope_beta_fast"),
        ("beta_slow", "rope_beta_slow"),
    ):
        if document.get(name) is not None:
            values[field] = document[name]


def _read_inference_dtype(document: Mapping[str, Any], values: dict[str, Any], problems: list[Problem]) -> None:
    dtype = document.get("dtype", "bf16")
    if dtype not in ("bf16", "fp8"):
        problems.append(Problem("dtype", f"is {dtype!r}, must be 'bf16' or 'fp8'"))
    values["quantized"] = dtype == "fp8"
    if document.get("expert_dtype") is not None:
        values["expert_dtype"] = document["expert_dtype"]


def _read_dtype(document: Mapping[str, Any], values: dict[str, Any], problems: list[Problem]) -> None:
    for name in ("dtype", "torch_dtype"):  # transformers 5 writes the first
        if document.get(name) is not None:
            values["torch_dtype"] = document[name]
    quantization = document.get("quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        problems.append(Problem("quantization_config", f"is {quantization!r}, must be an object or null"))
        quantization = None
    if quantization is not None:
        for name, only in (("quant_method", "fp8"), ("fmt", "e4m3")):
            if (value := quantization.get(name, only)) != only:
                problems.append(Problem(f"quantization_config.{name}", f"is {value!r}, must be {only!r}"))
    values["quantized"] = quantization is not None
    expert_dtype = document.get("expert_dtype", (quantization or {}).get("expert_dtype"))
    if expert_dtype is not None:
        values["expert_dtype"] = expert_dtype
