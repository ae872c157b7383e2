"""What a case cannot do without, in bytes and operations, and the least time that this takes on a device."""

from __future__ import annotations

from dataclasses import dataclass

from tetrad.bench.cases import Case, Op
from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.plan_indexer import LEAST_SLOTS

LOGIT_BYTES = 4
_WEIGHT_BYTES = 4
_CHOSEN_BYTES = 4
_ROW_BYTES = 8
"""The request and the visible end of a row."""
_SLOT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """``bytes`` that must be read or written, each once, and ``flops``, a multiplication and an addition being two."""

    bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes


def cost_of(case: Case) -> Cost:
    """What the case costs at least.

    plan     8 bytes a row in, 16 bytes a work item out (max(512, rows) units)
    score    keys with their scales once for each request, queries with scales and head weights, scores of what is
             visible;   2 * heads * channels operations for each visible (row, entry)
    topk     scores of what is visible, and k places of 4 bytes for each row; no operations are counted
    total    keys, queries and the chosen places: scores need not go through memory; operations as for score
    """
    shape, rows = case.shape, case.shape.total_rows
    chosen = rows * case.k * _CHOSEN_BYTES
    if case.op is Op.PLAN:
        return Cost(rows * _ROW_BYTES + max(LEAST_SLOTS, rows) * _SLOT_BYTES, 0)
    if case.op is Op.TOPK:
        return Cost(shape.scores * LOGIT_BYTES + chosen, 0)
    per_vector = vector_bytes(case.layout)
    read = shape.keys * per_vector + rows * case.heads * (per_vector + _WEIGHT_BYTES)
    written = shape.scores * LOGIT_BYTES if case.op is Op.SCORE else chosen
    return Cost(read + written, 2 * case.heads * case.head_dim * shape.scores)


def vector_bytes(layout: IndexLayout) -> int:
    """Bytes of one key, or of one head's query, with its scales."""
    return layout.data_row_bytes + layout.scale_row_bytes


@dataclass(frozen=True, slots=True)
class Rate:
    """``per_second`` bytes or operations, and ``what`` was measured."""

    per_second: float
    what: str


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The fastest that a device was seen to read, and to multiply matrices in ``fp8`` and in ``bf16``.

    Where there is no FP8, ``fp8`` is what ``bf16`` is, and on a CPU both are fp32.
    """

    read: Rate
    fp8: Rate
    bf16: Rate

    def matrix(self, dtype: IndexDtype | None) -> Rate:
        """The rate for keys of a dtype: FP4 and FP8 values can be multiplied in FP8, others need bf16."""
        return self.fp8 if dtype in (IndexDtype.FP4, IndexDtype.FP8) else self.bf16


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time, and which of "memory" and "matrix" takes it."""

    microseconds: float
    bound: str


def floor_of(case: Case, ceilings: Ceilings) -> Floor:
    """The larger of bytes / read rate and operations / matrix rate."""
    cost = cost_of(case)
    memory = cost.bytes / ceilings.read.per_second
    matrix = cost.flops / ceilings.matrix(case.dtype).per_second
    return Floor(1e6 * max(memory, matrix), "matrix" if matrix > memory else "memory")
