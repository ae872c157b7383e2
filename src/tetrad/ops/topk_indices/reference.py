"""Exact top-k in torch. The arguments are checked by :mod:`tetrad.ops.topk_indices`."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.ops.temporaries import temporary_bytes

_CHUNK_KEYS = 1 << 20
"""Sort keys of 8 bytes that are held at a time; bounds memory, changes no result."""

_LOW_BITS = (1 << 32) - 1
_MAGNITUDE_BITS = 0x7FFFFFFF
_BELOW_INFINITY = -(0x7F800000 + 2)
"""The place of NaN in the order of bits, right under minus infinity."""

_UNSEEN = -(1 << 63)
"""The key of what a row does not see; every other key is larger."""


def topk_indices(logits: Tensor, visible_end: Tensor, k: int, out: Tensor) -> None:
    """Fill ``out`` int32 [R, k], the chosen places in ascending order; see
    :func:`tetrad.ops.topk_indices.topk_indices`.

    Value and place are joined into one 64-bit integer that sorts by falling value, then rising place. So all keys of a
    row differ, and whatever algorithm picks the k largest picks the same ones.
    """
    rows, width = logits.shape
    picked = min(k, width)
    out[:, picked:].fill_(-1)
    if not picked:
        return
    chunk = max(1, temporary_bytes(logits.device, 8 * _CHUNK_KEYS) // (8 * width))
    column = torch.arange(width, dtype=torch.int64, device=logits.device)
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        keys = _ordered_bits(logits[part]).bitwise_left_shift_(32).bitwise_or_(_LOW_BITS - column)
        keys.masked_fill_(column >= visible_end[part].unsqueeze(1), _UNSEEN)
        largest = keys.topk(picked, dim=1, sorted=False).values
        place = (_LOW_BITS - (largest & _LOW_BITS)).masked_fill_(largest == _UNSEEN, width).sort(dim=1).values
        out[part, :picked] = place.masked_fill_(place == width, -1).int()


def _ordered_bits(logits: Tensor) -> Tensor:
    """int64 in the order of the values: NaN, -inf, ..., 0, ..., inf."""
    # adding 0 makes one zero of two
    bits = (logits + 0.0).view(torch.int32)
    bits ^= (bits >> 31) & _MAGNITUDE_BITS
    return bits.masked_fill_(logits.isnan(), _BELOW_INFINITY).long()
