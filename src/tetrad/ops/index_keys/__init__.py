"""Index keys and queries: how they are made and how keys are stored in pages.

    key:    pooled -> RMSNorm -> RoPE -> Hadamard -> quantise -> page
    query:                       RoPE -> Hadamard -> quantise

Each arrow before the quantisation rounds to the compute dtype. The Hadamard rotation is applied on both sides or on
neither, so it cancels in every score; what it changes is that no single channel takes an FP4 group's scale for itself.
Whether it is applied is :attr:`tetrad.geometry.IndexLayout.hadamard`, which :func:`write_index_keys`,
:func:`write_pooled_index_keys` and :func:`quantize_index_query` read: there is no other place to say so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.geometry import IndexLayout, check_layout
from tetrad.ops.arguments import as_pages, check_compute_dtype, check_pages, check_real, check_tensor
from tetrad.ops.backends import Problem, backend_module
from tetrad.ops.checked import check_slots
from tetrad.torch_settings import without_autocast

__all__ = [
    "index_key_vectors",
    "quantize_index_query",
    "read_index_keys",
    "write_index_keys",
    "write_pooled_index_keys",
]

_COMPUTE_DTYPES = (torch.float32, torch.bfloat16)


@without_autocast
def index_key_vectors(
    pooled: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The keys that :func:`write_index_keys` takes: RoPE(RMSNorm(pooled)), [N, D] in ``dtype``.

    Source: the compressor inside DeepSeek-V4's indexer.

    Args:
        pooled: fp32 [N, D], the compressor's output
        norm_weight: fp32 or bf16 [D]
        eps: the norm's epsilon
        cos: fp32 [N, rope / 2], one angle per key and channel pair, at the position of the key's first token
        sin: as ``cos``
        dtype: the compute dtype, torch.float32 or torch.bfloat16, to which every step rounds

    Raises:
        ValueError: for a wrong shape, stride or device
        TypeError: for a wrong dtype
    """
    _check_pooled(pooled, norm_weight, eps, cos, sin, dtype)
    backend = backend_module("index_keys", pooled.device, Problem(head_dim=pooled.shape[1]))
    return backend.index_key_vectors(pooled, norm_weight, eps, cos, sin, dtype)


@without_autocast
def quantize_index_query(q: Tensor, cos: Tensor, sin: Tensor, layout: IndexLayout) -> tuple[Tensor, Tensor | None]:
    """Index queries as ``indexer_logits`` takes them: (q, q_scale) of RoPE(q), rotated and quantised like the keys.

    fp4: uint8 [R, H, D/2] and e8m0 uint8 [R, H, D/32]; fp8: float8_e4m3fn [R, H, D] and fp32 [R, H]; bf16 and fp32:
    [R, H, D] in that dtype and None.

    Args:
        q: bf16 or fp32 [R, H, D], the projected query
        cos: fp32 [R, rope / 2], one angle per row and channel pair; the last ``rope`` channels are rotated
        sin: as ``cos``
        layout: the layout with which the keys are written: their dtype, and whether they are rotated by Hadamard

    Raises:
        ValueError: for a wrong shape, stride or device, or if D is not that of the layout
        TypeError: for a wrong type or dtype
    """
    check_layout(layout, IndexLayout)
    check_tensor("q", q, _COMPUTE_DTYPES, (None, None, None), "rows, heads, channels")
    _check_angles(q, cos, sin)
    if q.shape[2] != layout.head_dim:
        raise ValueError(f"q has {q.shape[2]} channels, but the layout is of keys of {layout.head_dim}")
    backend = backend_module("index_keys", q.device, Problem(str(layout.dtype), layout.head_dim, q.shape[1]))
    return backend.quantize_index_query(q, cos, sin, layout)


@without_autocast
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
    """Make keys and store them: :func:`index_key_vectors`, whose parameters come first, then :func:`write_index_keys`.

    The same bytes as those two give, but a GPU does both in one launch. Errors as theirs.
    """
    check_layout(layout, IndexLayout)
    _check_pooled(pooled, norm_weight, eps, cos, sin, dtype)
    if pooled.shape[1] != layout.head_dim:
        raise ValueError(f"pooled has {pooled.shape[1]} channels, but the pages are for keys of {layout.head_dim}")
    pages = _check_places(pages, slots, layout, pooled)
    backend = backend_module("index_keys", pooled.device, Problem(str(layout.dtype), layout.head_dim))
    backend.write_pooled_index_keys(pooled, norm_weight, eps, cos, sin, dtype, pages, slots, layout)


@without_autocast
def write_index_keys(keys: Tensor, pages: Tensor, slots: Tensor, layout: IndexLayout) -> None:
    """Quantise keys and store each at its slot, data and scales together; ``pages`` is changed in place.

    Where ``layout.hadamard`` is set, as it is by default, the keys are rotated first, in their dtype.
    Slot s is entry ``s % 64`` of page ``s // 64``. Keys with a negative slot are not stored; two keys must not share a
    slot. Nothing but the named entries' bytes is written.

    Args:
        keys: bf16 or fp32 [N, D] after RoPE, not rotated by Hadamard: from :func:`index_key_vectors`
        pages: uint8 [pages, stride], at least ``layout.page_bytes`` wide, pages at multiples of 16 bytes; or DeepGEMM's
            form of the same bytes, [pages, 64, 1, ``layout.page_bytes`` / 64]
        slots: int64 [N]
        layout: how a page is laid out, the dtype of its keys, and whether they are rotated

    Raises:
        ValueError: for a wrong shape, stride or device
        TypeError: for a wrong type or dtype
        IndexError: if a slot lies behind the last page, on a CPU. A GPU does not wait to find that out: there it may
            stop the process later, or leave the key out; it never writes elsewhere
    """
    check_layout(layout, IndexLayout)
    check_tensor("keys", keys, _COMPUTE_DTYPES, (None, layout.head_dim), "keys, channels")
    pages = _check_places(pages, slots, layout, keys)
    backend = backend_module("index_keys", keys.device, Problem(str(layout.dtype), layout.head_dim))
    backend.write_index_keys(keys, pages, slots, layout)


@without_autocast
def read_index_keys(pages: Tensor, slots: Tensor, layout: IndexLayout) -> Tensor:
    """The stored keys at ``slots``, dequantised: fp32 [..., D]; zeros for a negative slot.

    Keys that were rotated before they were stored come back rotated; :func:`tetrad.formats.hadamard.rotate` turns them
    back.

    Args:
        pages: as in :func:`write_index_keys`
        slots: int64 [...]

    Raises:
        ValueError: for a wrong shape, stride or device
        TypeError: for a wrong type or dtype
        IndexError: if a slot lies behind the last page
    """
    check_layout(layout, IndexLayout)
    pages = as_pages("pages", pages, layout)
    check_pages("pages", pages, layout.page_bytes, f"index keys in {layout.dtype}")
    check_tensor("slots", slots, torch.int64, None, "any shape", pages.device, strided=True)
    check_slots("slots", slots, pages.shape[0] * layout.entries)
    backend = backend_module("index_keys", pages.device, Problem(str(layout.dtype), layout.head_dim))
    return backend.read_index_keys(pages, slots, layout)


def _check_pooled(
    pooled: Tensor, norm_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> None:
    check_tensor("pooled", pooled, torch.float32, (None, None), "keys, channels")
    check_tensor("norm_weight", norm_weight, _COMPUTE_DTYPES, (pooled.shape[1],), "channels", pooled.device)
    check_real("eps", eps)
    check_compute_dtype(dtype)
    _check_angles(pooled, cos, sin)


def _check_places(pages: Tensor, slots: Tensor, layout: IndexLayout, keys: Tensor) -> Tensor:
    """The pages as uint8 [pages, bytes]."""
    check_tensor("slots", slots, torch.int64, (keys.shape[0],), "keys", keys.device)
    pages = as_pages("pages", pages, layout)
    check_pages("pages", pages, layout.page_bytes, f"index keys in {layout.dtype}", keys.device)
    check_slots("slots", slots, pages.shape[0] * layout.entries, distinct=True)
    return pages


def _check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_tensor("cos", cos, torch.float32, (x.shape[0], None), "rows, channel pairs", x.device)
    check_tensor("sin", sin, torch.float32, tuple(cos.shape), "rows, channel pairs", x.device)
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"cos turns {2 * cos.shape[1]} channels, but there are only {x.shape[-1]}")
