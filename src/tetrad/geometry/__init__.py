"""Where everything lies: sizes (plain integers) and addresses (tensors), imported on first use.

The scheduler needs the sizes alone, and so no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tetrad.geometry.addresses import FP4_GROUP as FP4_GROUP
    from tetrad.geometry.addresses import KV_GROUP as KV_GROUP
    from tetrad.geometry.addresses import PAGE_ALIGNMENT as PAGE_ALIGNMENT
    from tetrad.geometry.addresses import SCALE_ALIGNMENT as SCALE_ALIGNMENT
    from tetrad.geometry.addresses import IndexDtype as IndexDtype
    from tetrad.geometry.addresses import IndexLayout as IndexLayout
    from tetrad.geometry.addresses import KVDtype as KVDtype
    from tetrad.geometry.addresses import KVLayout as KVLayout
    from tetrad.geometry.addresses import PagedIndex as PagedIndex
    from tetrad.geometry.addresses import PagedKV as PagedKV
    from tetrad.geometry.addresses import PageLayout as PageLayout
    from tetrad.geometry.addresses import check_layout as check_layout
    from tetrad.geometry.addresses import check_paged as check_paged
    from tetrad.geometry.addresses import data_rows as data_rows
    from tetrad.geometry.addresses import element_dtype as element_dtype
    from tetrad.geometry.addresses import entry_slots as entry_slots
    from tetrad.geometry.addresses import page_stride as page_stride
    from tetrad.geometry.addresses import ring_slots as ring_slots
    from tetrad.geometry.addresses import scale_rows as scale_rows
    from tetrad.geometry.addresses import split_slots as split_slots
    from tetrad.geometry.sizes import BLOCK_SIZE as BLOCK_SIZE
    from tetrad.geometry.sizes import CSA_ENTRIES as CSA_ENTRIES
    from tetrad.geometry.sizes import CSA_RATIO as CSA_RATIO
    from tetrad.geometry.sizes import DRAFT_ROWS as DRAFT_ROWS
    from tetrad.geometry.sizes import ROW_MULTIPLE as ROW_MULTIPLE
    from tetrad.geometry.sizes import blocks_for as blocks_for
    from tetrad.geometry.sizes import bucket_rows as bucket_rows
    from tetrad.geometry.sizes import ceil_div as ceil_div
    from tetrad.geometry.sizes import check_block_size as check_block_size
    from tetrad.geometry.sizes import compressor_ring as compressor_ring
    from tetrad.geometry.sizes import pooled_tokens as pooled_tokens
    from tetrad.geometry.sizes import width_blocks as width_blocks
    from tetrad.geometry.sizes import window_ring as window_ring

_SIZES = (
    "BLOCK_SIZE",
    "CSA_ENTRIES",
    "CSA_RATIO",
    "DRAFT_ROWS",
    "ROW_MULTIPLE",
    "blocks_for",
    "bucket_rows",
    "ceil_div",
    "check_block_size",
    "compressor_ring",
    "pooled_tokens",
    "width_blocks",
    "window_ring",
)
_ADDRESSES = (
    "FP4_GROUP",
    "IndexDtype",
    "IndexLayout",
    "KVDtype",
    "KVLayout",
    "KV_GROUP",
    "PAGE_ALIGNMENT",
    "PageLayout",
    "PagedIndex",
    "PagedKV",
    "SCALE_ALIGNMENT",
    "check_layout",
    "check_paged",
    "data_rows",
    "element_dtype",
    "entry_slots",
    "page_stride",
    "ring_slots",
    "scale_rows",
    "split_slots",
)
_HOMES = dict.fromkeys(_SIZES, "tetrad.geometry.sizes") | dict.fromkeys(_ADDRESSES, "tetrad.geometry.addresses")
__all__ = [*_SIZES, *_ADDRESSES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import the name's file on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tetrad.geometry' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
