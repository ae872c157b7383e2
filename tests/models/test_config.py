"""ModelConfig: the three forms of config.json, and every value that must be refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.released import YARN, flash_document, pro_document
from tests.tiny import hf_config, tiny_config

from tetrad.errors import ConfigError
from tetrad.models.config import LayerKind, ModelConfig


def inference_document() -> dict[str, Any]:
    """The same Flash model as DeepSeek's own inference code wants it told."""
    return {
        "vocab_size": 129280,
        "dim": 4096,
        "moe_inter_dim": 2048,
        "n_layers": 43,
        "n_hash_layers": 3,
        "n_heads": 64,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_activated_experts": 6,
        "score_func": "sqrtsoftplus",
        "route_scale": 1.5,
        "swiglu_limit": 10.0,
        "q_lora_rank": 1024,
        "head_dim": 512,
        "rope_head_dim": 64,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "window_size": 128,
        "original_seq_len": 65536,
        "rope_theta": 10000,
        "rope_factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "dtype": "fp8",
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        "compress_rope_theta": 160000,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    }


def test_flash_as_released():
    """The prediction layer's 0 at the end of compress_ratios must not become a 44th layer."""
    config = ModelConfig.from_dict(flash_document())
    assert len(config.compress_ratios) == config.num_hidden_layers == 43
    assert config.layers_of(LayerKind.SWA) == (0, 1)
    assert config.layers_of(LayerKind.CSA) == tuple(range(2, 43, 2))
    assert config.layers_of(LayerKind.HCA) == tuple(range(3, 42, 2))
    assert (config.csa_ratio, config.hca_ratio, config.nope_head_dim) == (4, 128, 448)
    assert (config.rope_theta, config.compress_rope_theta, config.rope_factor) == (10000.0, 160000.0, 16.0)
    assert config.rope_original_max_position_embeddings == 65536
    assert (config.rope_beta_fast, config.rope_beta_slow) == (32.0, 1.0)
    assert [config.is_hash_layer(layer) for layer in range(5)] == [True, True, True, False, False]
    assert (config.quantized, config.expert_dtype, config.torch_dtype) == (True, "fp4", "bfloat16")
    assert (config.bos_token_id, config.eos_token_id) == (0, (1,))


def test_pro_as_released():
    config = ModelConfig.from_dict(pro_document())
    assert config.layers_of(LayerKind.SWA) == ()
    assert config.layers_of(LayerKind.CSA) == tuple(range(2, 61, 2))
    assert config.layers_of(LayerKind.HCA) == (0, 1, *range(3, 60, 2))
    assert config.routed_scaling_factor == 2.5


def test_first_flash_release_does_not_name_the_expert_dtype():
    document = flash_document()
    del document["expert_dtype"]
    assert ModelConfig.from_dict(document).expert_dtype is None


def test_inference_form_is_the_same_model():
    """A rename that is missed would fall back to a default and serve another model."""
    assert ModelConfig.from_dict(inference_document()) == ModelConfig.from_dict(flash_document())


def test_inference_form_without_yarn_and_fp8():
    changes = {"original_seq_len": 0, "dtype": "bf16", "expert_dtype": None}
    config = ModelConfig.from_dict(inference_document() | changes)
    assert (config.rope_factor, config.quantized, config.expert_dtype) == (1.0, False, None)


@pytest.mark.parametrize("kind", ["flash", "pro", "swa", "csa", "hca"])
@pytest.mark.parametrize("hca_ratio", [16, 128])
def test_form_that_transformers_writes(kind: str, hca_ratio: int, tmp_path: Path):
    config = tiny_config(kind, hca_ratio=hca_ratio, num_hash_layers=2, rms_norm_eps=1e-5, eos_token_id=(1, 7))
    theirs = hf_config(config)
    theirs.dtype = "float32"
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "compress_ratios" not in written
    assert "num_hash_layers" not in written
    assert ModelConfig.from_pretrained(tmp_path) == config


@pytest.mark.parametrize("kind", ["flash", "pro", "swa"])
@pytest.mark.parametrize("hca_ratio", [16, 128])
def test_transformers_reads_what_we_write(kind: str, hca_ratio: int):
    """transformers knows the ratio 128 alone from compress_ratios; another needs layer_types beside it."""
    from transformers import DeepseekV4Config

    config = tiny_config(kind, hca_ratio=hca_ratio)
    theirs = DeepseekV4Config(**config.to_native_dict())
    kinds = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": hca_ratio}
    assert tuple(kinds[name] for name in theirs.layer_types) == config.compress_ratios
    assert theirs.compress_rates["heavily_compressed_attention"] == (hca_ratio if config.hca_ratio else 128)
    assert theirs.mlp_layer_types.count("hash_moe") == config.num_hash_layers
    assert theirs.qk_rope_head_dim == config.qk_rope_head_dim
    compress = theirs.rope_parameters["compress"]
    assert (compress["rope_type"], compress["factor"], compress["rope_theta"]) == ("yarn", 16.0, 160000.0)


def test_released_config_through_transformers_and_back(tmp_path: Path):
    from transformers import DeepseekV4Config

    document = flash_document()
    DeepseekV4Config(**document).save_pretrained(tmp_path)
    assert ModelConfig.from_pretrained(tmp_path) == ModelConfig.from_dict(document)


@pytest.mark.parametrize("document", [flash_document(), pro_document(), tiny_config("pro").to_native_dict()])
def test_native_form_round_trip(document: dict[str, Any]):
    config = ModelConfig.from_dict(document)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_native_dict()))) == config


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "default"}, {**YARN, "factor": 1}])
def test_yarn_off(scaling: dict[str, Any] | None):
    """Without YaRN the compressed layers still have their own base."""
    config = ModelConfig.from_dict(flash_document(rope_scaling=scaling))
    assert (config.rope_factor, config.compress_rope_theta) == (1.0, 160000.0)
    assert ModelConfig.from_dict(config.to_native_dict()).rope_factor == 1.0


def test_yarn_off_as_transformers_writes_it(tmp_path: Path):
    config = tiny_config("flash", rope_factor=1.0)
    hf_config(config).save_pretrained(tmp_path)
    read = ModelConfig.from_pretrained(tmp_path)
    assert (read.rope_factor, read.compress_rope_theta) == (1.0, 160000.0)


def test_the_record_is_frozen_and_hashable():
    config = tiny_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 5  # type: ignore[misc]
    assert hash(config) == hash(tiny_config())
    assert config != dataclasses.replace(config, index_topk=9)


def test_replace_is_checked_too():
    with pytest.raises(ConfigError, match="sliding_window: is 257, must be an integer from 1 to 256"):
        dataclasses.replace(tiny_config(), sliding_window=257)


def test_overrides_win_and_cut_the_layers():
    config = ModelConfig.from_dict(flash_document(), {"num_hidden_layers": 4, "index_topk": 8, "eos_token_id": [1, 2]})
    assert config.compress_ratios == (0, 0, 4, 128)
    assert (config.index_topk, config.eos_token_id) == (8, (1, 2))


def test_unknown_override_names_the_nearest():
    with pytest.raises(ConfigError, match="index_top_k: is no field of the configuration, did you mean index_topk"):
        ModelConfig.from_dict(flash_document(), {"index_top_k": 8})


# change of the document -> what the error must say
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "deepseek_v41"}, "model_type: is 'deepseek_v41': DeepSeek-V4.1 is another architecture and not"),
    ({"model_type": "deepseek_v3"}, "model_type: is 'deepseek_v3', must be 'deepseek_v4'"),
    ({"model_type": None}, "model_type: is missing, must be 'deepseek_v4'"),
    ({"scoring_func": "sigmoid"}, "scoring_func: is 'sigmoid', must be 'sqrtsoftplus'"),
    ({"topk_method": "greedy"}, "topk_method: is 'greedy', must be 'noaux_tc'"),
    ({"norm_topk_prob": False}, "norm_topk_prob: is False, must be True"),
    ({"hidden_act": "gelu"}, "hidden_act: is 'gelu', must be 'silu'"),
    ({"num_key_value_heads": 8}, "num_key_value_heads: is 8, must be 1"),
    ({"attention_bias": True}, "attention_bias: is True, must be False"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings: is True, must be False"),
    ({"n_shared_experts": 2}, "n_shared_experts: is 2, must be 1"),
    ({"hidden_size": "4096"}, "hidden_size: is '4096', must be an integer >= 1"),
    ({"hidden_size": 4096.0}, "hidden_size: is 4096.0, must be an integer"),
    ({"hidden_size": True}, "hidden_size: is True, must be an integer"),
    ({"hidden_size": None}, "hidden_size: is missing"),
    ({"vocab_size": 0}, "vocab_size: is 0, must be an integer >= 1"),
    ({"sliding_window": 0}, "sliding_window: is 0, must be an integer from 1 to 256"),
    ({"sliding_window": 512}, "sliding_window: is 512, must be an integer from 1 to 256"),
    ({"index_topk": 0}, "index_topk: is 0, must be an integer >= 1"),
    ({"index_head_dim": 96}, "index_head_dim: is 96, must be a power of two"),
    ({"index_head_dim": 32}, "index_head_dim: is 32, must be >= qk_rope_head_dim 64"),
    ({"o_groups": 7}, "o_groups: is 7, must divide num_attention_heads 64"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: is 63, must be even"),
    ({"qk_rope_head_dim": 512}, "qk_rope_head_dim: is 512, must be below head_dim 512"),
    ({"num_experts_per_tok": 257}, "num_experts_per_tok: is 257, must be at most n_routed_experts 256"),
    ({"num_hash_layers": 44}, "num_hash_layers: is 44, must be at most num_hidden_layers 43"),
    ({"num_hash_layers": -1}, "num_hash_layers: is -1, must be an integer >= 0"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps: is -1e-06, must be a number >= 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps: is nan, must be a number >= 0"),
    ({"routed_scaling_factor": "1.5"}, "routed_scaling_factor: is '1.5', must be a number > 0"),
    ({"swiglu_limit": 0}, "swiglu_limit: is 0, must be a number > 0"),
    ({"rope_theta": 1}, "rope_theta: is 1, must be a number > 1"),
    ({"torch_dtype": "float16"}, "torch_dtype: is 'float16', must be one of 'bfloat16', 'float32'"),
    ({"expert_dtype": "int4"}, "expert_dtype: is 'int4', must be one of 'fp4', 'fp8', None"),
    ({"moe_intermediate_size": 2040}, "moe_intermediate_size: is 2040, must be a multiple of 32 where expert_dtype is"),
    ({"eos_token_id": 129280}, "eos_token_id: is 129280, must be a token id"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id: is [1, '2'], must be a token id"),
    ({"bos_token_id": -1}, "bos_token_id: is -1, must be a token id below vocab_size, or null"),
    ({"compress_ratios": None}, "compress_ratios: is missing"),
    ({"compress_ratios": "0,4"}, "compress_ratios: is '0,4', must be a list of integers"),
    ({"compress_ratios": [0, 4, 128]}, "compress_ratios: has 3 entries, must have one for each of the 43 layers"),
    ({"compress_ratios": [3] * 43}, "compress_ratios: holds 3; allowed are 0 (window only), 4 (CSA)"),
    ({"compress_ratios": [-4] * 43}, "compress_ratios: holds -4; allowed are"),
    ({"compress_ratios": [512] * 43}, "compress_ratios: holds 512; allowed are"),
    ({"compress_ratios": [16, 128] * 22}, "compress_ratios: holds the HCA ratios 16, 128; allowed are"),
    ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling.type: is 'linear', must be 'yarn' or 'default'"),
    ({"rope_scaling": {**YARN, "factor": None}}, "rope_scaling.factor: is missing"),
    ({"rope_scaling": {**YARN, "factor": 0.5}}, "rope_factor: is 0.5, must be a number >= 1"),
    ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "rope_beta_fast: is 0.5, must be >= rope_beta_slow 1"),
    ({"rope_scaling": {**YARN, "attention_factor": 1.277}}, "rope_scaling.attention_factor: is 1.277, must be 1.0"),
    ({"rope_scaling": "yarn"}, "rope_scaling: is 'yarn', must be an object or null"),
    ({"rope_parameters": {"main": {}}}, "rope_parameters: must have both of main and compress"),
    (
        {"rope_parameters": {"main": {"rope_type": "yarn"}, "compress": {}}},
        "rope_parameters.main.rope_type: is 'yarn', must be 'default'",
    ),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor: is 0.25, which contradicts qk_rope_head_dim 64"),
    ({"layer_types": ["full_attention"] * 43}, "layer_types: holds 'full_attention'; must be a list of: sliding_"),
    ({"layer_types": ["full_attention"] * 43, "compress_ratios": None}, "layer_types: holds 'full_attention'"),
    ({"layer_types": [["moe"]] * 43}, "layer_types: holds ['moe']; must"),
    ({"layer_types": 43}, "layer_types: is 43, must be a list of: sliding_attention"),
    ({"hc_eps": 10**400}, "hc_eps: is 1000000"),
    ({"layer_types": ["sliding_attention"] * 43}, "layer_types: contradicts compress_ratios"),
    ({"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates: has 8 for compressed_sparse_attention"),
    ({"compress_rates": {"heavily_compressed_attention": 4}}, "compress_rates: has 4 for heavily_compressed_attention"),
    ({"mlp_layer_types": ["moe"] * 43}, "mlp_layer_types: contradicts num_hash_layers"),
    ({"mlp_layer_types": ["moe", "hash_moe"]}, "mlp_layer_types: has hash_moe behind moe"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: holds 'dense'; must be a list of: hash_moe, moe"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method: is 'awq', must be 'fp8'"),
    ({"quantization_config": "fp8"}, "quantization_config: is 'fp8', must be an object or null"),
]


@pytest.mark.parametrize(("change", "text"), REFUSED, ids=[text.split(",")[0][:60] for _, text in REFUSED])
def test_refused_values(change: dict[str, Any], text: str):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(flash_document(**change))
    assert text in str(caught.value)
    assert ": 1 value cannot be used:" in str(caught.value), "one mistake must be reported once"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)


# what the objects of a configuration may hold, with any value
OBJECTS = st.dictionaries(
    st.sampled_from([*YARN, "rope_type", "main", "compress", "rope_theta", "quant_method", "expert_dtype", "fmt"])
    | st.just("heavily_compressed_attention"),
    JSON | st.dictionaries(st.sampled_from([*YARN, "rope_type", "rope_theta"]), JSON, max_size=2),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *flash_document(),
                *("layer_types", "mlp_layer_types", "compress_rates", "compress_rate_hca", "partial_rotary_factor"),
                *("rope_parameters", "dtype", "num_local_experts", "n_group", "rope_factor", "original_seq_len"),
            ]
        ),
        JSON | OBJECTS,
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([flash_document, inference_document]),
)
def test_any_value_is_accepted_or_a_config_error(changes: dict[str, Any], document: Callable[[], dict[str, Any]]):
    """Hand-edited files hold anything; a TypeError out of the checks would not say which value it was."""
    with contextlib.suppress(ConfigError):
        ModelConfig.from_dict(document() | changes)
    with contextlib.suppress(ConfigError):
        ModelConfig.from_dict(document(), changes)


def test_one_error_names_every_mistake():
    document = flash_document(hidden_size=None, sliding_window=0, scoring_func="softmax", index_topk="many")
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(document, {"o_groups": 3, "typo": 1}, source="here/config.json")
    text = str(caught.value)
    assert text.startswith("here/config.json: 6 values cannot be used:")
    for field in ("hidden_size", "sliding_window", "scoring_func", "index_topk", "o_groups", "typo"):
        assert f"\n  - {field}: " in text


def break_missing_folder(folder: Path) -> Path:
    return folder / "absent"


def break_missing_file(folder: Path) -> Path:
    return folder


def break_json(folder: Path) -> Path:
    (folder / "config.json").write_text("{'a': 1}")
    return folder


def break_twice(folder: Path) -> Path:
    (folder / "config.json").write_text('{"index_topk": 8, "rope": {"a": 1, "a": 1}, "index_topk": 512}')
    return folder


def break_binary(folder: Path) -> Path:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00\x80")
    return folder


def break_depth(folder: Path) -> Path:
    """Python's reader ends such a file in a RecursionError, which is no ValueError."""
    (folder / "config.json").write_text("[" * 100_000)
    return folder


def break_object(folder: Path) -> Path:
    (folder / "config.json").write_text("[1, 2]")
    return folder


@pytest.mark.parametrize(
    ("breaking", "text"),
    [
        (break_missing_folder, "there is no such folder"),
        (break_missing_file, "the folder has no config.json"),
        (break_json, "it is not valid JSON"),
        (break_binary, "it is not valid JSON"),
        (break_depth, "it is not valid JSON"),
        (break_twice, "the name 'index_topk' stands twice, with 8 and 512"),
        (break_object, "it must hold one JSON object"),
    ],
)
def test_unreadable_files(breaking: Callable[[Path], Path], text: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=text):
        ModelConfig.from_pretrained(breaking(tmp_path))


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path):
    """Editors on Windows write one; the file was called invalid JSON."""
    (tmp_path / "config.json").write_text(json.dumps(flash_document()), encoding="utf-8-sig")
    assert ModelConfig.from_pretrained(tmp_path) == ModelConfig.from_dict(flash_document())


def test_errors_of_a_file_name_the_file(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(flash_document(vocab_size=-1)))
    with pytest.raises(ConfigError, match=r"config\.json: 2 values"):
        ModelConfig.from_pretrained(tmp_path, {"o_groups": 7})
