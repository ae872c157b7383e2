"""Triton in processes of its own, interpreting or compiling for other devices, and what code for them takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
"""The arguments of a GPUTarget for every architecture whose code is looked at."""


def run(program: str, *arguments: str, **environment: str) -> str:
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def resources(built: Any) -> tuple[int, int]:
    """(registers, bytes of stack or spilled registers) of a thread of what triton.compile gave."""
    if "cubin" not in built.asm:
        text = built.asm["amdgcn"]
        counts = dict(re.findall(r"[.](vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+([0-9]+)", text))
        return int(counts["vgpr_count"]), int(counts["vgpr_spill_count"]) + int(counts["private_segment_fixed_size"])
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False)
    usage = dict(re.findall(r"(REG|STACK):([0-9]+)", done.stdout + done.stderr))
    return int(usage["REG"]), int(usage["STACK"])


def on_cuda(test):
    """Its twin under the interpreter runs everywhere."""
    test = pytest.mark.usefixtures("all_proven")(test)
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))
