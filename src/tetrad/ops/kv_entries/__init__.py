"""Entries of the main KV caches, window and compressed alike: how they are stored in pages and read back.

In FP8 the rope-free channels are E4M3 with one e8m0 scale per 64, the rotated ones stay in ``layout.rope_dtype``. bf16
and fp32 entries are stored as they are. What attention sees is always the entry as stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.geometry import KVLayout, check_layout
from tetrad.ops.arguments import check_compute_dtype, check_pages, check_tensor
from tetrad.ops.backends import Problem, backend_module
from tetrad.ops.checked import check_slots
from tetrad.torch_settings import without_autocast

__all__ = ["read_kv_entries", "write_kv_entries"]

_COMPUTE_DTYPES = (torch.float32, torch.bfloat16)


@without_autocast
def write_kv_entries(values: Tensor, pages: Tensor, slots: Tensor, layout: KVLayout) -> None:
    """Store entries at their slots, data and scales together; ``pages`` is changed in place.

    Slot s is entry ``s % layout.entries`` of page ``s // layout.entries``. Entries with a negative slot are not stored;
    two entries must not share a slot. Nothing but the named entries' bytes is written; the bytes that pad an entry's
    scales become zero.

    :param values: bf16 or fp32 [N, d], d = ``layout.head_dim``, the rotated channels last
    :param pages: uint8 [pages, stride], at least ``layout.page_bytes`` wide
    :param slots: int64 [N]
    :param layout: how a page is laid out, and the dtype of its entries
    :raises ValueError: for a wrong shape, stride or device
    :raises TypeError: for a wrong dtype
    :raises IndexError: if a slot lies behind the last page
    """
    check_layout(layout, KVLayout)
    check_tensor("values", values, _COMPUTE_DTYPES, (None, layout.head_dim), "entries, channels")
    check_tensor("slots", slots, torch.int64, (values.shape[0],), "entries", values.device)
    check_pages("pages", pages, layout.page_bytes, f"KV entries in {layout.dtype}", values.device, aligned=False)
    check_slots("slots", slots, pages.shape[0] * layout.entries, distinct=True)
    backend = backend_module("kv_entries", values.device, Problem(str(layout.dtype), layout.head_dim))
    backend.write_kv_entries(values, pages, slots, layout)


@without_autocast
def read_kv_entries(pages: Tensor, slots: Tensor, layout: KVLayout, dtype: torch.dtype) -> Tensor:
    """The stored entries at ``slots``: [..., d] in ``dtype``; zeros for a negative slot.

    :param pages: as in :func:`write_kv_entries`
    :param slots: int64 [...]
    :param dtype: fp32 or bf16. FP8 and bf16 entries are exact in both
    :raises ValueError: for a wrong shape, stride or device
    :raises TypeError: for a wrong dtype
    :raises IndexError: if a slot lies behind the last page
    """
    check_layout(layout, KVLayout)
    check_pages("pages", pages, layout.page_bytes, f"KV entries in {layout.dtype}", aligned=False)
    check_tensor("slots", slots, torch.int64, None, "any shape", pages.device, strided=True)
    check_compute_dtype(dtype)
    check_slots("slots", slots, pages.shape[0] * layout.entries)
    backend = backend_module("kv_entries", pages.device, Problem(str(layout.dtype), layout.head_dim))
    return backend.read_kv_entries(pages, slots, layout, dtype)
