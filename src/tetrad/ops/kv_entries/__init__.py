"""Entries of the main KV caches, window and compressed alike: how they are stored in pages and read back.

In FP8 the rope-free channels are E4M3 with one e8m0 scale per 64, the rotated ones stay in ``layout.rope_dtype``. bf16
and fp32 entries are stored as they are. What attention sees is always the entry as stored.

The back end ``reference`` reads on the host which slots are negative, so writing and copying wait for the device and
cannot be captured into a CUDA graph.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from tetrad.geometry import PagedKV, check_paged
from tetrad.ops.arguments import check_compute_dtype, check_pages, check_real, check_tensor
from tetrad.ops.backends import Problem, backend_module
from tetrad.ops.checked import check_copies, check_slots
from tetrad.torch_settings import without_autocast

__all__ = ["copy_kv_entries", "read_kv_entries", "write_kv_entries", "write_pooled_kv_entries"]

_COMPUTE_DTYPES = (torch.float32, torch.bfloat16)


@without_autocast
def write_kv_entries(values: Tensor, cache: PagedKV, slots: Tensor) -> None:
    """Store entries at their slots, data and scales together; the pages of ``cache`` are changed in place.

    Entries with a negative slot are not stored; two entries must not share a slot. Nothing but the named entries' bytes
    is written; the bytes that pad an entry's scales become zero.

    Args:
        values: bf16 or fp32 [N, d], d = ``cache.layout.head_dim``, the rotated channels last
        cache: where to, and the dtype of its entries
        slots: int64 [N]

    Raises:
        ValueError: for a wrong shape, stride or device
        TypeError: for a wrong dtype
        IndexError: if a slot lies behind the last page
    """
    check_paged(cache)
    check_tensor("values", values, _COMPUTE_DTYPES, (None, cache.layout.head_dim), "entries, channels")
    backend = _backend(cache, slots, values, distinct=True)
    backend.write_kv_entries(values, cache.pages, slots, cache.layout)


@without_autocast
def write_pooled_kv_entries(
    pooled: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    cache: PagedKV,
    slots: Tensor,
) -> None:
    """Make compressed entries, RoPE(RMSNorm(pooled)), and store them as :func:`write_kv_entries` does.

    Source: the compressor of DeepSeek-V4's CSA and HCA layers.

    Args:
        pooled: fp32 [N, d], the compressor's output
        norm_weight: fp32 [d]
        eps: the norm's epsilon
        cos: fp32 [N, rope / 2], at the position of the entry's first token
        sin: as ``cos``
        dtype: the compute dtype, fp32 or bf16, to which every step rounds
        cache: where to
        slots: int64 [N]; entries with a negative slot are neither made nor stored

    Errors as those of :func:`write_kv_entries`.
    """
    check_paged(cache)
    check_tensor("pooled", pooled, torch.float32, (None, cache.layout.head_dim), "entries, channels")
    check_tensor("norm_weight", norm_weight, torch.float32, (pooled.shape[1],), "channels", pooled.device)
    for name, angle in (("cos", cos), ("sin", sin)):
        check_tensor(name, angle, torch.float32, (pooled.shape[0], None), "entries, rope / 2", pooled.device)
    if sin.shape != cos.shape or 2 * cos.shape[1] > pooled.shape[1]:
        raise ValueError(
            f"cos and sin must have one shape, with at most an angle for every two of {pooled.shape[1]} channels; got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    check_real("eps", eps)
    check_compute_dtype(dtype)
    backend = _backend(cache, slots, pooled, distinct=True)
    backend.write_pooled_kv_entries(pooled, norm_weight, eps, cos, sin, dtype, cache.pages, slots, cache.layout)


@without_autocast
def copy_kv_entries(cache: PagedKV, sources: Tensor, targets: Tensor) -> None:
    """Copy entries from slot to slot as they are stored, all from what was there before.

    Args:
        cache: its pages are changed in place
        sources: int64 [N]; -1 copies nothing
        targets: int64 [N], -1 where ``sources`` is; two must not be the same

    Raises:
        ValueError: for a wrong shape or device
        TypeError: for a wrong dtype
        IndexError: if a slot lies behind the last page
    """
    check_paged(cache)
    check_tensor("sources", sources, torch.int64, (None,), "entries", cache.pages.device)
    check_tensor("targets", targets, torch.int64, (sources.shape[0],), "entries", cache.pages.device)
    check_slots("sources", sources, cache.slots)
    check_slots("targets", targets, cache.slots, distinct=True)
    check_copies(sources, targets)
    _backend(cache, sources, targets).copy_kv_entries(cache.pages, sources, targets, cache.layout)


@without_autocast
def read_kv_entries(cache: PagedKV, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The stored entries at ``slots``: [..., d] in ``dtype``; zeros for a negative slot.

    Args:
        cache: where from
        slots: int64 [...]
        dtype: fp32 or bf16. FP8 and bf16 entries are exact in both

    Raises:
        ValueError: for a wrong shape, stride or device
        TypeError: for a wrong dtype
        IndexError: if a slot lies behind the last page
    """
    check_paged(cache)
    layout = cache.layout
    check_pages("pages", cache.pages, layout.page_bytes, f"KV entries in {layout.dtype}", aligned=False)
    check_tensor("slots", slots, torch.int64, None, "any shape", cache.pages.device, strided=True)
    check_compute_dtype(dtype)
    check_slots("slots", slots, cache.slots)
    backend = backend_module("kv_entries", cache.pages.device, Problem(str(layout.dtype), layout.head_dim))
    return backend.read_kv_entries(cache.pages, slots, layout, dtype)


def _backend(cache: PagedKV, slots: Tensor, rows: Tensor, *, distinct: bool = False) -> ModuleType:
    """The back end for these pages, once they and one slot for each of ``rows`` are checked."""
    layout = cache.layout
    check_tensor("slots", slots, torch.int64, (rows.shape[0],), "entries", rows.device)
    check_pages("pages", cache.pages, layout.page_bytes, f"KV entries in {layout.dtype}", rows.device, aligned=False)
    check_slots("slots", slots, cache.slots, distinct=distinct)
    return backend_module("kv_entries", rows.device, Problem(str(layout.dtype), layout.head_dim))
