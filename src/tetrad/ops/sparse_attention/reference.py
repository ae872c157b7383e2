"""Sparse attention in torch: gathers the keys of every row and sums them in fixed-size blocks, in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tetrad.geometry import entry_slots
from tetrad.ops.kv_entries import read_kv_entries
from tetrad.ops.row_invariant import batched_product
from tetrad.ops.temporaries import temporary_bytes

if TYPE_CHECKING:
    from tetrad.ops.sparse_attention import KeySegment

_CHUNK_BYTES = 64 << 20
"""Bytes of gathered keys, scores, queries and sums that one chunk of rows may need on a CPU."""


def sparse_attention(
    q: Tensor, sinks: Tensor, segments: list[KeySegment], row_request: Tensor, *, scale: float
) -> Tensor:
    """See ``tetrad.ops.sparse_attention.sparse_attention``.

    Online softmax over blocks of keys. A block of which a row sees nothing leaves that row's sums as they are, bit by
    bit, so the number of blocks that other rows need does not matter.
    """
    rows, heads, dim = q.shape
    widest = max((segment.block for segment in segments), default=1)
    chunk = max(8, temporary_bytes(q.device, _CHUNK_BYTES) // (4 * (widest * (dim + 3 * heads) + 3 * heads * dim)))
    parts = [
        _attend(q[i : i + chunk], sinks, segments, row_request[i : i + chunk], slice(i, i + chunk), scale)
        for i in range(0, rows, chunk)
    ]
    return torch.cat(parts) if parts else torch.empty_like(q)


def _attend(q: Tensor, sinks: Tensor, segments: list[KeySegment], request: Tensor, rows: slice, scale: float) -> Tensor:
    query = q.float()
    count, heads, dim = query.shape
    largest = query.new_full((count, heads, 1), float("-inf"))
    total = query.new_zeros((count, heads, 1))
    value = query.new_zeros((count, heads, dim))
    for segment in segments:
        for offset in range(0, segment.width, segment.block):
            keys, seen = _keys(segment, offset, request, rows, q.dtype)
            score = batched_product(query, keys.transpose(1, 2)) * scale
            score = score.masked_fill(~seen.unsqueeze(1), float("-inf"))
            new_largest = torch.maximum(largest, score.amax(-1, keepdim=True))
            # a row that has seen no key yet keeps -inf; exp(-inf - 0) is the 0 that it needs, -inf - -inf is not
            shift = new_largest.masked_fill(new_largest == float("-inf"), 0.0)
            weight = torch.exp(score - shift)
            rescale = torch.exp(largest - shift)
            total = total * rescale + weight.sum(-1, keepdim=True)
            value = value * rescale + batched_product(weight, keys)
            largest = new_largest
    sink = torch.exp(sinks.float().view(1, heads, 1) - largest)
    return (value / (total + sink)).to(q.dtype)


def _keys(segment: KeySegment, offset: int, request: Tensor, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(keys fp32 [r, block, d], seen bool [r, block]) of one block; keys that a row does not see are zero."""
    if segment.entries is not None:
        entry = segment.entries[rows, offset : offset + segment.block].long()
        if entry.shape[1] < segment.block:
            entry = torch.nn.functional.pad(entry, (0, segment.block - entry.shape[1]), value=-1)
        seen = entry >= 0
    else:
        assert segment.start is not None and segment.end is not None
        place = torch.arange(offset, offset + segment.block, dtype=torch.int64, device=request.device)
        entry = segment.start[rows].long().unsqueeze(1) + place
        seen = entry < segment.end[rows].long().unsqueeze(1)
    slots = entry_slots(segment.tables, request.unsqueeze(1), entry.where(seen, 0), segment.layout.entries)
    # what a row does not see may be stale or unwritten: it is neither read nor multiplied
    slots = slots.masked_fill(~seen, -1)
    distinct, place_of = torch.unique(slots, return_inverse=True)
    table = read_kv_entries(segment.pages, distinct.clamp_min(0), segment.layout, dtype).float()
    table = table.masked_fill((distinct < 0).unsqueeze(1), 0.0)
    return table[place_of], seen
