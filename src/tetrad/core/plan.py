"""A step as one plain record: what the scheduler decides and the runner carries out. It can be pickled and sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tetrad.core.messages import Sampling

NEXT = -1
"""The start of a segment that goes on behind what the request has computed."""


class Segment(NamedTuple):
    """Adjacent rows of one request: a chunk of a prompt, or its last token and drafts of what may follow.

    request: its row in the request table; count: rows; start: the position of the first row of a chunk, or ``NEXT``;
    tokens: the ids of a chunk, or the drafts (the id before them is the one drawn last); wanted: how many of the last
    rows need logits.
    """

    request: int
    count: int
    start: int
    tokens: tuple[int, ...]
    wanted: int


class BlockDelta(NamedTuple):
    """One change of the block table: block ``index`` of a request."""

    request: int
    index: int
    block: int


class Copy(NamedTuple):
    """A page of a block, or the rings of a request, that is copied before the step writes."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that takes a row of the request table, and all that the runner must know of it.

    request: the row; computed: tokens whose keys are there already (a fork); output_token_ids: those that were drawn
    before it was preempted; seed: the key of its random stream.
    """

    request: int
    computed: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Everything in it is a change against the step before, but for the rows to compute.

    width: blocks of the bucket that holds the longest context of the step; leaves: rows whose sequences are gone, which
    an admission of the same step may take again.
    """

    segments: tuple[Segment, ...] = ()
    width: int = 1
    admissions: tuple[Admission, ...] = ()
    blocks: tuple[BlockDelta, ...] = ()
    block_copies: tuple[Copy, ...] = ()
    request_copies: tuple[Copy, ...] = ()
    leaves: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows to compute, without padding."""
        return sum(segment.count for segment in self.segments)

    @property
    def wanted(self) -> int:
        """Rows whose logits are needed, without padding."""
        return sum(segment.wanted for segment in self.segments)
