"""What the options become: dtypes, lengths, sizes, and the hash of it all."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.small import small_config, small_options, write_config
from tests.released import flash_document
from tetrad import EngineArgs, LLMEngine
from tetrad.config.engine_config import LOGITS_BUDGET_VARIABLE, EngineConfig
from tetrad.errors import ConfigError
from tetrad.geometry import IndexDtype, KVDtype, window_ring
from tetrad.models.config import ModelConfig
from tetrad.ops import backends
from tetrad.ops.backends import Backend
from tetrad.platforms import Platform

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_budget_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOGITS_BUDGET_VARIABLE, raising=False)


def resolve(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.resolve(EngineArgs(model=str(folder), device="cpu", **options))


# ---- the index dtype ----


@pytest.fixture
def without_fp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform on which no back end scores FP4 keys, as on a device whose kernels lack them."""

    def supports(platform: Platform, problem: backends.Problem) -> tuple[bool, str]:
        return problem.dtype != "fp4", "has no FP4 kernel"

    only = (Backend("stub", "tetrad.ops.indexer_logits.reference", supports),)
    monkeypatch.setattr(backends, "BACKENDS", backends.BACKENDS | {"indexer_logits": only})


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "fp4"),
        ({"index_cache_dtype": "auto"}, "fp4"),
        ({"index_cache_dtype": "fp4"}, "fp4"),
        ({"index_cache_dtype": "mxfp4"}, "fp4"),
        ({"index_cache_dtype": "fp8"}, "fp8"),
        ({"index_cache_dtype": "bf16"}, "bf16"),
        ({"index_cache_dtype": "fp32"}, "fp32"),
        ({"enable_deepseek_v4_fp4_indexer": True}, "fp4"),
        ({"enable_deepseek_v4_fp4_indexer": True, "index_cache_dtype": "fp4"}, "fp4"),
        ({"enable_deepseek_v4_fp4_indexer": True, "index_cache_dtype": "mxfp4"}, "fp4"),
        ({"strict_index_cache_dtype": True, "index_cache_dtype": "fp4"}, "fp4"),
    ],
    ids=str,
)
def test_index_dtype(folder, caplog, options, dtype):
    config = resolve(folder, **options)
    assert config.index_cache_dtype.dtype == dtype
    assert config.cache_groups["index"].layout.dtype is IndexDtype(dtype)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("hadamard", [True, False])
def test_the_rotation_is_part_of_the_layout(folder, hadamard):
    """The layout of the index cache is the only place that writers and queries ask."""
    layout = resolve(folder, index_hadamard=hadamard).cache_groups["index"].layout
    assert layout.hadamard is hadamard
    assert resolve(folder).cache_groups["index"].layout.hadamard


@pytest.mark.parametrize("dtype", ["fp8", "bf16", "fp32"])
def test_the_alias_contradicts_another_dtype(folder, dtype):
    with pytest.raises(ConfigError, match=rf"enable_deepseek_v4_fp4_indexer.*index_cache_dtype for {dtype}; give only"):
        resolve(folder, enable_deepseek_v4_fp4_indexer=True, index_cache_dtype=dtype)


@pytest.mark.parametrize(
    "options", [{"index_cache_dtype": "fp4"}, {"index_cache_dtype": "mxfp4"}, {"enable_deepseek_v4_fp4_indexer": True}]
)
def test_fp4_that_cannot_be_served_warns_once_and_becomes_fp8(folder, without_fp4, caplog, options):
    """Once for the engine, not once per layer or per step."""
    engine = LLMEngine(EngineArgs(**small_options(folder) | {"index_cache_dtype": "auto"} | options))
    engine.add_request([5, 6])
    engine.step()
    assert engine.config.index_cache_dtype.dtype == "fp8"
    (warning,) = warnings_of(caplog)
    assert re.search(r"fp4 cannot be served: no back end scores FP4 keys on cpu \(stub: has no FP4 kernel\)", warning)
    assert "fp8" in warning
    assert engine.runner.pools.groups["index"].layout.dtype is IndexDtype.FP8


def test_auto_without_fp4_is_fp8_without_a_warning(folder, without_fp4, caplog):
    caplog.set_level(logging.INFO)
    config = resolve(folder, strict_index_cache_dtype=True)
    assert (config.index_cache_dtype.dtype, config.index_cache_dtype.requested) == ("fp8", "auto")
    assert "has no FP4 kernel" in config.index_cache_dtype.reason
    assert warnings_of(caplog) == []
    assert "index cache dtype auto: fp8" in caplog.text


@pytest.mark.parametrize("options", [{"index_cache_dtype": "fp4"}, {"enable_deepseek_v4_fp4_indexer": True}])
def test_strict_refuses_instead(folder, without_fp4, options):
    with pytest.raises(ConfigError, match=r"has no FP4 kernel.*choose fp8, or drop --strict-index-cache-dtype"):
        resolve(folder, strict_index_cache_dtype=True, **options)


def test_a_head_that_no_group_of_32_divides(tmp_path, caplog):
    """16 channels have no whole scale: auto takes fp8, fp4 warns and takes fp8, strict fails."""
    folder = write_config(tmp_path / "m", small_config(index_head_dim=16))
    assert resolve(folder).index_cache_dtype.dtype == "fp8"
    assert warnings_of(caplog) == []
    assert resolve(folder, index_cache_dtype="fp4").index_cache_dtype.dtype == "fp8"
    assert re.search(r"index_head_dim 16 is not a multiple of 32", *warnings_of(caplog))
    with pytest.raises(ConfigError, match="index_head_dim 16 is not a multiple of 32"):
        resolve(folder, index_cache_dtype="fp4", strict_index_cache_dtype=True)


# ---- the hash ----


def test_equal_configurations_have_equal_hashes(folder, tmp_path):
    """Also in another folder, and however a value was spelled: the hash is of what is computed."""
    first = resolve(folder, max_model_len="512").compute_hash()
    assert first == resolve(folder, max_model_len=512, kv_cache_memory_gb=1.0, seed=3).compute_hash()
    assert first == resolve(write_config(tmp_path / "copy"), max_model_len=512, dtype="fp32").compute_hash()
    assert first == resolve(folder, max_model_len=512, index_cache_dtype="mxfp4").compute_hash()
    assert re.fullmatch(r"[0-9a-f]{64}", first)


@pytest.mark.parametrize(
    "options",
    [
        {"index_cache_dtype": "fp8"},
        {"index_cache_dtype": "bf16"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "bf16"},
        {"dtype": "bfloat16"},
        {"linear_activation_quant": "fp8"},
        {"max_model_len": 511},
        {"max_num_seqs": 255},
        {"max_num_batched_tokens": 8191},
        {"hf_overrides": {"index_topk": 5}},
        {"hf_overrides": {"rms_norm_eps": 1e-5}},
    ],
    ids=str,
)
def test_the_hash_changes_with(folder, options):
    """A compiled or captured artefact of one of these must not be used for another."""
    base: dict[str, Any] = {"max_model_len": 512}
    assert resolve(folder, **base | options).compute_hash() != resolve(folder, **base).compute_hash()


def test_the_hash_is_of_the_dtype_in_use(folder, without_fp4):
    """fp4 that fell back to fp8 is fp8."""
    assert resolve(folder, index_cache_dtype="fp4").compute_hash() == resolve(folder).compute_hash()
    assert resolve(folder).compute_hash() == resolve(folder, index_cache_dtype="fp8").compute_hash()


# ---- dtypes ----


@pytest.mark.parametrize(
    ("checkpoint", "options", "expected"),
    [
        ({"torch_dtype": "float32"}, {}, (torch.float32, KVDtype.FP32)),
        ({"torch_dtype": "bfloat16"}, {}, (torch.bfloat16, KVDtype.BF16)),
        ({"torch_dtype": "bfloat16"}, {"dtype": "fp32"}, (torch.float32, KVDtype.FP32)),
        ({"torch_dtype": "float32"}, {"dtype": "bf16"}, (torch.bfloat16, KVDtype.BF16)),
        ({"torch_dtype": "bfloat16", "quantized": True}, {}, (torch.bfloat16, KVDtype.FP8)),
        ({"torch_dtype": "bfloat16", "quantized": True}, {"dtype": "float32"}, (torch.float32, KVDtype.FP8)),
        ({"quantized": True}, {"kv_cache_dtype": "bf16"}, (torch.float32, KVDtype.BF16)),
        ({"torch_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}, (torch.bfloat16, KVDtype.FP8)),
        ({"torch_dtype": "bfloat16"}, {"kv_cache_dtype": "fp32"}, (torch.bfloat16, KVDtype.FP32)),
    ],
    ids=str,
)
def test_compute_and_cache_dtype(tmp_path, checkpoint, options, expected):
    """A quantised checkpoint gets an FP8 cache, any other its compute dtype."""
    config = resolve(write_config(tmp_path / "m", small_config(**checkpoint)), **options)
    assert (config.dtype, config.kv_cache_dtype) == expected
    assert config.cache_groups["window"].layout.rope_dtype is expected[0]


# ---- lengths ----


@pytest.mark.parametrize(
    ("given", "tokens"),
    [(131072, 131072), ("131072", 131072), ("128K", 131072), ("128k", 128000), (" 1M ", 1048576), ("1m", 1000000)],
)
def test_lengths_in_words(tmp_path, given, tokens):
    folder = write_config(tmp_path / "m", ModelConfig.from_dict(flash_document()))
    config = resolve(folder, max_model_len=given, max_num_batched_tokens=given)
    assert (config.max_model_len, config.max_num_batched_tokens) == (tokens, tokens)


def test_the_models_own_length_is_the_default(folder, tmp_path):
    assert resolve(folder).max_model_len == 1024
    assert resolve(folder, hf_overrides={"max_position_embeddings": 300}).max_model_len == 300
    assert resolve(folder, hf_overrides={"max_position_embeddings": 5000}, max_model_len=4000).max_model_len == 4000


def test_hf_overrides_reach_the_model(folder):
    engine = LLMEngine(EngineArgs(**small_options(folder) | {"hf_overrides": {"index_topk": 7, "sliding_window": 9}}))
    assert engine.config.model.index_topk == 7
    assert engine.runner.model.config.sliding_window == 9
    assert engine.runner.pools.groups["window"].layout.entries == window_ring(9) == 24


def test_without_chunked_prefill_a_step_must_hold_a_sequence(folder):
    config = resolve(folder, enable_chunked_prefill=False, max_model_len=512, max_num_batched_tokens=512)
    assert config.max_num_batched_tokens == 512
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens 511 is below max_model_len 512; raise the first"):
        resolve(folder, enable_chunked_prefill=False, max_model_len=512, max_num_batched_tokens=511)


# ---- the budget of index scores ----


@pytest.mark.parametrize(
    ("option", "variable", "mib"),
    [
        (None, None, 2048),
        (64, None, 64),
        (0, None, 0),
        (None, "512", 512),
        (None, "0", 0),
        (64, "512", 64),
        (0, "512", 0),
        (64, "nonsense", 64),
    ],
)
def test_logits_budget(folder, monkeypatch, option, variable, mib):
    """The flag beats the variable, also where it says 0."""
    if variable is not None:
        monkeypatch.setenv(LOGITS_BUDGET_VARIABLE, variable)
    config = resolve(folder, indexer_logits_budget_mb=option)
    assert config.indexer.logits_budget_bytes == mib << 20


@pytest.mark.parametrize("variable", ["-1", "2G", "", "1.5"])
def test_a_bad_variable_is_named(folder, monkeypatch, variable):
    monkeypatch.setenv(LOGITS_BUDGET_VARIABLE, variable)
    with pytest.raises(ConfigError, match=rf"{LOGITS_BUDGET_VARIABLE} must be a number of MiB, 0 .* not '{variable}'"):
        resolve(folder)


# ---- the device ----


def test_devices(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert EngineConfig.resolve(EngineArgs(model=str(folder))).device.type == "cpu"
    for name in ("cuda", "cuda:0", "cuda:3"):
        with pytest.raises(ConfigError, match=rf"device '{name}' is not available: torch sees 0 CUDA devices; use cpu"):
            EngineConfig.resolve(EngineArgs(model=str(folder), device=name))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("deepseek-v4-flsh", "there is no such folder, did you mean deepseek-v4-flash?"),
        ("deepseek-ai/DeepSeek-V4-Flash-Base", "there is no such folder, did you mean deepseek-v4-flash?"),
        ("bundle", "there is no such folder, did you mean bundled?"),
        (
            "meta/other",
            "there is no such folder. Give the folder of a checkpoint, since nothing is downloaded; names of",
        ),
    ],
)
def test_a_model_that_is_not_here(model, text):
    """A name of the model hub was called a missing folder, without a word on what can be named."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.resolve(EngineArgs(model=model, device="cpu"))
    assert text in str(caught.value)
    assert "names of this package are bundled, deepseek-v4-flash, deepseek-v4-pro" in str(caught.value)


def test_every_option_is_in_the_help():
    """Each field carries the text of its flag."""
    for field in dataclasses.fields(EngineArgs):
        assert field.metadata["help"], field.name
