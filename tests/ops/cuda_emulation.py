"""The top-k kernel's own source on a CPU (``emulator/topk_on_cpu.h``), for tests where no device is."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

from torch import Tensor

from tetrad.ops.nvrtc import EARLY_START
from tetrad.ops.topk_indices import cuda

_LAUNCH = r"""
extern "C" void launch(const float* logits, const int* ends, int* out, int k, int width, int rows,
                       long long logits_stride, long long out_stride, int teams, unsigned seed) {
    kernel = [=] { topk_indices(logits, ends, out, k, width, rows, logits_stride, out_stride); };
    gridDim.x = teams * CLUSTER;
    std::mt19937 random(seed);
    for (int team = 0; team < teams; ++team) {
        first_block = team * CLUSTER;
        run_team(SHARED_BYTES, random);
    }
}
"""


class EmulatedKernel:
    """The kernel of a layout, with the parameters of the back end's function and how many teams share the rows."""

    def __init__(self, layout: cuda.Layout, folder: Path) -> None:
        device = (Path(cuda.__file__).parent / "sm90_topk_device.cuh").read_text()
        text = cuda.source()
        assert device in text
        text = (
            text.replace(EARLY_START, "")
            .replace(device, "")
            .replace(
                "extern __shared__ __align__(128) unsigned char memory[];",
                "unsigned char* memory = memories[team_rank()];",
            )
        )
        assert "asm" not in text, "PTX that the emulation does not know"
        # x.y |= f(x) where f sets x.y: NVRTC reads x.y before the call, g++ after it
        disputed = re.search(r"\b(\w+)\.\w+ [-+*/&|^]= [^;{]*\([^;{]*\b\1\b", text)
        assert not disputed, f"compilers disagree on the order of {disputed and disputed[0]}"
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        source.write_text('#include "topk_on_cpu.h"\n' + text + _LAUNCH)
        defines = [f"-D{name}={value}" for name, value in cuda.macros(layout)]
        flags = ["-O1", "-w", "-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique"]
        include = f"-I{Path(__file__).parent / 'emulator'}"
        subprocess.run(["g++", *flags, include, *defines, "-o", str(library), str(source)], check=True)
        self._launch = ctypes.CDLL(str(library)).launch

    def topk_indices(
        self, logits: Tensor, visible_end: Tensor, k: int, out: Tensor, *, teams: int, seed: int = 0
    ) -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (logits, visible_end, out)]
        rows, width = logits.shape
        strides = ctypes.c_longlong(logits.stride(0)), ctypes.c_longlong(out.stride(0))
        self._launch(*pointers, k, width, rows, *strides, teams, seed)
