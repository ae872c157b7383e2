"""Score and choose, as an engine calls them, without ever holding more scores than a budget allows."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.errors import check_whole
from tetrad.ops.arguments import check_output
from tetrad.ops.indexer_logits import check_indexer_arguments, indexer_logits
from tetrad.ops.plan_indexer import IndexerPlan
from tetrad.ops.topk_indices import topk_indices
from tetrad.torch_settings import without_autocast

__all__ = ["DEFAULT_LOGITS_BUDGET", "index_topk", "rows_per_chunk"]

DEFAULT_LOGITS_BUDGET = 2048 << 20
"""Bytes of scores that are held at a time."""

_LOGIT_BYTES = 4
_ROW_STEP = 128


@without_autocast
def index_topk(
    q: Tensor,
    q_scale: Tensor | None,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    visible_end: Tensor,
    k: int,
    *,
    width: int,
    logits_budget_bytes: int = DEFAULT_LOGITS_BUDGET,
    plan: IndexerPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The k best index entries of every row: int32 [R, k], as ``topk_indices`` of ``indexer_logits`` gives them.

    Rows are scored in chunks, each with a buffer [rows of the chunk, width] of its own, so that the memory grows with
    the budget and not with the number of rows (:func:`rows_per_chunk`). A chunk scores all that its rows see, so the
    result is exact and does not depend on the budget. Where ``width`` is at most ``k`` every visible entry is chosen,
    in ascending order, and nothing is scored or read.

    Args:
        k: entries to choose, at least 1
        width: at least the largest visible end, a plain int; the columns of the scores
        logits_budget_bytes: bytes of scores held at a time; 0 is unlimited; there is always room for one row
        plan: a plan for these rows and this width. It is used where one chunk holds all rows; smaller chunks are left
            to the scorer to plan
        out: int32 [R, k] to write into; None allocates it

    Raises:
        ValueError: for a wrong shape, stride, device, width, k or budget, or a plan for other sizes
        TypeError: for a wrong type or dtype

    It can be captured into a CUDA graph after one call outside of the capture, which compiles its kernels: give it
    ``out`` and a ``plan`` that the graph makes anew (``plan_indexer(..., out=plan)``), and change tensors in place.

    The other arguments are those of :func:`tetrad.ops.indexer_logits`. :func:`tetrad.ops.physical_slots` turns the
    chosen entries into slots of the cache.
    """
    q, q_scale, cache, _ = check_indexer_arguments(
        q, q_scale, weights, cache, block_tables, row_request, visible_end, width=width, plan=plan, out=None
    )
    check_whole("k", k, 1)
    check_whole("logits_budget_bytes", logits_budget_bytes, 0)
    rows = q.shape[0]
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=q.device)
    else:
        check_output("out", out, torch.int32, rows, k, "rows, k", q.device)
    if width <= k:
        place = torch.arange(k, dtype=torch.int32, device=q.device)
        torch.where(place < visible_end.unsqueeze(1), place, torch.full_like(place, -1), out=out)
        return out
    chunk = rows_per_chunk(rows, width, logits_budget_bytes)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        logits = indexer_logits(
            q[part],
            None if q_scale is None else q_scale[part],
            weights[part],
            cache,
            block_tables,
            row_request[part],
            visible_end[part],
            width=width,
            plan=plan if chunk >= rows else None,
        )
        topk_indices(logits, visible_end[part], k, out=out[part])
        # the next chunk's scores must not lie beside these
        del logits
    return out


def rows_per_chunk(rows: int, width: int, budget_bytes: int) -> int:
    """Rows whose scores (fp32, ``width`` wide) are held at a time: at least 1.

    With n = budget // (4 * width): all rows if the budget is 0 or n covers them; else n rounded down to a multiple of
    128, or below 128 to a power of two, and never under one row.
    """
    fitting = budget_bytes // (width * _LOGIT_BYTES) if width else rows
    if not budget_bytes or fitting >= rows:
        return max(1, rows)
    if fitting >= _ROW_STEP:
        return fitting // _ROW_STEP * _ROW_STEP
    return 1 << (max(1, fitting).bit_length() - 1)
