"""``--hf-overrides``: every name that a config.json has, in each of its forms."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.models.test_config import inference_document
from tests.released import YARN, flash_document

from tetrad.errors import ConfigError
from tetrad.models.config import ModelConfig

FLASH = ModelConfig.from_dict(flash_document())
RATIOS = FLASH.compress_ratios
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", SPARSE, HEAVY, HEAVY]}


def transformers_document() -> dict[str, Any]:
    """The same model as transformers writes it, in its own names alone."""
    document = flash_document()
    for name in ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "torch_dtype"):
        del document[name]
    kinds = {0: "sliding_attention", 4: SPARSE, 128: HEAVY}
    return document | {
        "dtype": "bfloat16",
        "layer_types": [kinds[ratio] for ratio in RATIOS],
        "compress_rates": {SPARSE: 4, HEAVY: 128},
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
            "compress": {
                **{name: value for name, value in YARN.items() if name != "type"},
                "rope_type": "yarn",
                "attention_factor": 1.0,
                "rope_theta": 160000,
                "partial_rotary_factor": 0.125,
            },
        },
    }


DOCUMENTS = {"released": flash_document(), "transformers": transformers_document(), "inference": inference_document()}

# overrides -> the fields that they change; the same for every form of the document
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"index_topk": 8, "o_groups": 4}, {"index_topk": 8, "o_groups": 4}),
    ({"rope_scaling": {"factor": 8}}, {"rope_factor": 8.0}),
    ({"rope_scaling": {"beta_fast": 24.0}}, {"rope_beta_fast": 24.0}),
    ({"rope_scaling": {**YARN, "factor": 2}}, {"rope_factor": 2.0}),
    ({"rope_scaling": {"rope_type": "default"}}, {"rope_factor": 1.0}),
    ({"rope_scaling": None}, {"rope_factor": 1.0}),
    ({"rope_parameters": {"factor": 8}}, {"rope_factor": 8.0}),
    (
        {"rope_parameters": {"compress": {"factor": 8, "rope_theta": 5e4}}},
        {"rope_factor": 8, "compress_rope_theta": 5e4},
    ),
    ({"rope_parameters": {"main": {"rope_theta": 500}}}, {"rope_theta": 500.0}),
    ({"rope_parameters": {"rope_theta": 500}}, {"rope_theta": 500.0}),
    ({"rope_theta": 500}, {"rope_theta": 500.0}),
    ({"rope_factor": 4}, {"rope_factor": 4.0}),
    ({"partial_rotary_factor": 0.0625}, {"qk_rope_head_dim": 32}),
    ({"qk_rope_head_dim": 32}, {"qk_rope_head_dim": 32}),
    ({"quantization_config": None}, {"quantized": False}),
    ({"quantization_config": {}}, {"quantized": False}),
    ({"quantization_config": {"expert_dtype": "fp8"}}, {"expert_dtype": "fp8"}),
    ({"quantization_config": {"quant_method": "fp8", "expert_dtype": "fp8"}}, {"expert_dtype": "fp8"}),
    ({"expert_dtype": None}, {"expert_dtype": None}),
    ({"quantized": False}, {"quantized": False}),
    ({"dtype": "float32"}, {"torch_dtype": "float32"}),
    ({"torch_dtype": "torch.float32"}, {"torch_dtype": "float32"}),
    ({"dtype": torch.float32}, {"torch_dtype": "float32"}),
    ({"mlp_layer_types": ["moe"] * 43}, {"num_hash_layers": 0}),
    ({"num_hash_layers": 1}, {"num_hash_layers": 1}),
    ({"layer_types": [SPARSE] * 43}, {"compress_ratios": (4,) * 43}),
    ({"compress_ratios": [0, 16] * 22}, {"compress_ratios": (*(0, 16) * 21, 0)}),
    (FOUR_LAYERS, {"num_hidden_layers": 4, "compress_ratios": (0, 4, 128, 128)}),
    (FOUR_LAYERS | {"compress_rate_hca": 16}, {"num_hidden_layers": 4, "compress_ratios": (0, 4, 16, 16)}),
    ({"num_hidden_layers": 4}, {"num_hidden_layers": 4, "compress_ratios": RATIOS[:4]}),
    ({"compress_rates": {HEAVY: 64}}, {"compress_ratios": tuple(64 if ratio == 128 else ratio for ratio in RATIOS)}),
    ({"compress_rate_hca": 64}, {"compress_ratios": tuple(64 if ratio == 128 else ratio for ratio in RATIOS)}),
    ({"num_local_experts": 8}, {"n_routed_experts": 8}),
    ({"eos_token_id": [1, 2]}, {"eos_token_id": (1, 2)}),
    ({"tie_word_embeddings": None}, {}),
]


@pytest.mark.parametrize("form", DOCUMENTS)
@pytest.mark.parametrize(("overrides", "fields"), TAKEN, ids=str)
def test_names_that_a_config_uses(form: str, overrides: dict[str, Any], fields: dict[str, Any]):
    """Only the names of our own record were taken, so most names of the file that one looks at were refused."""
    assert ModelConfig.from_dict(DOCUMENTS[form]) == FLASH
    assert ModelConfig.from_dict(DOCUMENTS[form], overrides) == dataclasses.replace(FLASH, **fields)


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        ({"dim": 2048, "n_heads": 32}, {"hidden_size": 2048, "num_attention_heads": 32}),
        ({"original_seq_len": 0}, {"rope_factor": 1.0}),
        ({"beta_fast": 24}, {"rope_beta_fast": 24.0}),
        ({"dtype": "bf16"}, {"quantized": False}),
        ({"window_size": 64}, {"sliding_window": 64}),
    ],
    ids=str,
)
def test_names_of_the_inference_form(overrides: dict[str, Any], fields: dict[str, Any]):
    assert ModelConfig.from_dict(inference_document(), overrides) == dataclasses.replace(FLASH, **fields)


@pytest.mark.parametrize(
    ("change", "overrides"),
    [
        ({"model_type": "deepseek_v4_custom"}, {"model_type": "deepseek_v4"}),
        ({"rope_scaling": {"type": "linear"}}, {"rope_scaling": dict(YARN)}),
        ({"rope_parameters": {**YARN, "factor": 8}}, {"rope_scaling": dict(YARN)}),
        ({"quantization_config": {"quant_method": "awq"}}, {"quantization_config": {"quant_method": "fp8"}}),
        ({"layer_types": ["full_attention"] * 43}, {"compress_ratios": list(RATIOS)}),
        ({"scoring_func": "softmax"}, {"scoring_func": "sqrtsoftplus"}),
        ({"torch_dtype": "float16"}, {"dtype": "bfloat16"}),
        ({"mlp_layer_types": ["moe"]}, {"num_hash_layers": 3}),
        ({"index_topk": "many"}, {"index_topk": 512}),
    ],
    ids=str,
)
def test_what_is_replaced_is_not_checked(change: dict[str, Any], overrides: dict[str, Any]):
    """An override exists to mend a file that cannot be edited."""
    assert ModelConfig.from_dict(flash_document(**change), overrides) == FLASH


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"index_top_k": 8}, "index_top_k: is no field of the configuration, did you mean index_topk"),
        ({"rope_scalin": None}, "rope_scalin: is no field of the configuration, did you mean rope_scaling"),
        ({"use_cache": False}, "use_cache: is not read here, so that an override of it would change nothing"),
        ({"dim": 2048}, "dim: is no field of the configuration"),
        ({"index_topk": None}, "index_topk: is None, must be an integer >= 1"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling.type: is 'linear', must be 'yarn' or 'default'",
        ),
        ({"rope_scaling": 8}, "rope_scaling: is 8, must be an object or null"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "rope_factor: is 0.5, must be a number >= 1"),
        (
            {"rope_factor": 8, "rope_scaling": {"factor": 4}},
            "rope_factor: is 8, which contradicts rope_scaling.factor 4",
        ),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype: is 'float32', which contradicts torch_dtype"),
        ({"quantization_config": {"fmt": "e5m2"}}, "quantization_config.fmt: is 'e5m2', must be 'e4m3'"),
        ({"quantization_config": {"fmt_": 1}}, "quantization_config.fmt_: is not known; known are quant_method, fmt"),
        ({"layer_types": [SPARSE]}, "layer_types: has 1 entries, must have one for each of the 43 layers"),
        ({"compress_rate_hca": 4}, "compress_rate_hca: is 4, must be a divisor of 256 other than 4"),
        ({"model_type": "deepseek_v3"}, "model_type: is 'deepseek_v3', must be 'deepseek_v4'"),
        ({"scoring_func": "sigmoid"}, "scoring_func: is 'sigmoid', must be 'sqrtsoftplus'"),
    ],
    ids=str,
)
def test_overrides_that_cannot_be(overrides: dict[str, Any], text: str):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(flash_document(), overrides)
    assert f"\n  - {text}" in str(caught.value)
    assert ": 1 value cannot be used:" in str(caught.value), "one mistake must be reported once"
    if text.partition(":")[0].partition(".")[0] in overrides:
        assert str(caught.value).endswith(" (given as an override)"), "the file is not to blame"
