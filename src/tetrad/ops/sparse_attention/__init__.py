"""Attention of one query row over window keys and compressed keys, with one shared key-value head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tetrad.geometry import PagedKV
from tetrad.ops.sparse_attention import reference
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

    Source: the DeepSeek-V4 attention layer (shared key-value head, learned sinks).
    """
    return reference.sparse_attention(q, sinks, window, window_slots, compressed, compressed_slots, scale=scale)
