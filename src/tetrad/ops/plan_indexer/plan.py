"""The indexer's schedule as a value that its consumer can check."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.errors import check_whole
from tetrad.formats.arguments import described
from tetrad.ops.arguments import check_tensor

BLOCK = 256
"""Entries that a scorer handles at a time: four pages."""

LEAST_SLOTS = 512
"""Slots of a plan at least, so that one long row among few is still split over a whole device."""


@dataclass(frozen=True, slots=True)
class IndexerPlan:
    """Which part of which row each work item scores.

    ``buffer`` is int32 [slots, 4], one work item a slot: (row, first block, blocks, visible end), counted in blocks of
    ``block`` entries. An unused slot is (-1, 0, 0, 0). It keeps its address when the plan is made anew into it. A plan
    serves exactly ``rows`` rows of scores that are ``width`` wide.

    ``schedule`` is what a back end adds for its own scorer, of fixed address too, and ``schedule_of`` that back end's
    name; None and "" where there is none. A scorer asks :meth:`schedule_for` for it, and does without where the plan is
    another back end's. :mod:`tetrad.ops.plan_indexer.sm90` and :mod:`tetrad.ops.plan_indexer.triton` say what theirs
    hold.
    """

    buffer: Tensor
    rows: int
    width: int
    block: int = BLOCK
    schedule: Tensor | None = None
    schedule_of: str = ""

    def __post_init__(self) -> None:
        check_tensor("buffer", self.buffer, torch.int32, (None, 4), "slots, 4")
        for name, least in (("rows", 0), ("width", 0), ("block", 1)):
            check_whole(name, getattr(self, name), least)
        if self.schedule is not None:
            check_tensor("schedule", self.schedule, torch.int32, None, "any shape")
        if not isinstance(self.schedule_of, str):
            raise TypeError(f"schedule_of must be the name of a back end; got {described(self.schedule_of)}")

    @property
    def slots(self) -> int:
        """Work items that the plan has room for, used or not: a kernel's grid."""
        return self.buffer.shape[0]

    def schedule_for(self, backend: str) -> Tensor | None:
        """The schedule that this back end made for its own scorer, or None if it made none."""
        return self.schedule if self.schedule_of == backend else None

    def check(self, rows: int, width: int) -> None:
        """Refuse to serve other sizes than those it was made for.

        Raises:
            ValueError: if it was made for other sizes
        """
        if (self.rows, self.width, self.block) != (rows, width, BLOCK):
            raise ValueError(
                f"the plan was made for {self.rows} rows, width {self.width} and blocks of {self.block}, but the "
                f"scores have {rows} rows, width {width} and blocks of {BLOCK}; call plan_indexer for these"
            )
