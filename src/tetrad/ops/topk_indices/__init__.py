"""The k best entries of every row: exact, and the same on every run."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.errors import check_whole
from tetrad.ops.arguments import check_output, check_tensor
from tetrad.ops.backends import Problem, backend_module
from tetrad.ops.checked import check_rows
from tetrad.torch_settings import without_autocast

__all__ = ["topk_indices"]


@without_autocast
def topk_indices(logits: Tensor, visible_end: Tensor, k: int, *, out: Tensor | None = None) -> Tensor:
    """The columns of the k largest of ``logits[r, :visible_end[r]]``: int32 [R, k].

    The first min(visible_end, k) places of a row hold columns, in an order that depends only on the row's visible
    values and k; the others hold -1. (Every back end here gives ascending columns. Then attention sums the same keys in
    the same order as for a row that sees no more than k, for which nothing is scored.) Values are compared as real
    numbers, so -0.0 equals +0.0; -inf is an ordinary value; NaN ranks below -inf and one NaN equals another. Equal
    values go to the lowest columns. Columns from ``visible_end`` on may hold anything.

    Args:
        logits: fp32 [R, width], adjacent columns
        visible_end: int32 [R], at most ``width`` (the caller's duty: values are not looked at)
        k: how many, at least 1; it may exceed ``width``
        out: int32 [R, k] to write into; None allocates it

    Raises:
        ValueError: for a wrong shape, stride, device or k
        TypeError: for a wrong type or dtype
    """
    check_tensor("logits", logits, torch.float32, (None, None), "rows, width")
    rows, device = logits.shape[0], logits.device
    check_tensor("visible_end", visible_end, torch.int32, (rows,), "rows", device)
    check_whole("k", k, 1)
    check_rows(None, visible_end, logits.shape[1])
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=device)
    else:
        check_output("out", out, torch.int32, rows, k, "rows, k", device)
    backend_module("topk_indices", device, Problem()).topk_indices(logits, visible_end, k, out)
    return out
