"""What the scheduler decides: which sequences run in a step and how many new tokens each. Plain integers."""

from __future__ import annotations

from dataclasses import dataclass, field

from tetrad.cache.block_manager import CacheCopies
from tetrad.engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence's share of a step: its tokens ``start`` to ``start + count`` - 1."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """The position after the last token of this step."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last known token, so that the next one can be drawn."""
        return self.end == self.sequence.length and not self.sequence.is_stem


@dataclass(slots=True)
class Batch:
    """One step: prefill chunks and single decode tokens, in any mix."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: CacheCopies = field(default_factory=CacheCopies)

    @property
    def tokens(self) -> int:
        """New tokens over all sequences."""
        return sum(item.count for item in self.scheduled)
