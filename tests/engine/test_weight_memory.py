"""Weights that do not fit: known by arithmetic, before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.small import small_options, write_config
from tetrad import EngineArgs, LLMEngine
from tetrad.config import memory
from tetrad.config.engine_config import EngineConfig
from tetrad.errors import ConfigError
from tetrad.models.checkpoint import weight_bytes
from tetrad.platforms import current_platform
from tetrad.runner import model_runner

GIB = 1 << 30


def engine(folder: Path, **options: Any) -> LLMEngine:
    return LLMEngine(EngineArgs(**small_options(folder) | options))


def test_flash_with_random_weights(monkeypatch: pytest.MonkeyPatch):
    """On 24 GiB it ended in a traceback of torch's allocator, after minutes."""
    monkeypatch.setattr(memory, "cpu_memory", lambda: 24 * GIB)
    monkeypatch.setattr(model_runner, "DeepseekV4", None)  # nothing may be built
    with pytest.raises(ConfigError) as caught:
        engine(Path("deepseek-v4-flash"), max_num_seqs=1)
    text = str(caught.value)
    assert "routed experts in bfloat16 516 GiB + everything else 15.34 GiB = 531.3 GiB (145.3 GiB as stored" in text
    assert "there is 24 GiB of memory and swap available; use a larger device" in text


def test_the_bound_is_exact(folder: Path, monkeypatch: pytest.MonkeyPatch):
    held = weight_bytes(EngineConfig.resolve(EngineArgs(**small_options(folder))).model, torch.float32).held
    monkeypatch.setattr(memory, "cpu_memory", lambda: held)
    engine(folder)
    monkeypatch.setattr(memory, "cpu_memory", lambda: held - 1)
    with pytest.raises(ConfigError, match=r"the weights do not fit: .*or try --dtype bfloat16"):
        engine(folder)
    monkeypatch.setattr(memory, "cpu_memory", lambda: None)  # a system that does not say
    engine(folder)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nC++"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["DeepseekV4", "fill_dummy"])
def test_an_allocation_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception):
    """Memory that is there by arithmetic may be in pieces, or be gone a moment later."""

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr(model_runner, where, fail)
    with pytest.raises(ConfigError, match=r"the weights could not be allocated: routed experts .* which cpu does not"):
        engine(folder)


def test_other_errors_stay_what_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(model_runner, "fill_dummy", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        engine(folder)


def on_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, total: int, **options: Any) -> EngineConfig:
    """A configuration for a device that is not here."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, total))
    args = EngineArgs(**small_options(folder) | {"device": "cuda"} | options)
    return EngineConfig.resolve(args, platform=current_platform(torch.device("cpu")))


def test_a_gpu_gives_its_share_less_what_is_in_use(folder: Path, monkeypatch: pytest.MonkeyPatch):
    config = on_gpu(folder, monkeypatch, free=80, total=100, gpu_memory_utilization=0.5)
    assert memory.weight_memory(config) == 30
    assert memory.cache_memory(config) == 30
    assert memory.cache_memory(config, weights_to_come=20) == 10
    assert memory.cache_memory(config, weights_to_come=40) == 0
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0.5 leaves 30 B on cuda beside what is in use"):
        memory.check_weights(config)


def test_caches_beside_the_weights_are_checked_before_them(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """On a GPU the caches' arithmetic came after minutes of reading weights."""
    held = weight_bytes(EngineConfig.resolve(EngineArgs(**small_options(folder))).model, torch.float32).held
    config = on_gpu(folder, monkeypatch, free=held + 1000, total=held + 1000, gpu_memory_utilization=1.0)
    monkeypatch.setattr(model_runner, "DeepseekV4", None)
    with pytest.raises(ConfigError, match=r"the caches do not fit: .* but there are 1000 B"):
        model_runner.ModelRunner(config)


# ---- what a system says of itself ----

MEMINFO = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    600 kB\nSwapTotal: 9 kB\nSwapFree:         50 kB\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CONTROL_GROUP", tmp_path)
    return tmp_path


def limit(folder: Path, maximum: str, used: int, cached: int, swap: str | None = None) -> None:
    (folder / "memory.max").write_text(f"{maximum}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached - 1}\nactive_file 1\n")
    if swap is not None:
        (folder / "memory.swap.max").write_text(f"{swap}\n")
        (folder / "memory.swap.current").write_text("10\n")


def test_available_memory_counts_swap(system: Path):
    (system / "meminfo").write_text(MEMINFO)
    assert memory.cpu_memory() == 650 * 1024


@pytest.mark.parametrize(
    ("maximum", "swap", "expected"),
    [("1000", None, 400), ("1000", "0", 400), ("1000", "100", 490), ("1000", "max", 400 + 50 * 1024)],
)
def test_the_limit_of_a_container_counts(system: Path, maximum: str, swap: str | None, expected: int):
    """The host's memory is no help to a container; what it has cached of files gives way."""
    (system / "meminfo").write_text(MEMINFO)
    limit(system, maximum, used=800, cached=200, swap=swap)
    assert memory.cpu_memory() == expected


def test_no_limit_and_no_answer(system: Path, monkeypatch: pytest.MonkeyPatch):
    limit(system, "max", used=800, cached=200)
    (system / "meminfo").write_text("nonsense")
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PHYS_PAGES": 7, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert memory.cpu_memory() == 7 * 4096

    def unknown(_name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(memory.os, "sysconf", unknown)
    assert memory.cpu_memory() is None


def test_a_geometry_has_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder of that name here is a download, and goes before the package's own."""
    for name in ("deepseek-v4-flash", "DeepSeek-V4-Pro", "deepseek-ai/DeepSeek-V4-Flash"):
        with pytest.raises(ConfigError, match=r"deepseek-v4-\w+ is in this package as its configuration alone"):
            LLMEngine(EngineArgs(model=name, device="cpu"))
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "deepseek-v4-flash")
    assert engine(Path("deepseek-v4-flash")).config.model.num_hidden_layers == 3
