"""Index keys and queries in torch. The arguments are checked by :mod:`tetrad.ops.index_keys`, which documents them.

Every function treats each row on its own: no result depends on what else is in the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats.hadamard import rotate
from tetrad.geometry import IndexDtype, IndexLayout
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
    *,
    hadamard: bool = True,
) -> Tensor:
    """Cast, RMSNorm, RoPE, Hadamard, each rounded to ``dtype``."""
    keys = apply_rotary(rms_norm(pooled.to(dtype), norm_weight, eps), cos, sin)
    return rotate(keys) if hadamard else keys


def quantize_index_query(
    q: Tensor, cos: Tensor, sin: Tensor, index_dtype: IndexDtype, *, hadamard: bool = True
) -> tuple[Tensor, Tensor | None]:
    """RoPE and Hadamard, each rounded to the dtype of ``q``, then the encoding of ``index_dtype``."""
    q = apply_rotary(q, cos, sin)
    return encode(rotate(q) if hadamard else q, index_dtype)


def write_index_keys(keys: Tensor, pages: Tensor, slots: Tensor, layout: IndexLayout) -> None:
    """Encode the keys and scatter data and scales together."""
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
    *,
    hadamard: bool = True,
) -> None:
    """Make the keys that have a slot, then store them."""
    kept = (slots >= 0).nonzero().squeeze(1)
    if len(kept):
        keys = index_key_vectors(pooled[kept], norm_weight, eps, cos[kept], sin[kept], dtype, hadamard=hadamard)
        write_index_keys(keys, pages, slots[kept], layout)


def read_index_keys(pages: Tensor, slots: Tensor, layout: IndexLayout) -> Tensor:
    """Gather data and scales together and decode them."""
    return decode(*from_rows(*gather_rows(pages, slots, layout), layout))
