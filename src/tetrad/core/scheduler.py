"""Which sequences run in the next step. It knows tokens, blocks and order of arrival; never a tensor."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from tetrad.core.block_manager import BlockManager
from tetrad.core.messages import Add
from tetrad.core.plan import Admission, BlockDelta, Copy, Segment, StepPlan
from tetrad.core.prefix import SharedPrefixes
from tetrad.core.sequence import NONE, Sequence, Status
from tetrad.geometry.sizes import width_blocks


@dataclass(slots=True)
class _Step:
    """A step while it is put together. ``counts``: the rows of each chosen sequence, by order of arrival."""

    budget: int
    counts: dict[int, tuple[Sequence, int]] = field(default_factory=dict)
    admissions: list[Admission] = field(default_factory=list)
    blocks: list[BlockDelta] = field(default_factory=list)
    block_copies: list[Copy] = field(default_factory=list)
    request_copies: list[Copy] = field(default_factory=list)


class Scheduler:
    """First come, first served, with continuous batching: every step mixes decode rows and chunks of prompts.

    Decode rows go first, so that a long prompt never makes running sequences wait; what is left of the token budget
    goes to prompts, in chunks. Where blocks run short, the sequence that came last frees its own and is computed anew
    later: row invariance makes the second computation equal to the first.
    """

    def __init__(
        self, manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, chunked_prefill: bool = True
    ) -> None:
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.sequences: dict[int, Sequence] = {}
        # by number: any of thousands may be aborted
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefixes = SharedPrefixes()
        self._order = 0
        self._leaves: list[int] = []
        self._chosen: list[tuple[Sequence, Segment]] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.sequences)

    @property
    def chosen(self) -> list[Sequence]:
        """The sequences of the last step, in the order of its segments."""
        return [sequence for sequence, _ in self._chosen]

    def add(self, add: Add) -> None:
        """Queue new sequences behind all others."""
        self._order += 1
        order = self._order
        sequences = []
        for new in add.sequences:
            self._order += 1
            sequences.append(Sequence(new, self._order))
        prefix = self.prefixes.share(add, sequences, order) if self.max_num_seqs > 1 else None
        for sequence in [prefix, *sequences] if prefix is not None else sequences:
            self.sequences[sequence.number] = sequence
            self.waiting[sequence.number] = sequence

    def schedule(self) -> StepPlan:
        """Choose the next step. Without a segment only if nothing is unfinished."""
        step = _Step(self.max_num_batched_tokens)
        decoding = [sequence for sequence in self.running if sequence.remaining == 1]
        prefilling = [sequence for sequence in self.running if sequence.remaining > 1]
        for sequence in decoding + prefilling:
            if sequence.status is Status.RUNNING:  # else it was preempted for one that came before it
                self._continue(sequence, step)
        self._admit(step)
        if not step.counts and self.waiting:
            # nothing runs but prefixes whose sequences find no room beside them: those start from nothing instead
            for prefix in [sequence for sequence in self.running if not sequence.draws]:
                for number in self.prefixes.waiting_for(prefix):
                    self._forget_prefix(self.sequences[number])
            self._admit(step)
        return self._plan(step)

    def _plan(self, step: _Step) -> StepPlan:
        self._chosen = [(sequence, sequence.segment(count)) for sequence, count in step.counts.values()]
        leaves, self._leaves = tuple(self._leaves), []
        longest = max((sequence.computed + segment.count for sequence, segment in self._chosen), default=1)
        return StepPlan(
            segments=tuple(segment for _, segment in self._chosen),
            width=width_blocks(longest),
            admissions=tuple(step.admissions),
            blocks=tuple(step.blocks),
            block_copies=tuple(step.block_copies),
            request_copies=tuple(step.request_copies),
            leaves=leaves,
        )

    def _continue(self, sequence: Sequence, step: _Step) -> None:
        """Choose a running sequence, and preempt those that came last where blocks are short."""
        count = self._count(sequence.remaining, step.budget)
        if not count:
            return
        while not self._grow(sequence, count, step):
            victim = self.running[-1]
            # its row may be another's before the step begins
            step.blocks = [delta for delta in step.blocks if delta.request != victim.request]
            self._preempt(victim)
            _, dropped = step.counts.pop(victim.order, (victim, 0))
            step.budget += dropped
            if victim is sequence:
                return
        step.counts[sequence.order] = (sequence, count)
        step.budget -= count

    def _admit(self, step: _Step) -> None:
        while self.waiting and step.budget and len(self.running) < self.max_num_seqs:
            sequence = next(iter(self.waiting.values()))
            if not self.prefixes.is_ready(sequence):
                return
            prefix = self.prefixes.of(sequence)
            start = prefix.computed if prefix is not None else 0
            count = self._count(sequence.length - start, step.budget)
            if not count or not self.manager.can_admit(sequence.length, start):
                return
            del self.waiting[sequence.number]
            sequence.status, sequence.computed = Status.RUNNING, start
            sequence.request = self.manager.requests.allocate()
            self.running.append(sequence)
            step.admissions.append(sequence.admission())
            if prefix is not None:
                sequence.started = prefix.started
                self._fork(sequence, prefix, step)
            sequence.started = time.monotonic() if sequence.started is None else sequence.started
            grown = self._grow(sequence, count, step)
            assert grown, "blocks were promised by can_admit"
            step.counts[sequence.order] = (sequence, count)
            step.budget -= count

    def _fork(self, sequence: Sequence, prefix: Sequence, step: _Step) -> None:
        sequence.blocks, copy = self.manager.fork(prefix.blocks, prefix.computed)
        step.blocks += [BlockDelta(sequence.request, i, block) for i, block in enumerate(sequence.blocks)]
        if copy is not None:
            step.block_copies.append(Copy(*copy))
        step.request_copies.append(Copy(prefix.request, sequence.request))
        self._forget_prefix(sequence)

    def _forget_prefix(self, sequence: Sequence) -> None:
        """The sequence needs its prefix no more; a prefix that nobody waits for leaves."""
        prefix = self.prefixes.forget(sequence)
        if prefix is not None:
            self.leave(prefix)

    def _count(self, remaining: int, budget: int) -> int:
        if remaining <= budget:
            return remaining
        # without chunking a prompt waits for a step that takes it whole; the engine checks that one can
        return budget if self.chunked_prefill else 0

    def _grow(self, sequence: Sequence, count: int, step: _Step) -> bool:
        blocks = sequence.blocks
        held = len(blocks)
        if not self.manager.grow(blocks, sequence.computed + count):
            return False
        step.blocks += [BlockDelta(sequence.request, index, blocks[index]) for index in range(held, len(blocks))]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.restart()
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting[sequence.number] = sequence
        self.waiting.move_to_end(sequence.number, last=False)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.manager.free(sequence.blocks, sequence.request)
        self._leaves.append(sequence.request)
        sequence.blocks, sequence.request = [], NONE

    def commit(self, accepted: SequenceOf[int]) -> None:
        """Note that the last step's keys are in the caches.

        accepted: how many rows of each segment count, in order: all of a chunk; of drafts, those before the first wrong
        one. The others are computed again.
        """
        for (sequence, _), rows in zip(self._chosen, accepted, strict=True):
            sequence.computed += rows
        self._chosen = []

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the queues and free what it holds."""
        if sequence.request != NONE:
            self._release(sequence)
        self.waiting.pop(sequence.number, None)
        del self.sequences[sequence.number]
        if sequence.status is not Status.FINISHED:
            sequence.status = Status.FINISHED
        self._forget_prefix(sequence)

    def restart(self) -> None:
        """Compute every sequence anew: after an exception nothing that a step has left is relied upon.

        It looks only at which sequences there are, so it is right wherever the step was left.
        """
        self._leaves = list(range(self.manager.requests.size))
        self.manager.reset()
        for sequence in self.running:
            sequence.preemptions += 1
        unfinished = [sequence for sequence in self.sequences.values() if sequence.status is not Status.FINISHED]
        self.prefixes.keep(self.sequences, {sequence.number for sequence in unfinished})
        wanted = [sequence for sequence in unfinished if sequence.draws or self.prefixes.waiting_for(sequence)]
        wanted.sort(key=lambda sequence: sequence.order)
        for sequence in wanted:
            sequence.restart()
        self.sequences = {sequence.number: sequence for sequence in wanted}
        self.waiting = OrderedDict((sequence.number, sequence) for sequence in wanted)
        self.running, self._chosen = [], []
