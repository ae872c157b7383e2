"""Sparse attention in torch: gathers the keys of every row and sums them in fixed-size blocks, in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tetrad.geometry import PagedKV, entry_slots
from tetrad.ops.kv_entries import read_kv_entries
from tetrad.ops.row_invariant import batched_product, ordered_sum
from tetrad.ops.temporaries import temporary_bytes

if TYPE_CHECKING:
    from tetrad.ops.sparse_attention import History

_CHUNK_BYTES = 64 << 20
"""Bytes of gathered keys, scores, queries and sums that one chunk of rows may need on a CPU."""

_KEY_BLOCK = 64
"""Keys summed at once, or fewer where no row can ever have as many."""

_BLOCK_STEP = 8


def sparse_attention(
    q: Tensor,
    sinks: Tensor,
    window: PagedKV,
    window_slots: Tensor,
    compressed: PagedKV | None,
    compressed_slots: Tensor | History | None,
    *,
    scale: float,
) -> Tensor:
    """See ``tetrad.ops.sparse_attention.sparse_attention``.

    Online softmax over blocks of keys. A block of which a row sees nothing leaves that row's sums as they are, bit by
    bit, so the number of blocks that other rows need does not matter. The size of a block follows from the width of
    the slots alone.
    """
    keys: list[_Chosen | _All] = [_Chosen(window, window_slots, (window_slots >= 0).sum(1))]
    if compressed is not None and compressed_slots is not None:
        if isinstance(compressed_slots, Tensor):
            keys.append(_Chosen(compressed, compressed_slots, (compressed_slots >= 0).sum(1)))
        else:
            keys.append(_All(compressed, compressed_slots))
    _, heads, dim = q.shape
    out = torch.zeros_like(q)
    seeing = ordered_sum([part.count for part in keys]).nonzero().squeeze(1)
    if not len(seeing):
        return out
    widest = max(part.block for part in keys)
    chunk = max(8, temporary_bytes(q.device, _CHUNK_BYTES) // (4 * (widest * (dim + 3 * heads) + 3 * heads * dim)))
    for some in seeing.split(chunk):
        out[some] = _attend(q[some], sinks, [part.of(some) for part in keys], scale)
    return out


def _attend(q: Tensor, sinks: Tensor, parts: list[_Chosen | _All], scale: float) -> Tensor:
    query = q.float()
    largest = total = value = None
    for part in parts:
        # on the host: what no row of these sees is not even looked up
        for offset in range(0, int(part.count.max()), part.block):
            keys, seen = _read(part.cache, part.slots(offset), q.dtype)
            score = batched_product(query, keys.transpose(1, 2)) * scale
            score = score.masked_fill(~seen.unsqueeze(1), float("-inf"))
            block_largest = score.amax(-1, keepdim=True)
            new_largest = block_largest if largest is None else torch.maximum(largest, block_largest)
            # a row that has seen no key yet keeps -inf; exp(-inf - 0) is the 0 that it needs, -inf - -inf is not
            shift = new_largest.masked_fill(new_largest == float("-inf"), 0.0)
            weight = torch.exp(score - shift)
            block_total, block_value = weight.sum(-1, keepdim=True), batched_product(weight, keys)
            if largest is None or total is None or value is None:
                total, value = block_total, block_value
            else:
                rescale = torch.exp(largest - shift)
                total, value = total * rescale + block_total, value * rescale + block_value
            largest = new_largest
    assert largest is not None and total is not None and value is not None, "these rows see a key"
    sink = torch.exp(sinks.float().view(1, -1, 1) - largest)
    return (value / (total + sink)).to(q.dtype)


def _read(cache: PagedKV, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(keys fp32 [r, block, d], seen bool [r, block]) at ``slots``; where there is no slot the key is zero."""
    # every distinct slot is decoded once; what a row does not see may be unwritten and is neither read nor multiplied
    distinct, place = torch.unique(slots, return_inverse=True)
    return read_kv_entries(cache, distinct, dtype).float()[place], slots >= 0


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Keys by their slots, int64 [R, width], and how many a row has."""

    cache: PagedKV
    all_slots: Tensor
    count: Tensor

    @property
    def block(self) -> int:
        return min(_KEY_BLOCK, -(-max(self.all_slots.shape[1], 1) // _BLOCK_STEP) * _BLOCK_STEP)

    def of(self, rows: Tensor) -> _Chosen:
        return _Chosen(self.cache, self.all_slots[rows], self.count[rows])

    def slots(self, offset: int) -> Tensor:
        slots = self.all_slots[:, offset : offset + self.block]
        return torch.nn.functional.pad(slots, (0, self.block - slots.shape[1]), value=-1)


@dataclass(frozen=True, slots=True)
class _All:
    """All keys of a history."""

    cache: PagedKV
    history: History

    @property
    def block(self) -> int:
        return _KEY_BLOCK

    def of(self, rows: Tensor) -> _All:
        history = self.history
        some = type(history)(history.block_tables, history.row_request[rows], history.end[rows], history.width)
        return _All(self.cache, some)

    @property
    def count(self) -> Tensor:
        return self.history.end

    def slots(self, offset: int) -> Tensor:
        history = self.history
        entry = torch.arange(offset, offset + self.block, dtype=torch.int64, device=history.end.device)
        seen = entry < history.end.unsqueeze(1)
        entries = entry.where(seen, 0)
        request = history.row_request.clamp_min(0).unsqueeze(1)
        return entry_slots(history.block_tables, request, entries, self.cache.layout.entries).where(seen, -1)
