"""Exact top-k on Hopper, in CUDA C++ (``sm90_topk.cu``); :mod:`tetrad.ops.topk_indices` has checked the arguments."""

from __future__ import annotations

import functools
import re
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from tetrad.ops.nvrtc import EARLY_START, CudaKernel, cuda_kernel

_ONE_WAVE = 132
"""Rows that have a multiprocessor each."""

_BINS = 256
_LIST = 32


@dataclass(frozen=True, slots=True)
class Layout:
    """How thread blocks hold rows; the fields are the macros of ``sm90_topk.cu``, in capitals."""

    threads: int
    blocks: int
    groups: int
    step: int
    capacity: int
    resident: int = 1
    stage: bool = False
    early: bool = False
    cluster: int = 1
    tiled: bool = False
    tiles: int = 1

    @property
    def columns(self) -> int:
        """Width of a row that is held as a whole."""
        return 4 * self.threads * self.blocks * self.cluster

    @property
    def shared_bytes(self) -> int:
        """Size of the source's ``struct Shared``, rounded up."""
        chunk = 4 * self.threads * self.blocks
        row = 4 * chunk * self.stage + self.tiles * chunk // 4
        histograms = 4 * (_BINS + 4) * (3 + (self.cluster > 1))
        return row + 8 * self.capacity + histograms + 16 * _LIST + 4 * 32 * (1 + 2 * self.cluster) + 64


def topk_indices(logits: Tensor, visible_end: Tensor, k: int, out: Tensor) -> None:
    """Fill ``out`` int32 [R, k], the chosen columns in ascending order, from ``logits`` fp32 [R, width] and
    ``visible_end`` int32 [R]; see :func:`tetrad.ops.topk_indices.topk_indices`.

    Raises:
        ConfigError: where CUDA C++ cannot be compiled
    """
    rows, width = logits.shape
    if not rows:
        return
    layout = layout_for(rows, width, k)
    strides = logits.stride(0), out.stride(0)
    blocks = layout.cluster * min(rows, teams(layout, logits.device))
    kernel = compiled(layout, logits.device)
    kernel.launch((blocks,), (layout.threads,), logits, visible_end, out, k, width, rows, *strides)


@functools.cache
def compiled(layout: Layout, device: torch.device) -> CudaKernel:
    """The kernel for a layout."""
    return cuda_kernel(
        source(),
        "topk_indices",
        device,
        defines=macros(layout),
        shared_bytes=layout.shared_bytes,
        early_start=True,
    )


@functools.cache
def teams(layout: Layout, device: torch.device) -> int:
    """Rows that are looked at at once: as many as fit where the next row is copied meanwhile, else any number."""
    if not layout.stage:
        return 1 << 30
    assert layout.cluster == 1, "clusters hold or stream their rows"
    return torch.cuda.get_device_properties(device).multi_processor_count * layout.resident


@functools.cache
def source() -> str:
    """The kernel's source, its parts put together."""
    folder = Path(__file__).parent

    def read(name: str) -> str:
        text = (folder / name).read_text(encoding="utf-8")
        return re.sub(r'#include "(\w+\.cuh)"\n', lambda part: read(part[1]), text)

    return EARLY_START + read("sm90_topk.cu")


def macros(layout: Layout) -> tuple[tuple[str, int], ...]:
    """A layout as the source takes it."""
    given = zip(fields(layout), astuple(layout), strict=True)
    return (*((field.name.upper(), int(value)) for field, value in given), ("SHARED_BYTES", layout.shared_bytes))


def layout_for(rows: int, width: int, k: int) -> Layout:
    """The layout for a problem. It changes the speed, not the choice.

    The bound is tight while k is well under the number of groups, threads x groups; a larger k takes more of them.
    Which layouts, and from which width on clusters, is what an H200 measured; docs/kernels.md has the figures.
    """
    few = rows <= _ONE_WAVE
    if width > 32768:
        return _long_row(rows, width, k)
    if width > 16384:
        if few:
            return Layout(1024, 8, 4, 1, 4096, early=True)
        return Layout(512, 4, 4, 2, 8192 if k > 1024 else 4096, resident=2, tiled=True, tiles=4)
    if width > 8192:
        if k > 1024:
            return Layout(512, 8, 8, 1, 4096, resident=2, stage=True)
        return Layout(1024, 4, 4, 1, 4096, stage=True) if few else Layout(512, 8, 4, 1, 4096, resident=2, early=True)
    if few or k > 1024:
        return Layout(1024, 2, 4, 1, 4096, early=True)
    return (
        Layout(256, 8, 4, 1, 2048, resident=4, stage=True)
        if k <= 512
        else Layout(512, 4, 4, 1, 4096, resident=2, stage=True)
    )


def _long_row(rows: int, width: int, k: int) -> Layout:
    """Few rows are spread over clusters, as long as all of them are on the device at once; more are streamed by one
    thread block each, beyond 262144 columns by two."""
    capacity = 8192 if k > 1024 else 4096
    if width <= 65536:
        if rows <= 16:
            return Layout(512, 8, 4, 1, 4096, cluster=4)
        if rows <= 32:
            return Layout(512, 16, 4, 1, 4096, cluster=2)
        if rows <= _ONE_WAVE:
            return Layout(1024, 8, 4, 2, capacity, tiled=True, tiles=2)
        return Layout(512, 8, 4, 2, capacity, resident=2, tiled=True, tiles=4)
    if width <= 131072:
        if rows <= 8:
            return Layout(512, 8, 4, 1, 2048, cluster=8)
        if rows <= 16:
            return Layout(512, 16, 4, 1, 4096, cluster=4)
        if rows <= _ONE_WAVE:
            return Layout(1024, 8, 4, 1, capacity, tiled=True, tiles=4)
        # where high scores stand together a sample of every other block is too small: 100 us instead of 48
        return Layout(512, 8, 4, 1 if k <= 1024 else 2, capacity, resident=2, tiled=True, tiles=8)
    if width <= 262144:
        if rows <= 8:
            return Layout(512, 8, 4, 2, 2048, cluster=8, tiled=True, tiles=4)
        if rows <= 16:
            return Layout(512, 16, 4, 1, 4096, cluster=4, tiled=True, tiles=8)
        if rows <= _ONE_WAVE:
            return Layout(1024, 8, 4, 1, capacity, tiled=True, tiles=8)
        return Layout(1024, 8, 4, 2, 8192, tiled=True, tiles=8)
    if rows <= 16:
        return Layout(512, 8, 4, 2, 4096, cluster=8, tiled=True, tiles=8)
    if rows <= 32:
        return Layout(512, 8, 4, 2, 4096, cluster=4, tiled=True, tiles=16)
    return Layout(1024, 8, 4, 1, 4096, cluster=2, tiled=True, tiles=16)
