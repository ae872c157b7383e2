"""Whether a result is right, before its time means anything: some rows against fp64 on the dequantised values.

The oracle reads pages by the formulas of :mod:`tetrad.geometry` and decodes with :mod:`tetrad.formats`; it shares no
code with the ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.bench.cases import Op
from tetrad.bench.inputs import InputSet
from tetrad.formats import mxfp4
from tetrad.geometry import IndexDtype, IndexLayout, ceil_div, data_rows, scale_rows

LARGEST_DIFFERENCE = 5e-6
"""Of scores: 1 - 2<x, y> / (<x, x> + <y, y>) must be below this."""

SCORE_GAPS = {IndexDtype.FP4: 1e-4, IndexDtype.FP8: 1e-3, IndexDtype.BF16: 1e-5, IndexDtype.FP32: 1e-5}
"""Scores that differ by less than this, as a share of the row's largest magnitude, may change places in a total.

FP8 tensor cores, which also multiply FP4 where there are no others, keep some 14 bits below the largest term of a
product: a score is off by 1.5e-5 on average and 3e-4 at most. The random codes of an FP8 case have terms of very
different sizes. A top-k of its own has no such excuse: it must be exact.
"""

_ROWS = 8
_ENTRIES_AT_ONCE = 16384


class Oracle:
    """The right answers for some rows of a set of inputs: the first, the last, and others evenly between."""

    def __init__(self, inputs: InputSet) -> None:
        self._inputs = inputs
        total = inputs.case.shape.total_rows
        self.rows = sorted({round(place * (total - 1) / (_ROWS - 1)) for place in range(_ROWS)})
        self._ends = inputs.visible_end.tolist()
        self._scores: list[Tensor] | None = None

    @property
    def scores(self) -> list[Tensor]:
        """fp64 scores of what each of the rows sees; a top-k of its own has them as its input."""
        if self._scores is None:
            if self._inputs.case.op is Op.TOPK:
                self._scores = [self._inputs.logits[row, : self._ends[row]].double() for row in self.rows]
            else:
                self._scores = [exact_scores(self._inputs, row, self._ends[row]) for row in self.rows]
        return self._scores

    def fault(self, result: Any) -> str | None:
        """What is wrong with a result of the case's op, or None. A plan that only its own scorer knows passes."""
        op = self._inputs.case.op
        if result is None:
            return "there is no result: the call returned None"
        if op is Op.PLAN:
            return plan_fault(result, self._inputs) if can_check_plan(result) else None
        if op is Op.SCORE:
            return self._score_fault(result)
        return self._choice_fault(result)

    def _score_fault(self, scores: Any) -> str | None:
        case = self._inputs.case
        wrong = _shape_fault(scores, (case.shape.total_rows, case.shape.entries), torch.float32)
        if wrong:
            return wrong
        for row, wanted in zip(self.rows, self.scores, strict=True):
            difference = difference_of(scores[row, : wanted.numel()].double(), wanted)
            # written so that NaN is wrong
            if not difference < LARGEST_DIFFERENCE:
                return f"scores of row {row} differ from fp64 by {difference:.1e}, allowed {LARGEST_DIFFERENCE:.0e}"
        return None

    def _choice_fault(self, chosen: Any) -> str | None:
        case = self._inputs.case
        wrong = _shape_fault(chosen, (case.shape.total_rows, case.k), torch.int32)
        if wrong:
            return wrong
        allowed = SCORE_GAPS[case.layout.dtype] if case.op is Op.TOTAL else 0.0
        for row, scores in zip(self.rows, self.scores, strict=True):
            fault = choice_fault(chosen[row], scores, allowed)
            if fault:
                return f"row {row}: {fault}"
        return None


def _shape_fault(result: Any, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    if not isinstance(result, Tensor):
        return f"the result is a {type(result).__name__}, not a tensor"
    if tuple(result.shape) != shape or result.dtype != dtype:
        return f"the result is {result.dtype} {list(result.shape)}, not {dtype} {list(shape)}"
    return None


def exact_scores(inputs: InputSet, row: int, end: int) -> Tensor:
    """fp64 [end]: SUM_h weights[h] * relu(<q[h], k[j]>) of a row, from the bytes of its query and keys."""
    layout = inputs.case.layout
    q_scale = None if inputs.q_scale is None else inputs.q_scale[row]
    if layout.dtype is IndexDtype.FP8 and q_scale is not None:
        q_scale = q_scale.unsqueeze(-1).view(torch.uint8)
    query = _decoded(inputs.q[row].view(torch.uint8), q_scale, layout)
    weights = inputs.weights[row].double()
    pages = inputs.block_tables[int(inputs.row_request[row]), : ceil_div(end, layout.entries)].long()
    parts = []
    for some in pages.split(_ENTRIES_AT_ONCE // layout.entries):
        bytes_of_pages = inputs.cache[some]
        data = data_rows(bytes_of_pages, layout).flatten(0, 1)
        scales = scale_rows(bytes_of_pages, layout).flatten(0, 1) if layout.scale_row_bytes else None
        dots = query @ _decoded(data, scales, layout).T
        parts.append(weights @ dots.relu_())
    return torch.cat(parts)[:end]


def _decoded(data: Tensor, scales: Tensor | None, layout: IndexLayout) -> Tensor:
    """fp64 [..., D] of vectors' bytes [..., B] and scale bytes [..., S]."""
    data = data.contiguous()
    if scales is None:
        return data.view(torch.bfloat16 if layout.dtype is IndexDtype.BF16 else torch.float32).double()
    if layout.dtype is IndexDtype.FP4:
        return mxfp4.dequantize(data, scales.contiguous(), torch.float64)
    # by way of fp32, which every device converts from FP8
    return data.view(torch.float8_e4m3fn).float().double() * scales.contiguous().view(torch.float32).double()


def difference_of(x: Tensor, y: Tensor) -> float:
    """1 - 2<x, y> / (<x, x> + <y, y>) of two fp64 vectors: 0 where they are equal, also where both are zero."""
    # rounding may leave it a little below 0
    scale = float(torch.maximum(x.abs().max(), y.abs().max()))
    if scale == 0:
        return 0.0
    x, y = x / scale, y / scale
    return float(1 - 2 * (x @ y) / (x @ x + y @ y))


def choice_fault(chosen: Tensor, scores: Tensor, allowed_gap: float) -> str | None:
    """What is wrong with a row's chosen places, int32 [k], given the fp64 scores of what it sees.

    Right are min(k, visible) different places in ascending order, then -1. They are the best ones, but for places
    whose scores are within ``allowed_gap`` of the worst of the best, as a share of the largest magnitude.
    """
    count = min(chosen.numel(), scores.numel())
    places = chosen[:count].long()
    if bool((chosen[count:] != -1).any()):
        return f"behind the {count} chosen places stands something else than -1"
    if bool((places < 0).any()) or bool((places >= scores.numel()).any()):
        return f"a place is not among the {scores.numel()} that the row sees"
    if bool((places[1:] <= places[:-1]).any()):
        return "the places are not ascending, or one is there twice"
    least = scores.topk(count).values[-1]
    gap = allowed_gap * scores.abs().max()
    taken = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    taken[places] = True
    missed = int(((scores > least + gap) & ~taken).sum())
    worse = int(((scores < least - gap) & taken).sum())
    if missed or worse:
        return f"{missed} of the best {count} places are missing, {worse} worse ones were taken"
    return None


def can_check_plan(plan: Any) -> bool:
    """Whether a plan says what it schedules; otherwise only the scores that are computed with it can show a hole."""
    return isinstance(getattr(plan, "buffer", None), Tensor) and isinstance(getattr(plan, "block", None), int)


def plan_fault(plan: Any, inputs: InputSet) -> str | None:
    """What is wrong with a plan: every visible block of every row must be in exactly one work item."""
    units = plan.buffer.cpu().long()
    units = units[units[:, 0] >= 0]
    ends = inputs.visible_end.cpu().long()
    row, first, count, end = units.unbind(1)
    if bool((row >= ends.numel()).any()) or bool((end != ends[row.clamp_max(ends.numel() - 1)]).any()):
        return "a work item names a row that is not there, or another visible end than the row's"
    blocks = (ends + plan.block - 1) // plan.block
    if bool((first < 0).any()) or bool((count < 1).any()) or bool((first + count > blocks[row]).any()):
        return "a work item has no blocks, or blocks that its row does not see"
    start = (blocks.cumsum(0) - blocks)[row] + first
    times = torch.zeros(int(blocks.sum()) + 1, dtype=torch.int64, device="cpu")
    times.index_add_(0, start, torch.ones_like(start))
    times.index_add_(0, start + count, -torch.ones_like(start))
    times = times.cumsum(0)[:-1]
    missing, double = int((times == 0).sum()), int((times > 1).sum())
    if missing or double:
        return f"{missing} visible blocks are in no work item, {double} in several"
    return None


def poison(inputs: InputSet) -> None:
    """Make the outputs such that what is not written is wrong."""
    op = inputs.case.op
    if op in (Op.SCORE, Op.TOTAL):
        inputs.logits.fill_(float("nan"))
    if op in (Op.TOPK, Op.TOTAL):
        inputs.chosen.fill_(-2)
