"""Main KV entries in torch. The arguments are checked by :mod:`tetrad.ops.kv_entries`, which documents them.

Every row is treated on its own: no result depends on what else is in the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats import fp8
from tetrad.geometry import KV_GROUP, KVDtype, KVLayout, element_dtype
from tetrad.ops.paged_rows import gather_rows, scatter_rows
from tetrad.ops.rotary import apply_rotary
from tetrad.ops.row_invariant import rms_norm


def write_kv_entries(values: Tensor, pages: Tensor, slots: Tensor, layout: KVLayout) -> None:
    """Encode the entries and scatter data and scales together."""
    if layout.dtype is not KVDtype.FP8:
        data = values.to(element_dtype(layout)).contiguous().view(torch.uint8)
        scatter_rows(data, None, pages, slots, layout)
        return
    nope, scales = fp8.quantize_groups(values[:, : layout.nope_dim], KV_GROUP)
    rope = values[:, layout.nope_dim :].to(layout.rope_dtype).contiguous()
    data = torch.cat((nope.contiguous().view(torch.uint8), rope.view(torch.uint8)), dim=-1)
    padded = torch.nn.functional.pad(scales, (0, layout.scale_row_bytes - layout.scale_groups))
    scatter_rows(data, padded, pages, slots, layout)


def write_pooled_kv_entries(
    pooled: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    pages: Tensor,
    slots: Tensor,
    layout: KVLayout,
) -> None:
    """Cast, RMSNorm and RoPE, each rounded to ``dtype``, of the entries that have a slot; then store them."""
    kept = (slots >= 0).nonzero().squeeze(1)
    if not len(kept):
        return
    entries = apply_rotary(rms_norm(pooled[kept].to(dtype), norm_weight, eps), cos[kept], sin[kept])
    write_kv_entries(entries, pages, slots[kept], layout)


def copy_kv_entries(pages: Tensor, sources: Tensor, targets: Tensor, layout: KVLayout) -> None:
    """Gather data and scales together and scatter them together."""
    kept = (sources >= 0).nonzero().squeeze(1)
    if not len(kept):
        return
    data, scales = gather_rows(pages, sources[kept], layout)
    scatter_rows(data, scales, pages, targets[kept], layout)


def read_kv_entries(pages: Tensor, slots: Tensor, layout: KVLayout, dtype: torch.dtype) -> Tensor:
    """Gather data and scales together and decode them."""
    data, scales = gather_rows(pages, slots, layout)
    if layout.dtype is not KVDtype.FP8:
        return data.view(element_dtype(layout)).to(dtype)
    # without rope-free channels there are no scales either
    scales = data[..., :0] if scales is None else scales[..., : layout.scale_groups]
    nope = fp8.dequantize_groups(data[..., : layout.nope_dim].view(torch.float8_e4m3fn), scales, KV_GROUP, dtype)
    # a fresh copy: inside the row these bytes need not lie where the wider dtype may be read
    rope = data[..., layout.nope_dim :].clone(memory_format=torch.contiguous_format).view(layout.rope_dtype)
    return torch.cat((nope, rope.to(dtype)), dim=-1)
