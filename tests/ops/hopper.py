"""Tests that need a Hopper device, and the machine code of kernels for one, which does not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tetrad.ops import nvrtc

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NO_HOPPER = "needs a Hopper GPU (compute capability 9.0) and cuda-core"


def on_hopper(test):
    """Its twin in the emulator runs everywhere."""
    missing = not HOPPER or nvrtc.unavailable() is not None
    test = pytest.mark.usefixtures("all_proven")(test)
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason=NO_HOPPER)(test))


def tool(name: str) -> str | None:
    """A program of the CUDA toolkit; Triton brings some of them."""
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return str(path) if path.exists() else shutil.which(name)


def compiled(source: str, defines: tuple[tuple[str, int | str], ...], folder: Path) -> Path:
    """The path of a kernel's machine code for Hopper."""
    if nvrtc.unavailable() is not None:
        pytest.skip(str(nvrtc.unavailable()))
    cubin = folder / "kernel.cubin"
    try:
        cubin.write_bytes(nvrtc.compile_cubin(source, "sm_90a", defines=defines))
    except Exception as error:
        if "libnvrtc" in str(error):
            pytest.skip("the NVRTC library is not installed; the development packages bring it")
        raise
    return cubin


def machine_code(cubin: Path) -> str:
    """SASS, one instruction a line."""
    nvdisasm = tool("nvdisasm")
    if nvdisasm is None:
        pytest.skip("needs nvdisasm")
    return subprocess.run([nvdisasm, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
