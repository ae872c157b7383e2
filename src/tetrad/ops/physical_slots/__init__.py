"""From entries of a request to slots of a paged cache: what attention kernels with a table of their own want."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.errors import check_whole
from tetrad.geometry import CSA_ENTRIES
from tetrad.ops.arguments import check_output, check_tensor
from tetrad.ops.checked import check_entries
from tetrad.ops.physical_slots import reference

__all__ = ["physical_slots"]


def physical_slots(
    entries: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    *,
    page_entries: int = CSA_ENTRIES,
    out: Tensor | None = None,
) -> Tensor:
    """Where the entries of every row lie: int32 [R, k], as FlashMLA's sparse kernels take their ``indices``.

        slot = block_tables[row_request[r], e // E] * E + e % E      for e = entries[r, i] and E = page_entries

    An entry of -1 stays -1, and a row of padding (request -1) is -1 throughout. Nothing is synchronised, and every step
    is a tensor, so it can be captured into a CUDA graph.

    Args:
        entries: int32 [R, k], entries of each row's request, -1 for none: what :func:`tetrad.ops.index_topk` gives
        block_tables: int32 [requests, blocks] of the cache that is read; index keys and CSA entries share one
        row_request: int32 [R], -1 for padding
        page_entries: entries of a page, at least 1: 64 for index keys and CSA entries
        out: int32 [R, k] to write into, which may be ``entries`` itself; None allocates it

    Raises:
        ValueError: for a wrong shape, stride, device or number. Inside of :func:`tetrad.ops.checked` also for an entry
            or a request that is not in the table; elsewhere that is the caller's duty
        TypeError: for a wrong type or dtype

    Slots are int32: page ids must stay below 2^31 / ``page_entries``.
    """
    check_tensor("entries", entries, torch.int32, (None, None), "rows, k")
    rows, k = entries.shape
    check_tensor("block_tables", block_tables, torch.int32, (None, None), "requests, blocks", entries.device)
    check_tensor("row_request", row_request, torch.int32, (rows,), "rows", entries.device)
    check_whole("page_entries", page_entries, 1)
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=entries.device)
    else:
        check_output("out", out, torch.int32, rows, k, "rows, k", entries.device)
    check_entries(entries, block_tables, row_request, page_entries)
    reference.physical_slots(entries, block_tables, row_request, page_entries, out)
    return out
