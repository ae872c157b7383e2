"""Entries to slots in torch. The arguments are checked by :mod:`tetrad.ops.physical_slots`."""

from __future__ import annotations

from torch import Tensor


def physical_slots(entries: Tensor, block_tables: Tensor, row_request: Tensor, page_entries: int, out: Tensor) -> None:
    """Fill ``out`` int32 [R, k]; see :func:`tetrad.ops.physical_slots.physical_slots`."""
    if not block_tables.numel():
        # no page: nothing but -1 can be asked for
        out.fill_(-1)
        return
    none = (entries < 0) | (row_request < 0).unsqueeze(1)
    entry = entries.masked_fill(none, 0)
    tables = block_tables[row_request.clamp_min(0).long()]
    page = tables.gather(1, (entry // page_entries).long())
    out.copy_((page * page_entries + entry % page_entries).masked_fill_(none, -1))
