"""Index keys and queries in Triton, for every GPU. The arguments are checked by :mod:`tetrad.ops.index_keys`.

One launch takes vectors all the way: from memory through the norm, RoPE and the Hadamard rotation to their bytes in a
page, or to what the scorer takes. Every number is rounded where the reference rounds it, and sums are added up in the
reference's order, so that both give the same bytes: the Hadamard passes are those of :mod:`tetrad.formats.hadamard`,
and the norm's squares are added as torch adds them on x86. To that end no product and sum may become one fused
operation (``enable_fp_fusion``) but those written as one, whose product is exact.

A vector is a tuple of *pieces* [vectors, 32]. A piece is one FP4 group, and lies in the 4 or 8 threads that loaded it,
each with adjacent channels. Of the Hadamard passes the first ones combine whole pieces and the last ones channels of
one thread; only those between them exchange numbers between threads.

Slots are looked at on the device alone: a key whose slot lies behind the last page is left out like one with a negative
slot. To raise an error would be to wait for the device, and to store it would be to overwrite someone else's memory.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.index_keys.reference import read_index_keys
from tetrad.ops.index_keys.triton_encoding import store_pieces
from tetrad.ops.index_keys.triton_vectors import PIECE, apply_rope, load_pieces, normed, rotated
from tetrad.platforms import current_platform

__all__ = [
    "index_key_vectors",
    "quantize_index_query",
    "read_index_keys",
    "write_index_keys",
    "write_pooled_index_keys",
]

_THREADS = 128
"""Threads of a program."""


def index_key_vectors(
    pooled: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Cast, RMSNorm, RoPE, each rounded to ``dtype``."""
    keys = torch.empty(pooled.shape, dtype=dtype, device=pooled.device)
    # rows of numbers, not encoded, are laid out like the keys of an unquantised page
    kind = IndexDtype.BF16 if dtype == torch.bfloat16 else IndexDtype.FP32
    layout = IndexLayout(kind, pooled.shape[1], hadamard=False)
    _launch_keys(pooled, (norm_weight, eps, cos, sin), dtype, keys.view(torch.uint8), None, layout)
    return keys


def write_pooled_index_keys(
    pooled: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    pages: Tensor,
    slots: Tensor,
    layout: IndexLayout,
) -> None:
    """All of :func:`index_key_vectors` and :func:`write_index_keys` in one launch."""
    _launch_keys(pooled, (norm_weight, eps, cos, sin), dtype, pages, slots, layout)


def write_index_keys(keys: Tensor, pages: Tensor, slots: Tensor, layout: IndexLayout) -> None:
    """Rotate the keys if the layout says so, encode them, and store data and scales together."""
    _launch_keys(keys, None, keys.dtype, pages, slots, layout)


def quantize_index_query(q: Tensor, cos: Tensor, sin: Tensor, layout: IndexLayout) -> tuple[Tensor, Tensor | None]:
    """RoPE and, if the layout says so, Hadamard, each rounded to the dtype of ``q``; then the layout's encoding."""
    rows, heads, _ = q.shape
    values, scales = _empty_query(q, layout.dtype)
    if rows * heads:
        constants = query_constants(_arch(q), q.dtype, layout, heads, 2 * cos.shape[1])
        arguments = q, cos, sin, values.view(torch.uint8), None if scales is None else scales.view(torch.uint8)
        strides = q.stride(0), q.stride(1), cos.stride(0), sin.stride(0)
        with _device_of(q):
            launch = index_query_kernel[(triton.cdiv(rows * heads, constants["VECTORS"]),)]
            launch(*arguments, rows * heads, *strides, **constants)
    return values, scales


def query_constants(arch: str, dtype: torch.dtype, layout: IndexLayout, heads: int, rope: int) -> dict[str, Any]:
    """What :func:`index_query_kernel` is compiled with on an architecture, the compiler's options among it."""
    constants = {
        "HEADS": heads,
        "DIM": layout.head_dim,
        "ROPE": rope,
        "HADAMARD": layout.hadamard,
        "KIND": layout.dtype.value,
    }
    return constants | _program(arch, dtype)


def key_constants(arch: str, source: torch.dtype, dtype: torch.dtype, layout: IndexLayout, rope: int) -> dict[str, Any]:
    """What :func:`index_key_kernel` is compiled with; ``source`` is the dtype that it reads, ``dtype`` the one that it
    rounds to.
    """
    constants = {
        "BF16": dtype == torch.bfloat16,
        "DIM": layout.head_dim,
        "ROPE": rope,
        "HADAMARD": layout.hadamard,
        "KIND": layout.dtype.value,
        "ENTRIES": layout.entries,
        "ROW_BYTES": layout.data_row_bytes,
        "SCALE_BYTES": layout.scale_row_bytes,
    }
    return constants | _program(arch, source)


def _program(arch: str, dtype: torch.dtype) -> dict[str, Any]:
    """As many vectors that every thread has 16 bytes of each piece of one."""
    warp = 64 if arch.startswith("gfx9") else 32
    vectors = _THREADS * 16 // (PIECE.value * dtype.itemsize)
    return {"VECTORS": vectors, "num_warps": _THREADS // warp, "enable_fp_fusion": False}


def _launch_keys(
    source: Tensor,
    making: tuple[Tensor, float, Tensor, Tensor] | None,
    dtype: torch.dtype,
    target: Tensor,
    slots: Tensor | None,
    layout: IndexLayout,
) -> None:
    """``making``: the norm's weight and epsilon, cos and sin; None if the source is keys already."""
    count = source.shape[0]
    if not count:
        return
    weight, eps, cos, sin = making or (None, 0.0, None, None)
    cos_stride, rope = (0, 0) if cos is None else (cos.stride(0), 2 * cos.shape[1])
    constants = key_constants(_arch(source), source.dtype, dtype, layout, rope)
    sizes = count, target.shape[0] * layout.entries, source.stride(0), target.stride(0)
    with _device_of(source):
        launch = index_key_kernel[(triton.cdiv(count, constants["VECTORS"]),)]
        angle_strides = cos_stride, 0 if sin is None else sin.stride(0)
        launch(source, weight, cos, sin, slots, target, eps, *sizes, *angle_strides, **constants)


def _empty_query(q: Tensor, dtype: IndexDtype) -> tuple[Tensor, Tensor | None]:
    """Memory for what :func:`tetrad.ops.index_keys.encoding.encode` gives."""
    rows, heads, dim = q.shape
    if dtype is IndexDtype.FP4:
        values = torch.empty((rows, heads, dim // 2), dtype=torch.uint8, device=q.device)
        return values, torch.empty((rows, heads, dim // 32), dtype=torch.uint8, device=q.device)
    if dtype is IndexDtype.FP8:
        scales = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
        return torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device), scales
    kind = torch.bfloat16 if dtype is IndexDtype.BF16 else torch.float32
    return torch.empty(q.shape, dtype=kind, device=q.device), None


def _arch(x: Tensor) -> str:
    return current_platform(x.device).arch


def _device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@triton.jit(do_not_specialize=["vectors"])
def index_query_kernel(
    q,
    cos,
    sin,
    values,
    scales,
    vectors,
    row_stride,
    head_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    HADAMARD: tl.constexpr,
    KIND: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Some heads of q [R, H, D], whatever rows they are of. Values and scales are bytes without gaps; strides count
    elements.
    """
    bf16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    real = vector < vectors
    row, head = vector // HEADS, vector % HEADS
    x = load_pieces(q + (row * row_stride + head * head_stride), real, DIM)
    x = apply_rope(x, cos + row * cos_stride, sin + row * sin_stride, real, DIM, ROPE, bf16, VECTORS)
    if HADAMARD:
        x = rotated(x, DIM, bf16, VECTORS)
    if KIND == "fp4":
        store_pieces(x, values + vector * (DIM // 2), scales + vector * (DIM // 32), real, DIM, KIND, VECTORS)
    elif KIND == "fp8":
        store_pieces(x, values + vector * DIM, scales + vector * 4, real, DIM, KIND, VECTORS)
    else:
        size: tl.constexpr = 2 if KIND == "bf16" else 4
        store_pieces(x, values + vector * (DIM * size), None, real, DIM, KIND, VECTORS)


@triton.jit(do_not_specialize=["count", "end"])
def index_key_kernel(
    source,
    weight,
    cos,
    sin,
    slots,
    target,
    eps,
    count,
    end,
    source_stride,
    target_stride,
    cos_stride,
    sin_stride,
    BF16: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    HADAMARD: tl.constexpr,
    KIND: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Some keys from rows of source [N, D] to their slots in pages, or without slots to rows of target.

    Without a weight the source is keys after RoPE, with one it is pooled. ``end`` is the first slot behind the pages;
    source, cos and sin have strides in elements, target in bytes.
    """
    key = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    real = key < count
    x = load_pieces(source + key * source_stride, real, DIM)
    if weight is not None:
        x = normed(x, weight, eps, DIM, BF16, VECTORS)
        x = apply_rope(x, cos + key * cos_stride, sin + key * sin_stride, real, DIM, ROPE, BF16, VECTORS)
    if HADAMARD:
        x = rotated(x, DIM, BF16, VECTORS)
    if slots is None:
        store_pieces(x, target + key * target_stride, None, real, DIM, KIND, VECTORS)
    else:
        slot = tl.load(slots + key, real, -1)
        real = (slot >= 0) & (slot < end)
        page, entry = target + slot // ENTRIES * target_stride, slot % ENTRIES
        scales = page + (ENTRIES * ROW_BYTES + entry * SCALE_BYTES)
        store_pieces(x, page + entry * ROW_BYTES, scales, real, DIM, KIND, VECTORS)
