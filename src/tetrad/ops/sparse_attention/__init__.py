"""Attention of one query row over window keys and compressed keys, with one shared key-value head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.errors import check_whole
from tetrad.formats.arguments import described
from tetrad.geometry import PagedKV, check_paged
from tetrad.ops.arguments import check_real, check_tensor
from tetrad.ops.backends import Problem, backend_module
from tetrad.ops.checked import check_rows, check_slots, check_tables
from tetrad.torch_settings import without_autocast

__all__ = ["History", "sparse_attention"]


@dataclass(frozen=True, slots=True)
class History:
    """All compressed entries that a row sees, from its request's first: ``end[r]`` of them, at most ``width``.

    block_tables: int32 [requests, blocks]; row_request: int32 [R], -1 for padding; end: int32 [R], 0 for padding;
    width: a plain int.
    """

    block_tables: Tensor
    row_request: Tensor
    end: Tensor
    width: int


@without_autocast
def sparse_attention(
    q: Tensor,
    sinks: Tensor,
    window: PagedKV,
    window_slots: Tensor,
    compressed: PagedKV | None = None,
    compressed_slots: Tensor | History | None = None,
    *,
    scale: float,
) -> Tensor:
    """o[r, h] = sum_t p[r, h, t] kv_t,  p = e^(s - M) / (sum_t e^(s - M) + e^(sink_h - M)),  s = scale <q[r, h], kv_t>.

    The keys of a row are those of its window and its compressed ones, in the order of their slots, without removal of
    duplicates; the same vector is key and value. The sink takes part in the denominator only. Computed in fp32 from the
    stored, dequantised keys. A row that sees no key gives zeros.

    Args:
        q: [R, H, d] in the compute dtype
        sinks: fp32 [H]
        window: raw keys
        window_slots: int64 [R, W], physical slots, -1 for none; those of a row stand before its first -1
        compressed: compressed entries, None in a layer without
        compressed_slots: int64 [R, K], like ``window_slots``, or the :class:`History` of every row
        scale: of the scores

    Returns:
        [R, H, d] in the dtype of ``q``

    Raises:
        ValueError: for a wrong shape or device, or one of ``compressed`` and ``compressed_slots`` without the other
        TypeError: for a wrong type or dtype
        IndexError: for a slot behind the last page, on a CPU; :func:`tetrad.ops.checked` looks everywhere

    Lengths are read on the host, so it cannot be captured into a CUDA graph.

    Source: the DeepSeek-V4 attention layer (shared key-value head, learned sinks).
    """
    check_tensor("q", q, (torch.float32, torch.bfloat16), (None, None, None), "rows, heads, channels", strided=True)
    rows, heads, dim = q.shape
    check_tensor("sinks", sinks, torch.float32, (heads,), "heads", q.device, strided=True)
    check_real("scale", scale)
    _check_cache(window, dim, q.device)
    _check_slots("window_slots", window_slots, window, rows)
    if (compressed is None) != (compressed_slots is None):
        raise ValueError("compressed and compressed_slots go together; give both or neither")
    if compressed is not None:
        _check_cache(compressed, dim, q.device)
        if isinstance(compressed_slots, History):
            _check_history(compressed_slots, compressed, rows)
        else:
            _check_slots("compressed_slots", compressed_slots, compressed, rows)
    backend = backend_module("sparse_attention", q.device, Problem(str(window.layout.dtype), dim, heads))
    return backend.sparse_attention(q, sinks, window, window_slots, compressed, compressed_slots, scale=scale)


def _check_cache(cache: PagedKV, dim: int, device: torch.device) -> None:
    check_paged(cache)
    if cache.layout.head_dim != dim:
        raise ValueError(f"q has {dim} channels, but the entries of the cache have {cache.layout.head_dim}")
    if cache.pages.device != device:
        raise ValueError(f"the pages must be on {device}, where q is; got {cache.pages.device}")


def _check_slots(name: str, slots: Tensor | History | None, cache: PagedKV, rows: int) -> None:
    if not isinstance(slots, Tensor):
        raise TypeError(f"{name} must be a tensor of slots; got {described(slots)}")
    check_tensor(name, slots, torch.int64, (rows, None), "rows, slots", cache.pages.device, strided=True)
    check_slots(name, slots, cache.slots)


def _check_history(history: History, cache: PagedKV, rows: int) -> None:
    device = cache.pages.device
    tables, request, end = history.block_tables, history.row_request, history.end
    check_tensor("block_tables", tables, torch.int32, (None, None), "requests, blocks", device, strided=True)
    check_tensor("row_request", request, torch.int32, (rows,), "rows", device, strided=True)
    check_tensor("end", end, torch.int32, (rows,), "rows", device, strided=True)
    check_whole("width", history.width, 0)
    check_rows(request, end, history.width)
    check_tables(tables, request, end, pages=cache.pages.shape[0], entries=cache.layout.entries)
