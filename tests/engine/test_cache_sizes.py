"""How many of everything the caches hold, from the options and the memory, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.small import small_config, small_options, write_config
from tetrad import EngineArgs, LLMEngine
from tetrad.cache.groups import CacheSizes
from tetrad.cache.pools import CachePools
from tetrad.config.engine_config import EngineConfig
from tetrad.errors import ConfigError
from tetrad.runner.model_runner import ModelRunner

GIB = 1 << 30


def resolve(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.resolve(EngineArgs(model=str(folder), device="cpu", **options))


SPECS = {
    "flash-fp8-fp4": ({}, {"kv_cache_dtype": "fp8", "index_cache_dtype": "fp4"}),
    "flash-bf16-fp8": ({}, {"kv_cache_dtype": "bf16", "index_cache_dtype": "fp8", "dtype": "bf16"}),
    "odd-pages": (
        {"hca_ratio": 256, "head_dim": 20, "qk_rope_head_dim": 6, "index_head_dim": 16},
        {"kv_cache_dtype": "fp8", "index_cache_dtype": "fp8", "dtype": "bf16"},
    ),
    "window-only": ({"compress_ratios": (0, 0, 0)}, {"kv_cache_dtype": "fp32"}),
    "no-csa": ({"compress_ratios": (0, 16, 16)}, {"kv_cache_dtype": "fp32"}),
    "no-hca": ({"compress_ratios": (4, 4, 0)}, {"index_cache_dtype": "bf16"}),
}


@pytest.mark.parametrize("case", SPECS)
def test_computed_sizes_are_the_bytes_allocated(tmp_path, case):
    """Every storage is counted as it is, strides and padding included, against the arithmetic that chose the sizes."""
    overrides, options = SPECS[case]
    overrides = dict(overrides)
    if ratio := overrides.pop("hca_ratio", None):
        overrides["compress_ratios"] = (0, 4, ratio)
    config = resolve(write_config(tmp_path / "m", small_config(**overrides)), max_model_len=600, **options)
    groups = config.cache_groups
    for sizes in (CacheSizes(3, 5, 16), CacheSizes(7, 4, 1000)):
        pools = CachePools(groups, sizes, "cpu").pools
        allocated = sum(pool.untyped_storage().nbytes() for pool in pools.values())
        assert allocated == groups.total_bytes(sizes)
        pages = [pool for pool in pools.values() if pool.dtype is torch.uint8]
        assert all(pool.stride(-2) % 16 == 0 for pool in pages)


@pytest.mark.parametrize("gib", [0.02, 0.05])
def test_the_caches_fill_the_memory_and_no_more(folder, gib):
    """One more block would not fit."""
    engine = LLMEngine(
        EngineArgs(**small_options(folder) | {"kv_cache_memory_gb": gib, "max_model_len": 1024, "max_num_seqs": 64})
    )
    groups, sizes = engine.config.cache_groups, engine.runner.sizes
    allocated = sum(pool.untyped_storage().nbytes() for pool in engine.runner.pools.pools.values())
    assert allocated == groups.total_bytes(sizes) <= gib * GIB
    useful = 64 * 4
    assert sizes.blocks == useful or allocated + sum(groups.block_bytes.values()) > gib * GIB


def test_the_default_on_a_cpu_is_four_gib(folder, monkeypatch):
    asked: list[int] = []

    def record(self: EngineConfig, available: int) -> CacheSizes:
        asked.append(available)
        raise ConfigError("enough")

    monkeypatch.setattr(EngineConfig, "cache_sizes", record)
    for options in ({}, {"kv_cache_memory_gb": 1.5}, {"kv_cache_memory_gb": 2}):
        with pytest.raises(ConfigError, match="enough"):
            ModelRunner(resolve(folder, **options))
    assert asked == [4 * GIB, 3 * GIB // 2, 2 * GIB]


def test_the_error_shows_the_arithmetic(folder):
    """Every number of the message is worked out again here."""
    config = resolve(folder, max_model_len=1000, max_num_seqs=3, max_num_batched_tokens=300, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError) as caught:
        config.cache_sizes(1000)
    message = str(caught.value)
    # an fp8 entry is 24 + 8 * 4 + 8 = 64 bytes; a window of 8 keys and 8 drafts is a ring of 16, so 300 rows, which are
    # 304 with padding, take 19 pages beside it
    window = 3 * 16 * 64
    step = 3 * 19 * 16 * 64
    rings = 4 * (16 * 2 * (64 + 64) + 24 * 2 * 32)
    block = 64 * 64 + 64 * (16 + 1) + 16 * 64
    assert config.cache_demand.window_bytes == window
    assert config.cache_demand.step_bytes == step
    assert config.cache_demand.ring_bytes == rings
    assert config.cache_demand.block_bytes == block
    one = window + rings
    assert f"3 requests x {one / 1024:.4g} KiB of window and compressor rings = {3 * one / 1024:.4g} KiB" in message
    assert f"304 rows of a step = {step / 1024:.4g} KiB" in message
    assert f"one sequence of max_model_len 1000 needs 4 blocks x {block / 1024:.4g} KiB" in message
    total = 3 * one + step + 4 * block
    assert f"{total / 1024:.4g} KiB in all, but there are 1000 B, which leave 0 blocks" in message
    assert "--max-model-len, --max-num-seqs or --max-num-batched-tokens, or raise --kv-cache-memory-gb" in message
    assert config.cache_sizes(total) == CacheSizes(4, 3, 304)
    with pytest.raises(ConfigError, match="do not fit"):
        config.cache_sizes(total - 1)


def test_the_number_of_blocks_may_be_given(folder):
    config = resolve(folder, max_model_len=1000, num_gpu_blocks_override=5, max_num_seqs=2)
    assert config.cache_sizes(0).blocks == 5
    config = resolve(folder, max_model_len=1000, num_gpu_blocks_override=3, max_num_seqs=2)
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override 3 is too low: .* needs 4 blocks; raise it"):
        config.cache_sizes(10 * GIB)


def test_caches_that_cannot_be_allocated_are_an_error_of_the_options(folder):
    """torch's own error is a RuntimeError that names neither the caches nor an option."""
    options = small_options(folder) | {"num_gpu_blocks_override": 10**10}
    with pytest.raises(
        ConfigError, match=r"the caches take .*iB, which cpu does not have .*lower --kv-cache-memory-gb"
    ):
        LLMEngine(EngineArgs(**options))


def test_nobody_gets_more_blocks_than_all_sequences_can_use(folder):
    config = resolve(folder, max_model_len=600, max_num_seqs=3)
    assert config.cache_sizes(10 * GIB).blocks == 3 * 3
