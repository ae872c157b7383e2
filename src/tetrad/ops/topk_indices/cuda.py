"""Exact top-k on Hopper, in CUDA C++. The arguments are checked by :mod:`tetrad.ops.topk_indices`."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from tetrad.ops.nvrtc import CudaKernel, cuda_kernel
from tetrad.ops.topk_indices.cuda_cluster_source import CLUSTER_SOURCE
from tetrad.ops.topk_indices.cuda_row_source import ROW_SOURCE


@dataclass(frozen=True, slots=True)
class RowShape:
    """How a thread block holds a row; the fields are the macros of ``cuda_row_source``, in capitals."""

    threads: int
    blocks: int
    groups: int
    resident: int

    source = ROW_SOURCE
    cluster = 1

    @property
    def shared_bytes(self) -> int:
        """Size of the source's ``struct Shared``, rounded up."""
        scores = 4 * self.threads * self.blocks
        return 4 * scores + scores // 8 + 4 * 256 + 8 * (32 + self.blocks) + 4 * (3 * 32 + 3) + 16


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """How a cluster of thread blocks holds a row; the fields are the macros of ``cuda_cluster_source``, in capitals."""

    threads: int
    blocks: int
    groups: int
    resident: int
    cluster: int
    capacity: int

    source = CLUSTER_SOURCE

    @property
    def shared_bytes(self) -> int:
        """Size of the source's ``struct Shared``, rounded up."""
        scores = 4 * self.threads * self.blocks
        lists = 8 * (self.capacity + 32 + self.blocks + 1)
        return 4 * scores + 4 * 1024 + lists + 4 * (3 * 32 + 16 + 5) + 16


Shape = RowShape | ClusterShape


def topk_indices(logits: Tensor, visible_end: Tensor, k: int, out: Tensor) -> None:
    """Fill ``out`` int32 [R, k], the chosen columns in ascending order; see
    :func:`tetrad.ops.topk_indices.topk_indices`.
    """
    rows, width = logits.shape
    if not rows:
        return
    shape = shape_for(rows, width, k)
    strides = logits.stride(0), out.stride(0)
    kernel = compiled(shape, logits.device)
    kernel.launch((rows * shape.cluster,), (shape.threads,), logits, visible_end, out, k, width, *strides)


@functools.cache
def compiled(shape: Shape, device: torch.device) -> CudaKernel:
    """The kernel for a shape."""
    return cuda_kernel(shape.source, "topk_indices", device, defines=macros(shape), shared_bytes=shape.shared_bytes)


def macros(shape: Shape) -> tuple[tuple[str, int], ...]:
    """A shape as its source takes it."""
    return tuple((field.name.upper(), value) for field, value in zip(fields(shape), astuple(shape), strict=True))


def shape_for(rows: int, width: int, k: int) -> Shape:
    """The shape for a problem.

    The bound is tight while k is about half of the groups of columns, so a larger k takes more of them. Above 2048 only
    the slow way of the kernels serves.
    """
    if width > 32768:
        if k > 512:
            return ClusterShape(512, 8, 2, 1, cluster=8, capacity=8192)
        return ClusterShape(512, 8, 1, 2, cluster=8 if rows <= 16 else 4, capacity=4096)
    if width > 16384:
        return RowShape(1024, 8, 1 if k <= 512 else 2 if k <= 1024 else 4, 1)
    if k > 1024:
        return RowShape(1024, 4, 4, 1)
    return RowShape(512, 4 if width <= 8192 else 8, 2 if k <= 512 else 4, 3)
