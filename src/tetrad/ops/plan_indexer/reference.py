"""The indexer's schedule in torch, without a synchronisation: every step is a tensor, every shape known beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.geometry import ceil_div
from tetrad.ops.plan_indexer.plan import BLOCK


def plan_indexer(row_request: Tensor, visible_end: Tensor, buffer: Tensor, *, width: int) -> None:
    """Fill ``buffer`` int32 [slots, 4]; see :func:`tetrad.ops.plan_indexer.plan_indexer`."""
    rows, slots = row_request.shape[0], buffer.shape[0]
    if rows == 0:
        buffer.zero_()
        buffer[:, 0] = -1
        return
    ends = visible_end.long().masked_fill(row_request < 0, 0)
    blocks = (ends + (BLOCK - 1)) // BLOCK

    # the fewest blocks per work item with which all rows fit. One unit a row always fits, so the upper bound is
    # feasible
    low = blocks.new_ones(())
    high = low * max(1, ceil_div(width, BLOCK))
    for _ in range(max(1, ceil_div(width, BLOCK)).bit_length()):
        middle = (low + high) // 2
        fits = ((blocks + middle - 1) // middle).sum() <= slots
        low, high = torch.where(fits, low, torch.minimum(middle + 1, high)), torch.where(fits, middle, high)
    per_unit = high

    units = (blocks + per_unit - 1) // per_unit
    behind = units.cumsum(0)
    slot = torch.arange(slots, dtype=torch.int64, device=buffer.device)
    row = torch.searchsorted(behind, slot, right=True)
    used = row < rows
    row = row.clamp_max(rows - 1)
    first = (slot - (behind - units)[row]) * per_unit
    count = torch.minimum(blocks[row] - first, per_unit)
    plan = torch.stack((row, first, count, ends[row]), dim=1).masked_fill_(~used.unsqueeze(1), 0)
    plan[:, 0].masked_fill_(~used, -1)
    buffer.copy_(plan)
