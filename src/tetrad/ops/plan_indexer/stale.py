"""Whether a plan still is the plan of the rows that it is used for."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.ops.checked import looks_at_values
from tetrad.ops.plan_indexer import reference
from tetrad.ops.plan_indexer.plan import IndexerPlan


def check_plan(plan: IndexerPlan, row_request: Tensor, visible_end: Tensor) -> None:
    """Refuse a plan whose work items are not those of these rows; only inside of :func:`tetrad.ops.checked`.

    Raises:
        ValueError: with the first slot that differs
    """
    if not looks_at_values(visible_end):
        return
    wanted = torch.empty(plan.buffer.shape, dtype=torch.int32, device=plan.buffer.device)
    reference.plan_indexer(row_request, visible_end, wanted, width=plan.width)
    wrong = (plan.buffer != wanted).any(1).nonzero()
    if wrong.numel():
        slot = int(wrong[0])
        raise ValueError(
            f"the plan is not of these rows: slot {slot} is {plan.buffer[slot].tolist()} and should be "
            f"{wanted[slot].tolist()}; call plan_indexer(..., out=plan) whenever row_request or visible_end change"
        )
