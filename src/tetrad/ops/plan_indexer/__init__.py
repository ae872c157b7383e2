"""The schedule of the indexer's scorer: rows of very different lengths, cut into work items of nearly equal size."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from tetrad.errors import check_whole
from tetrad.ops.arguments import check_tensor
from tetrad.ops.backends import Problem, backend_module
from tetrad.ops.checked import check_rows
from tetrad.ops.plan_indexer.plan import BLOCK, LEAST_SLOTS, IndexerPlan
from tetrad.torch_settings import without_autocast

__all__ = ["BLOCK", "LEAST_SLOTS", "IndexerPlan", "plan_indexer"]


@without_autocast
def plan_indexer(
    row_request: Tensor, visible_end: Tensor, *, width: int, out: IndexerPlan | Tensor | None = None
) -> IndexerPlan:
    """Cut every row's visible entries into work items, as few blocks to a unit as fit into the plan's slots.

        blocks[r] = ceil(visible_end[r] / 256)      s = the least s in 1.. with SUM_r ceil(blocks[r] / s) <= slots

    Row r gets ceil(blocks[r] / s) units of s blocks, its last one what is left; rows follow each other in order.
    Padding rows and rows that see nothing get none. Every visible block is in exactly one unit, and a plan has at
    least as many slots as rows, so that none is ever dropped. Nothing is synchronised. A step that is captured into a
    CUDA graph makes its plan inside of the graph, with the plan of an earlier call as ``out``: a plan of other visible
    ends leaves entries out.

    Args:
        row_request: int32 [R], the request of each row, -1 for padding
        visible_end: int32 [R], the entries that each row sees. None may exceed ``width``, which is the caller's duty:
            values are not looked at
        width: columns of the scores, a plain int
        out: a plan for the same sizes, or an int32 buffer [slots, 4] with slots >= R, to be filled at the same address.
            None: a new buffer with max(512, R) slots. Where the back end's scorer has a schedule of its own, only an
            ``out`` that is a plan keeps that one's address too

    Returns:
        the plan; ``out`` itself if it was one

    Raises:
        ValueError: for a wrong shape, stride, device or width, an ``out`` of other sizes, or one with a schedule of
            another back end, which would keep what it was made for
        TypeError: for a wrong type or dtype
    """
    check_tensor("row_request", row_request, torch.int32, (None,), "rows")
    rows, device = row_request.shape[0], row_request.device
    check_tensor("visible_end", visible_end, torch.int32, (rows,), "rows", device)
    check_whole("width", width, 0)
    check_rows(row_request, visible_end, width)
    if out is None:
        out = torch.empty((max(LEAST_SLOTS, rows), 4), dtype=torch.int32, device=device)
    backend = backend_module("plan_indexer", device, Problem())
    if isinstance(out, IndexerPlan):
        out.check(rows, width)
        if out.schedule is not None and out.schedule_of != getattr(backend, "SCHEDULE_OF", ""):
            raise ValueError(
                f"out has a schedule of the back end {out.schedule_of!r}, which is not the one that makes plans here, "
                f"so the schedule would stay as it is; call plan_indexer with out.buffer, or without out"
            )
        plan = out
        check_tensor("out", plan.buffer, torch.int32, (None, 4), "slots, 4", device, contiguous=True)
    else:
        check_tensor("out", out, torch.int32, (None, 4), "slots, 4", device, contiguous=True)
        plan = _new_plan(backend, out, rows, width)
    if plan.slots < rows:
        raise ValueError(f"out must have a slot for every row, so at least {rows}; got {plan.slots}")
    schedule = {} if plan.schedule is None else {"schedule": plan.schedule}
    backend.plan_indexer(row_request, visible_end, plan.buffer, width=width, **schedule)
    return plan


def _new_plan(backend: ModuleType, buffer: Tensor, rows: int, width: int) -> IndexerPlan:
    if not hasattr(backend, "new_schedule"):
        return IndexerPlan(buffer, rows, width)
    schedule = backend.new_schedule(rows, buffer.device)
    return IndexerPlan(buffer, rows, width, schedule=schedule, schedule_of=backend.SCHEDULE_OF)
