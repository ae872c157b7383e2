"""What a configuration says twice, says and means nothing by, or says in another way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.models.test_config import inference_document
from tests.released import YARN, flash_document

from tetrad.errors import ConfigError
from tetrad.models.config import ModelConfig

_YARN_8 = {**YARN, "factor": 8}
_NESTED = {"main": {"rope_type": "default"}, "compress": {**YARN, "rope_theta": 160000}}
_SLIDING = ["sliding_attention"] * 43

# change of the document -> what the error must say: two values that disagree, or one that would be ignored
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"compress_rate_hca": 64},
        "compress_rate_hca: gives HCA layers the ratio 64, which contradicts the 128 in compress",
    ),
    ({"compress_rates": {"heavily_compressed_attention": 64}}, "compress_rates: gives HCA layers the ratio 64, which"),
    ({"compress_rate_csa": 8}, "compress_rate_csa: is 8, must be 4"),
    ({"compress_rates": {"hca": 128}}, "compress_rates: holds 'hca', which is none of compressed_sparse_attention"),
    (
        {"compress_rates": {"heavily_compressed_attention": 128}, "compress_rate_hca": 64},
        "compress_rate_hca: is 64, which contradicts compress_rates 128; leave one of them out",
    ),
    ({"compress_rate_hca": 3}, "compress_rate_hca: is 3, must be a divisor of 256 other than 4"),
    (
        {"rope_parameters": _YARN_8},
        "rope_parameters.factor: is 8, which contradicts rope_scaling.factor 16; leave one of them out",
    ),
    (
        {"rope_parameters": _NESTED | {"compress": {**YARN, "beta_fast": 31}}},
        "rope_parameters.compress.beta_fast: is 31, which contradicts rope_scaling.beta_fast 32; leave one of them out",
    ),
    (
        {"rope_parameters": {"type": "default"}},
        "rope_parameters.type: is 'default', which contradicts rope_scaling.fact",
    ),
    (
        {"rope_parameters": _NESTED | {"main": {"rope_theta": 500}}},
        "rope_parameters.main.rope_theta: is 500, which contradicts rope_theta 10000; leave one of them out",
    ),
    (
        {"rope_parameters": _NESTED | {"compress": {**YARN, "rope_theta": 500}}},
        "rope_parameters.compress.rope_theta: is 500, which contradicts compress_rope_theta 160000",
    ),
    (
        {"rope_scaling": {**YARN, "rope_theta": 500}},
        "rope_scaling.rope_theta: is 500, which contradicts rope_theta 1000",
    ),
    ({"rope_parameters": _NESTED | {"factor": 8}}, "rope_parameters.factor: is 8 beside main and compress"),
    ({"rope_scaling": {"factor": 16}}, "rope_scaling.type: is missing beside factor 16; 'yarn' scales, 'default' does"),
    ({"rope_scaling": {"beta_fast": 3}}, "rope_scaling.type: is missing beside beta_fast 3; 'yarn' scales"),
    (
        {"rope_scaling": {"type": "default", "factor": 16}},
        "rope_scaling.factor: is 16 beside the type 'default', which does not scale; leave one of them out",
    ),
    (
        {"rope_scaling": {**YARN, "rope_type": "default"}},
        "rope_scaling.type: is 'yarn', which contradicts rope_type 'def",
    ),
    ({"rope_scaling": {**YARN, "mscale": 0.7}}, "rope_scaling.mscale: is not known; known are rope_type, type, factor"),
    (
        {"quantization_config": {"quant_method": "fp8", "expert_dtype": "fp8"}},
        "quantization_config.expert_dtype: is 'fp8', which contradicts expert_dtype 'fp4'; leave one of them out",
    ),
    ({"quantization_config": {"fmt": "e4m3"}}, "quantization_config.quant_method: is missing, must be 'fp8'"),
    (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        "quantization_config.activation_scheme: is 'static', must be 'dynamic'",
    ),
    ({"dtype": "float32"}, "dtype: is 'float32', which contradicts torch_dtype 'bfloat16'; leave one of them out"),
    ({"mlp_layer_types": ["hash_moe"] * 2}, "mlp_layer_types: has 2 entries, must have one for each of the 43 layers"),
    ({"mlp_layer_types": ["moe"] * 43}, "contradicts num_hash_layers 3: it has 0 hash_moe; leave one of them out"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types: has 3 entries, must have one for each of the 43 layers"),
    (
        {"layer_types": _SLIDING[:3], "compress_ratios": None},
        "layer_types: has 3 entries, must have one for each of the",
    ),
    (
        {"layer_types": _SLIDING},
        "contradicts compress_ratios: layer 2 is sliding_attention (ratio 0) here and has the ratio 4 there",
    ),
    ({"num_local_experts": 8}, "num_local_experts: is 8, which contradicts n_routed_experts 256"),
    ({"intermediate_size": 18432}, "intermediate_size: is 18432, which contradicts moe_intermediate_size 2048"),
    ({"n_shared_experts": None}, "n_shared_experts: is None, must be 1"),
    ({"swiglu_limit": None}, "swiglu_limit: is None, must be a number > 0"),
    ({"n_group": 8}, "n_group: is 8, must be 1: nothing else is implemented"),
    ({"first_k_dense_replace": 3}, "first_k_dense_replace: is 3, must be 0"),
]


@pytest.mark.parametrize(("change", "text"), CONTRADICTIONS, ids=[text[:60] for _, text in CONTRADICTIONS])
def test_contradictions(change: dict[str, Any], text: str):
    """Each was accepted without a word: one of the two values won, or a value had no effect."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(flash_document(**change))
    assert text in str(caught.value)
    assert ": 1 value cannot be used:" in str(caught.value), "one mistake must be reported once"


# change of the document -> fields that differ from the released ones; each was refused, or read as something else
HARMLESS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tie_word_embeddings": None, "attention_bias": None, "mlp_bias": None}, {}),
    ({"n_group": None, "topk_group": 1, "first_k_dense_replace": 0}, {}),
    ({"torch_dtype": "torch.bfloat16"}, {}),
    ({"torch_dtype": "bf16"}, {}),
    ({"torch_dtype": None, "dtype": "torch.float32"}, {"torch_dtype": "float32"}),
    ({"dtype": "bfloat16"}, {}),
    ({"compress_rate_hca": 128, "compress_rate_csa": 4}, {}),
    ({"rope_parameters": dict(YARN)}, {}),
    ({"rope_parameters": _NESTED}, {}),
    ({"rope_scaling": {}}, {"rope_factor": 1.0, "rope_original_max_position_embeddings": 65536}),
    ({"quantization_config": {}}, {"quantized": False}),
    ({"num_local_experts": 256, "intermediate_size": 2048}, {}),
    (
        {"expert_dtype": None, "quantization_config": {"quant_method": "fp8", "expert_dtype": "fp8"}},
        {"expert_dtype": "fp8"},
    ),
    ({"layer_types": None, "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 41}, {}),
]


@pytest.mark.parametrize(("change", "fields"), HARMLESS, ids=str)
def test_forms_that_say_the_same(change: dict[str, Any], fields: dict[str, Any]):
    """Null where false is meant, a dtype as torch prints it, one thing said twice; an empty object says nothing."""
    expected = dataclasses.replace(ModelConfig.from_dict(flash_document()), **fields)
    assert ModelConfig.from_dict(flash_document(**change)) == expected


def test_the_inference_form_needs_both_numbers_of_yarn():
    """A factor without the original length took the released length for granted, and a length alone did nothing."""
    for missing, text in (
        ("original_seq_len", "original_seq_len: is missing beside rope_factor 16; 0 is no YaRN"),
        ("rope_factor", "rope_factor: is missing beside original_seq_len 65536; YaRN needs it"),
    ):
        document = inference_document()
        del document[missing]
        with pytest.raises(ConfigError, match=text):
            ModelConfig.from_dict(document)


def test_names_that_nobody_reads_are_said(caplog: pytest.LogCaptureFixture):
    """A misspelt optional value had its default without a word; what no model computes with stays silent."""
    ModelConfig.from_dict(flash_document(use_cache=True, transformers_version="5", dspark_block_size=5, pad_token_id=1))
    assert caplog.text == ""
    ModelConfig.from_dict(flash_document(swiglu_limits=7, hc_mul=2), source="here")
    assert "here: not read, since nothing here knows them: swiglu_limits, hc_mul" in caplog.text
