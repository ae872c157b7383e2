"""Sequences that begin alike: a common prefix is computed once, and each goes on from a fork of it."""

from __future__ import annotations

from collections.abc import Collection

from tetrad.core.messages import Add, AddSequence, Sampling
from tetrad.core.sequence import Sequence, Status

SHORTEST = 64
"""A common beginning of fewer tokens is computed by every sequence for itself."""


class SharedPrefixes:
    """Which sequence waits for which prefix.

    A prefix is a sequence that draws no token. Those that begin with it wait until it is computed and are then forked.
    It is finished when nobody waits for it any more.
    """

    def __init__(self) -> None:
        self._prefix_of: dict[int, Sequence] = {}
        # the same by prefix; a dict for its order, because thousands may wait and leave one by one
        self._waiting_for: dict[int, dict[int, None]] = {}

    def of(self, sequence: Sequence) -> Sequence | None:
        """The prefix that a sequence waits for."""
        return self._prefix_of.get(sequence.number)

    def share(self, add: Add, sequences: list[Sequence], order: int) -> Sequence | None:
        """Let ``sequences`` wait for their common prefix. Returns it, None if it is not worth one."""
        if len(sequences) < 2 or add.shared < SHORTEST:
            return None
        tokens = add.sequences[0].prompt_token_ids[: add.shared]
        # numbers of prefixes are negative: the front end does not know them
        prefix = Sequence(AddSequence(-1 - order, tokens, Sampling(), 0, 0), order, draws=False)
        self._prefix_of |= {sequence.number: prefix for sequence in sequences}
        self._waiting_for[prefix.number] = {sequence.number: None for sequence in sequences}
        return prefix

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether nothing keeps the sequence from starting."""
        prefix = self.of(sequence)
        return prefix is None or (prefix.status is Status.RUNNING and not prefix.remaining)

    def forget(self, sequence: Sequence) -> Sequence | None:
        """The sequence waits no more. Returns its prefix if it was the last that waited for it."""
        prefix = self._prefix_of.pop(sequence.number, None)
        if prefix is None:
            return None
        others = self._waiting_for[prefix.number]
        del others[sequence.number]
        if others:
            return None
        del self._waiting_for[prefix.number]
        return prefix

    def waiting_for(self, prefix: Sequence) -> list[int]:
        """The numbers of the sequences that wait for a prefix."""
        return list(self._waiting_for.get(prefix.number, ()))

    def keep(self, known: Collection[int], waiting: Collection[int]) -> None:
        """Forget all waiting but of the sequences ``waiting``, and that for a prefix that is not ``known``."""
        self._prefix_of = {
            number: prefix for number, prefix in self._prefix_of.items() if number in waiting and prefix.number in known
        }
        self._waiting_for = {}
        for number, prefix in self._prefix_of.items():
            self._waiting_for.setdefault(prefix.number, {})[number] = None
