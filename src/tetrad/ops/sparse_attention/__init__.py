"""Attention of one query row over window keys and chosen compressed keys, with one shared key-value head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tetrad.geometry import KVLayout
from tetrad.ops.sparse_attention import reference
from tetrad.torch_settings import without_autocast

__all__ = ["KeySegment", "sparse_attention"]


@dataclass(frozen=True, slots=True)
class KeySegment:
    """Some of the keys that every row attends to, all from one cache.

    Row r sees the entries ``start[r] <= e < end[r]`` of its request, or, where ``entries`` is given, the entries
    ``entries[r]`` (-1 is none). At most ``width`` of them, a plain int. They are summed in blocks of ``block``.

    pages: uint8 [pages, stride]; tables: int32 [requests, blocks]; start, end: int [R]; entries: int32 [R, width].
    """

    pages: Tensor
    layout: KVLayout
    tables: Tensor
    width: int
    block: int
    start: Tensor | None = None
    end: Tensor | None = None
    entries: Tensor | None = None


@without_autocast
def sparse_attention(
    q: Tensor, sinks: Tensor, segments: list[KeySegment], row_request: Tensor, *, scale: float
) -> Tensor:
    """o[r, h] = sum_t p[r, h, t] kv_t,  p = e^(s - M) / (sum_t e^(s - M) + e^(sink_h - M)),  s = scale <q[r, h], kv_t>.

    The keys of a row are the union of its segments, without removal of duplicates; the same vector is key and value.
    The sink takes part in the denominator only. Computed in fp32 from the stored, dequantised keys.

    q: [R, H, d] in the compute dtype; sinks: fp32 [H]; row_request: int [R], all >= 0. Every row must see at least
    one key. Returns [R, H, d] in the dtype of ``q``. Source: the DeepSeek-V4 attention layer (shared key-value head,
    learned sinks); ``docs/architecture.md`` names the caches.
    """
    return reference.sparse_attention(q, sinks, segments, row_request, scale=scale)
