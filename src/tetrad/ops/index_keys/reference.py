"""Index keys and queries in torch. The arguments are checked by :mod:`tetrad.ops.index_keys`, which documents them.

Every function treats each row on its own: no result depends on what else is in the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats.hadamard import rotate
from tetrad.geometry import IndexLayout
from tetrad.ops.index_keys.encoding import decode, encode, from_rows, to_rows
from tetrad.ops.paged_rows import gather_rows, scatter_rows
from tetrad.ops.rotary import apply_rotary
from tetrad.ops.row_invariant import rms_norm


def index_key_vectors(
    pooled: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Cast, RMSNorm, RoPE, each rounded to ``dtype``."""
    return apply_rotary(rms_norm(pooled.to(dtype), norm_weight, eps), cos, sin)


def quantize_index_query(q: Tensor, cos: Tensor, sin: Tensor, layout: IndexLayout) -> tuple[Tensor, Tensor | None]:
    """RoPE and, if the layout says so, Hadamard, each rounded to the dtype of ``q``; then the layout's encoding."""
    q = apply_rotary(q, cos, sin)
    return encode(rotate(q) if layout.hadamard else q, layout.dtype)


def write_index_keys(keys: Tensor, pages: Tensor, slots: Tensor, layout: IndexLayout) -> None:
    """Rotate the keys if the layout says so, encode them, and scatter data and scales together."""
    keys = rotate(keys) if layout.hadamard else keys
    scatter_rows(*to_rows(*encode(keys, layout.dtype)), pages, slots, layout)


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
    """Make the keys that have a slot, then store them."""
    kept = (slots >= 0).nonzero().squeeze(1)
    if len(kept):
        keys = index_key_vectors(pooled[kept], norm_weight, eps, cos[kept], sin[kept], dtype)
        write_index_keys(keys, pages, slots[kept], layout)


def read_index_keys(pages: Tensor, slots: Tensor, layout: IndexLayout) -> Tensor:
    """Gather data and scales together and decode them."""
    return decode(*from_rows(*gather_rows(pages, slots, layout), layout))
