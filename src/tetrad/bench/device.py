"""The device that is measured: its name, its versions, its memory, its caches."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
from pathlib import Path

import torch

from tetrad import __version__
from tetrad.errors import ConfigError
from tetrad.platforms import current_platform


def resolve_device(name: str | None) -> torch.device:
    """The device of that name; without one the first GPU, or else the CPU.

    Raises:
        ConfigError: there is no such device, or torch cannot compute on it here.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is unknown; write cuda, cuda:1 or cpu") from error
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"--device {name!r}: only cuda and cpu can be timed")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else 0
    if index >= count:
        raise ConfigError(f"--device {name}: torch sees {count} GPUs here; leave out --device or write --device cpu")
    return torch.device("cuda", index)


def versions(device: torch.device) -> dict[str, str | None]:
    """What the figures depend on; None for what is not there."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    on_gpu = device.type == "cuda"
    return {
        "device": current_platform(device).name if on_gpu else _cpu(),
        "arch": current_platform(device).arch,
        "tetrad": __version__,
        "torch": torch.__version__,
        "triton": triton,
        "cuda": (torch.version.cuda or torch.version.hip) if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "date": datetime.datetime.now().astimezone().date().isoformat(),
    }


def _cpu() -> str:
    """The CPU as it calls itself, and how many threads torch uses of it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        found = re.search(r"model name\s*: (.*)", text)
    except OSError:
        found = None
    name = found[1].strip() if found else current_platform("cpu").name
    return f"{name}, torch threads: {torch.get_num_threads()}"


def _driver() -> str | None:
    """NVIDIA's driver, as the kernel's module names itself."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", text)
    return found[1] if found else None


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache of a GPU; 0 for a CPU, where nothing is promised."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now; on a GPU what torch keeps for reuse is given back first."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        return 1024 * int(text.split("MemAvailable:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
