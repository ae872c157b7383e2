"""How much memory there is, and whether weights and caches fit into it: worked out before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tetrad.cache.groups import format_bytes
from tetrad.config.engine_config import DEFAULT_CPU_CACHE_GB, GIB, EngineConfig
from tetrad.errors import ConfigError
from tetrad.models.checkpoint.sizes import WeightBytes, weight_bytes

_MEMINFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def check_weights(config: EngineConfig) -> int:
    """The bytes that the weights will take.

    Raises:
        ConfigError: with the arithmetic, where the device does not have them.
    """
    weights = weight_bytes(config.model, config.dtype)
    if refusal := weights_refusal(config, weights, weight_memory(config)):
        raise ConfigError(refusal)
    return weights.held


def weights_refusal(config: EngineConfig, weights: WeightBytes, available: int | None) -> str | None:
    """Why the weights do not fit into ``available`` bytes, None where they do (or nothing says how many there are)."""
    if available is None or weights.held <= available:
        return None
    return f"the weights do not fit: {describe_weights(config, weights)}, but {_there_is(config, available)}"


def weights_not_allocated(config: EngineConfig, reason: Exception) -> ConfigError:
    """The error of a device that refused the weights although they seemed to fit."""
    weights = weight_bytes(config.model, config.dtype)
    first = (str(reason).splitlines() or [type(reason).__name__])[0]
    return ConfigError(
        f"the weights could not be allocated: {describe_weights(config, weights)}, which {config.device} does not have "
        f"({first}); {_there_is(config, weight_memory(config))}"
    )


def describe_weights(config: EngineConfig, weights: WeightBytes) -> str:
    """The arithmetic of the weights, for a reader."""
    dtype = str(config.dtype).removeprefix("torch.")
    return (
        f"routed experts in {dtype} {format_bytes(weights.held_experts)} + everything else "
        f"{format_bytes(weights.held - weights.held_experts)} = {format_bytes(weights.held)} "
        f"({format_bytes(weights.stored)} as stored; weights are dequantised at load)"
    )


def weight_memory(config: EngineConfig) -> int | None:
    """Bytes that the weights may take, before they are there; None where the system does not say.

    On a GPU the share ``gpu_memory_utilization`` less what is in use. On a CPU what is available, swap included: a
    model that needs more cannot work, whatever else is stopped first.
    """
    if config.device.type == "cpu":
        return cpu_memory()
    return _share_of_gpu(config)


def cache_memory(config: EngineConfig, weights_to_come: int = 0) -> int:
    """Bytes that the caches may take.

    weights_to_come: bytes of weights that are not on the device yet.
    """
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if config.device.type == "cpu":
        return int(DEFAULT_CPU_CACHE_GB * GIB)
    return max(_share_of_gpu(config) - weights_to_come, 0)


def cpu_memory() -> int | None:
    """Bytes of memory and swap that a process can still get, also inside a container; None where nothing says so."""
    numbers = [number for number in (_system_memory(), _control_group_memory()) if number is not None]
    return min(numbers, default=None)


def _share_of_gpu(config: EngineConfig) -> int:
    free, total = torch.cuda.mem_get_info(config.device)
    return max(int(total * config.gpu_memory_utilization) - (total - free), 0)


def _there_is(config: EngineConfig, available: int | None) -> str:
    amount = "an unknown amount" if available is None else format_bytes(available)
    advice = "use a larger device (one must hold all weights) or a smaller model"
    if config.dtype is torch.float32:
        advice += ", or try --dtype bfloat16"
    if config.device.type == "cpu":
        return f"there is {amount} of memory and swap available; {advice}"
    return (
        f"--gpu-memory-utilization {config.gpu_memory_utilization:g} leaves {amount} on {config.device} beside "
        f"what is in use; raise it, free memory, {advice}"
    )


def _system_memory() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        kilobytes = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines)}
        return (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0)) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:  # all there is, in use or not: an upper bound
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _control_group_memory() -> int | None:
    """What the limits of a container leave; files in its page cache give way, so they do not count as used."""
    try:
        limit = int((_CONTROL_GROUP / "memory.max").read_text())  # "max" is no limit, and no integer
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        lines = (_CONTROL_GROUP / "memory.stat").read_text().splitlines()
        parts = {name: int(value) for name, value in (line.split() for line in lines)}
    except (OSError, ValueError):
        return None
    cached = parts.get("inactive_file", 0) + parts.get("active_file", 0)
    return max(limit - max(used - cached, 0), 0) + _control_group_swap()


def _control_group_swap() -> int:
    """Bytes of swap that a container may still use; without a limit of its own the system's count elsewhere."""
    try:
        limit = (_CONTROL_GROUP / "memory.swap.max").read_text().strip()
        used = int((_CONTROL_GROUP / "memory.swap.current").read_text())
        if limit == "max":
            lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
            return int(lines["SwapFree"].split()[0]) * 1024
        return max(int(limit) - used, 0)
    except (OSError, ValueError, KeyError, IndexError):
        return 0
