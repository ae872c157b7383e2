"""Main KV entries in torch. The arguments are checked by :mod:`tetrad.ops.kv_entries`, which documents them.

Every row is treated on its own: no result depends on what else is in the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats import fp8
from tetrad.geometry import KV_GROUP, KVDtype, KVLayout, element_dtype
from tetrad.ops.paged_rows import gather_rows, scatter_rows


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
