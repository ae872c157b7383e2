"""What is wrong with options and files, each with the error that says so and what to change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.small import (
    VOCABULARY,
    run,
    small_config,
    small_options,
    write_config,
    write_tokenizer,
)
from tetrad import LLM, EngineArgs, LLMEngine
from tetrad.errors import CheckpointError, ConfigError
from tetrad.models.checkpoint.dummy import dummy_state
from tetrad.models.checkpoint.writer import write_checkpoint

# ---- the engine's options ----

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, r"no model was named; give the folder of a checkpoint"),
    ({"model": "/nowhere/at/all"}, r"/nowhere/at/all: there is no such folder"),
    ({"model": 5}, r"model 5 is of type int; give str \| Path"),
    ({"tokenizer": "/nowhere"}, r"tokenizer '/nowhere' is not a folder with a tokenizer\.json"),
    ({"generation_config": None}, r"generation_config None is of type NoneType; give str \| Path"),
    ({"generation_config": "/nowhere"}, r"generation_config '/nowhere' is not a folder with a generation_config\.json"),
    ({"device": "tpu"}, r"device 'tpu' is not known; choose auto, cpu, cuda or cuda:N"),
    ({"device": "mps"}, r"device 'mps' is not supported; choose auto, cpu, cuda or cuda:N"),
    ({"device": "meta"}, r"device 'meta' is not supported"),
    ({"device": "cuda:99"}, r"device 'cuda:99' is not available: torch sees \d+ CUDA devices"),
    ({"device": "cpu:x"}, r"device 'cpu:x' is not known"),
    ({"device": None}, r"device None is of type NoneType; give str"),
    ({"dtype": "float16"}, r"dtype 'float16' is not known; choose one of auto, bfloat16, bf16, float32, fp32"),
    ({"dtype": torch.float32}, r"dtype torch.float32 is of type dtype; give one of 'auto', 'bfloat16'"),
    ({"kv_cache_dtype": "fp4"}, r"kv_cache_dtype 'fp4' is not known; choose one of auto, bf16, fp8, fp32"),
    ({"kv_cache_dtype": "FP8"}, r"kv_cache_dtype 'FP8' is not known"),
    ({"index_cache_dtype": "int8"}, r"index_cache_dtype 'int8' is not known; choose one of auto, fp4, mxfp4, fp8"),
    ({"index_cache_dtype": "bf16", "enable_deepseek_v4_fp4_indexer": True}, r"give only one of them"),
    ({"enable_deepseek_v4_fp4_indexer": "yes"}, r"enable_deepseek_v4_fp4_indexer 'yes' is of type str; give bool"),
    ({"linear_activation_quant": "fp4"}, r"linear_activation_quant 'fp4' is not known; choose one of none, fp8"),
    ({"load_format": "safetensors"}, r"load_format 'safetensors' is not known; choose one of auto, dummy"),
    ({"hf_overrides": "{}"}, r"hf_overrides '\{\}' is of type str; give dict"),
    ({"hf_overrides": {"index_topkk": 3}}, r"index_topkk: is no field .* did you mean index_topk\?"),
    ({"hf_overrides": {"index_topk": 0}}, r"index_topk: is 0, must be an integer >= 1"),
    ({"block_size": 128}, r"block_size 128 is not supported: a block is 256 tokens.*leave --block-size out"),
    ({"max_model_len": 1}, r"max_model_len must be at least 2, not 1"),
    ({"max_model_len": "lots"}, r"max_model_len 'lots' is not a number of tokens; write 131072, 128K"),
    ({"max_model_len": "-5"}, r"max_model_len '-5' is not a number of tokens"),
    ({"max_model_len": "１２８"}, r"max_model_len '１２８' is not a number of tokens"),
    ({"max_model_len": 3.5}, r"max_model_len 3\.5 is of type float; give int \| str \| None"),
    ({"max_model_len": True}, r"max_model_len True is of type bool; give int \| str \| None"),
    ({"max_model_len": 1025}, r"max_model_len 1025 is above the model's max_position_embeddings 1024; lower it"),
    ({"max_num_batched_tokens": 0}, r"max_num_batched_tokens must be at least 1, not 0"),
    ({"max_num_batched_tokens": "8 K"}, r"max_num_batched_tokens '8 K' is not a number of tokens"),
    ({"max_num_seqs": 0}, r"max_num_seqs must be at least 1, not 0"),
    ({"max_num_seqs": "4"}, r"max_num_seqs '4' is of type str; give int"),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 99}, r"tokens 99 is below max_model_len 512; raise"),
    ({"kv_cache_memory_gb": 0}, r"kv_cache_memory_gb must be a number of GiB above 0, not 0"),
    ({"kv_cache_memory_gb": float("nan")}, r"kv_cache_memory_gb must be a number of GiB above 0, not nan"),
    ({"kv_cache_memory_gb": float("inf")}, r"kv_cache_memory_gb must be a number of GiB above 0, not inf"),
    ({"kv_cache_memory_gb": "4"}, r"kv_cache_memory_gb '4' is of type str; give float \| None"),
    ({"kv_cache_memory_gb": 1e-6}, r"the caches do not fit: .*raise --kv-cache-memory-gb"),
    ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be above 0 and at most 1, not 1\.5"),
    ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be above 0 and at most 1, not 0"),
    ({"num_gpu_blocks_override": 0}, r"num_gpu_blocks_override must be at least 1, not 0"),
    ({"num_gpu_blocks_override": 1}, r"num_gpu_blocks_override 1 is too low: .* 512 needs 2 blocks; raise it"),
    ({"num_gpu_blocks_override": 2.0}, r"num_gpu_blocks_override 2\.0 is of type float; give int \| None"),
    ({"indexer_logits_budget_mb": -1}, r"indexer_logits_budget_mb must be a number of MiB, 0 \(unlimited\) or more"),
    ({"indexer_logits_budget_mb": 0.5}, r"indexer_logits_budget_mb 0\.5 is of type float; give int \| None"),
    ({"seed": "7"}, r"seed '7' is of type str; give int \| None"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda value: str(value)[:60])
def test_engine_options(folder, options, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        LLMEngine(EngineArgs(**small_options(folder) | options))


def test_an_option_that_does_not_exist(folder):
    with pytest.raises(TypeError, match=r"LLM\(\) does not know max_len; its options are .*max_model_len"):
        LLM(model=str(folder), max_len=5)


def test_an_option_that_is_nearly_one(folder):
    """The list of all options was the whole answer."""
    with pytest.raises(TypeError, match=r"max_model_length \(did you mean max_model_len\?\); its options"):
        LLM(model=str(folder), max_model_length=5)


# ---- config.json ----

CONFIG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, r"model_type: is 'llama', must be 'deepseek_v4'"),
    ({"model_type": "deepseek_v41"}, r"DeepSeek-V4\.1 is another architecture and not supported"),
    ({"hidden_size": -1}, r"hidden_size: is -1, must be an integer >= 1"),
    ({"num_hidden_layers": 5}, r"compress_ratios: has 3 entries, must have one for each of the 5 layers"),
    ({"compress_ratios": [0, 3, 16]}, r"compress_ratios: holds 3; allowed are 0"),
    ({"compress_ratios": [0, 16, 64]}, r"compress_ratios: holds the HCA ratios 16, 64; .* the same in every HCA layer"),
    ({"compress_ratios": "0 4 16"}, r"compress_ratios: is '0 4 16', must be a list of integers"),
    ({"sliding_window": 257}, r"sliding_window: is 257, must be an integer from 1 to 256"),
    ({"index_head_dim": 48}, r"index_head_dim: is 48, must be a power of two: the Hadamard rotation needs it"),
    ({"qk_rope_head_dim": 7}, r"qk_rope_head_dim: is 7, must be even"),
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok: is 9, must be at most n_routed_experts 4"),
    ({"scoring_func": "softmax"}, r"scoring_func: is 'softmax', must be 'sqrtsoftplus'"),
    ({"torch_dtype": "float16"}, r"torch_dtype: is 'float16', must be one of 'bfloat16', 'float32'"),
    ({"rms_norm_eps": float("nan")}, r"rms_norm_eps: is nan, must be a number >= 0"),
    ({"eos_token_id": 5000}, r"eos_token_id: is 5000, must be a token id"),
    ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config.quant_method: is 'awq', must be 'fp8'"),
    ({"index_topk": True, "hc_mult": 0}, r"2 values cannot be used:\n  - index_topk: is True.*\n  - hc_mult: is 0"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIG, ids=lambda value: str(value)[:60])
def test_config_values(tmp_path, changes, message):
    folder = write_config(tmp_path / "m", **changes)
    with pytest.raises(ConfigError, match=f"(?s)config.json: .*{message}"):
        LLMEngine(EngineArgs(**small_options(folder)))


# ---- files ----


def _text(name: str, text: str | bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return write


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _link_to_nowhere(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to(folder / "gone")


def _large_tokenizer(folder: Path) -> None:
    write_tokenizer(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"]["more"] = VOCABULARY
    (folder / "tokenizer.json").write_text(json.dumps(document))


FILES: list[tuple[str, Callable[[Path], Any], type[Exception], str]] = [
    ("no config", lambda f: (f / "config.json").unlink(), ConfigError, r"the folder has no config\.json"),
    ("config not JSON", _text("config.json", "{"), ConfigError, r"config\.json: it is not valid JSON"),
    ("config not UTF-8", _text("config.json", b"\xff\xfe{}"), ConfigError, r"config\.json: it is not valid JSON"),
    ("config a list", _text("config.json", "[]"), ConfigError, r"config\.json: it must hold one JSON object"),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), CheckpointError, r"random weights need --load-format"),
    ("weights cut", _cut_weights, CheckpointError, r"model\.safetensors \(\d+ bytes, cut short"),
    ("weights empty", _text("model.safetensors", ""), CheckpointError, r"0 bytes, cut short"),
    ("tokenizer not JSON", _text("tokenizer.json", "?"), ConfigError, r"tokenizer\.json is not a readable tokenizer"),
    ("tokenizer a dead link", _link_to_nowhere, ConfigError, r"tokenizer\.json is not a readable tokenizer"),
    ("tokenizer too large", _large_tokenizer, ConfigError, r"has token id 320, but the model's vocab_size is 320"),
    (
        "another model's config",
        lambda f: write_config(f, small_config(moe_intermediate_size=64)),
        CheckpointError,
        r"experts\.0\.w1\.weight is \[32, 32\], must be \[64, 32\]",
    ),
    (
        "more layers than weights",
        lambda f: write_config(f, small_config(num_hidden_layers=4, compress_ratios=(0, 4, 16, 0))),
        CheckpointError,
        r"tensors are missing: layers\.3\.",
    ),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "m"
    config = small_config()
    write_checkpoint(path, config, dummy_state(config), quantized=False)
    return path


@pytest.mark.parametrize(("name", "damage", "error", "message"), FILES, ids=[entry[0] for entry in FILES])
def test_files(checkpoint, tmp_path, name, damage, error, message):
    folder = tmp_path / "m"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    with pytest.raises(error, match=f"(?s){message}"):
        LLMEngine(EngineArgs(**small_options(folder) | {"load_format": "auto"}))


def test_the_undamaged_checkpoint_loads(checkpoint):
    """Else the table above would prove nothing."""
    engine = LLMEngine(EngineArgs(**small_options(checkpoint) | {"load_format": "auto"}))
    engine.add_request([5])
    assert run(engine)
