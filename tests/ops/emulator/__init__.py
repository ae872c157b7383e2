"""CUDA kernels of this project, compiled for the CPU and run thread by thread (see ``cuda_on_cpu.h``)."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tetrad.geometry import IndexDtype
from tetrad.ops.indexer_logits import sm90
from tetrad.ops.nvrtc import EARLY_START
from tetrad.ops.plan_indexer import sm90 as sm90_plan

SHARES = 3
"""Thread blocks that an emulated scorer has: several, so that shares begin and end inside groups."""

_HERE = Path(__file__).parent

_SCORER_MAIN = """
static Arguments emulated;
static const int4* emulated_schedule;
static void emulated_body() {
    indexer_logits(emulated.q, emulated.q_scale, emulated.weights, emulated.cache, emulated.page_stride,
                   emulated.tables, emulated.table_stride, emulated.visible_end, emulated.out, emulated.out_stride,
                   emulated_schedule);
}
extern "C" void run(const u8* q, const u8* q_scale, const float* weights, const u8* cache, i64 page_stride,
                    const int* tables, i64 table_stride, const int* visible_end, float* out, i64 out_stride,
                    const int4* schedule, int blocks, unsigned seed) {
    emulated = Arguments{q, q_scale, weights, cache, page_stride, tables, table_stride, visible_end, out, out_stride};
    emulated_schedule = schedule;
    for (int block = 0; block < blocks; ++block) {
        memset(memory, 0xFF, sizeof memory);
        barriers.clear();
        emulator::run_block(block, blocks, THREADS, seed + block, emulated_body);
    }
}
"""

_PLAN_MAIN = """
struct { const int *request, *end; int rows, slots, most; int4* buffer; int shares; int4* schedule; } emulated;
static void emulated_body() {
    plan_indexer(emulated.request, emulated.end, emulated.rows, emulated.slots, emulated.most, emulated.buffer,
                 emulated.shares, emulated.schedule);
}
extern "C" void run(const int* request, const int* end, int rows, int slots, int most, int4* buffer, int shares,
                    int4* schedule, unsigned seed) {
    emulated = {request, end, rows, slots, most, buffer, shares, schedule};
    for (int block = 0; block < 2; ++block) emulator::run_block(block, 2, THREADS, seed + block, emulated_body);
}
"""


def _build(source: str, defines: tuple[tuple[str, int | str], ...]) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    flags = [f"-D{name}={value}" for name, value in defines]
    # each library for itself: no symbol of one may stand for another's
    options = ["-std=c++17", "-O2", "-w", "-fno-strict-aliasing", "-fno-gnu-unique", "-shared", "-fPIC", f"-I{_HERE}"]
    with tempfile.TemporaryDirectory(prefix="tetrad-emulator-") as folder:
        code, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        code.write_text(source)
        command = [compiler, *options, *flags, "-o", str(library), str(code)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        return ctypes.CDLL(str(library))


@functools.cache
def _scorer(variant: sm90.Variant, dtype: IndexDtype, heads: int) -> ctypes.CDLL:
    # the emulator's instructions in place of the device's
    source = sm90.source().replace(EARLY_START, "")
    own = (Path(sm90.__file__).parent / "sm90_device.cuh").read_text()
    assert own in source
    return _build('#include "sm90_device.h"\n' + source.replace(own, "") + _SCORER_MAIN, variant.defines(dtype, heads))


@functools.cache
def _plan(threads: int) -> ctypes.CDLL:
    source = re.sub(r"^    __shared__", "    static", sm90_plan.source().replace(EARLY_START, ""), flags=re.MULTILINE)
    return _build('#include "cuda_on_cpu.h"\n' + source + _PLAN_MAIN, sm90_plan.defines(threads))


def _address(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def emulated_plan(
    row_request: Tensor, visible_end: Tensor, width: int, slots: int, *, threads: int = 128, shares: int = SHARES
) -> tuple[Tensor, Tensor]:
    """(buffer, schedule) as the device would make them."""
    rows = row_request.shape[0]
    buffer = torch.full((slots, 4), -7, dtype=torch.int32)
    schedule = torch.full((2 * shares + rows + 1, 4), -7, dtype=torch.int32)
    schedule = schedule[(-schedule.data_ptr()) % 16 // 16 :]
    _plan(threads).run(
        _address(row_request), _address(visible_end), rows, slots, max(1, -(-width // 256)), _address(buffer), shares,
        _address(schedule), 0,
    )  # fmt: skip
    return buffer, schedule


def emulated_scores(
    arguments: tuple, out: Tensor, variant: sm90.Variant, dtype: IndexDtype, *, seed: int = 0, shares: int = SHARES
) -> None:
    """Fill ``out`` as the device would. ``arguments`` are those of ``indexer_logits`` up to ``visible_end``."""
    q, q_scale, weights, cache, tables, row_request, visible_end = arguments
    _, schedule = emulated_plan(row_request, visible_end, out.shape[1], max(512, q.shape[0]), shares=shares)
    _scorer(variant, dtype, q.shape[1]).run(
        _address(q), _address(q_scale), _address(weights), _address(cache), ctypes.c_int64(cache.stride(0)),
        _address(tables), ctypes.c_int64(tables.stride(0)), _address(visible_end), _address(out),
        ctypes.c_int64(out.stride(0)), _address(schedule), shares, seed,
    )  # fmt: skip
