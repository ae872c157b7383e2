"""Which sequences run in the next step. It knows tokens, blocks and order of arrival; never a tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tetrad.cache.block_manager import BlockManager, CacheCopies
from tetrad.engine.batch import Batch, ScheduledSequence
from tetrad.engine.sequence import Sequence, SequenceStatus


class Scheduler:
    """First come, first served, with continuous batching: every step mixes decode tokens and prefill chunks.

    Decode tokens go first, so that a long prompt never makes running requests wait; what is left of the token budget
    goes to prompts, in chunks. Where blocks run short, the sequence that came last gives its own back and is computed
    anew later: row invariance makes the second computation equal to the first.
    """

    def __init__(
        self, manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, chunked_prefill: bool = True
    ) -> None:
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue new sequences behind all others."""
        self.waiting.extend(sequences)

    def schedule(self) -> Batch:
        """Choose the next step. Empty only if nothing is unfinished."""
        chosen: dict[int, ScheduledSequence] = {}
        batch = Batch()
        budget = self.max_num_batched_tokens
        decoding = [sequence for sequence in self.running if sequence.remaining == 1]
        prefilling = [sequence for sequence in self.running if sequence.remaining > 1]
        for sequence in decoding + prefilling:
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # it was preempted for one that came before it
            count = self._count(sequence.remaining, budget)
            if not count:
                continue
            while not self._grow(sequence, count):
                victim = self.running[-1]
                self._preempt(victim)
                dropped = chosen.pop(id(victim), None)
                budget += dropped.count if dropped else 0
                if victim is sequence:
                    break
            else:
                chosen[id(sequence)] = ScheduledSequence(sequence, sequence.computed, count)
                budget -= count
        self._admit(chosen, budget, batch.copies)
        if not chosen and self.waiting:
            # nothing runs but stems whose branches find no room beside them: the branches start from nothing instead
            for stem in [sequence for sequence in self.running if sequence.is_stem]:
                self._drop_stem(stem)
            self._admit(chosen, budget, batch.copies)
        batch.scheduled = list(chosen.values())
        return batch

    def _admit(self, chosen: dict[int, ScheduledSequence], budget: int, copies: CacheCopies) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence, stem = self.waiting[0], self.waiting[0].stem
            if stem is not None and (stem.status is SequenceStatus.WAITING or stem.remaining):
                return  # the common prefix is not computed yet
            start = stem.computed if stem is not None else 0
            count = self._count(sequence.length - start, budget)
            if not count or not self.manager.can_admit(sequence.length, start):
                return
            self.waiting.popleft()
            if stem is not None:
                assert stem.holding is not None
                sequence.holding = self.manager.fork(stem.holding, start, copies)
                self._forget_stem(sequence)
            else:
                sequence.holding = self.manager.admit()
            sequence.computed = start
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            grown = self._grow(sequence, count)
            assert grown, "blocks were promised by can_admit"
            chosen[id(sequence)] = ScheduledSequence(sequence, start, count)
            budget -= count

    def _forget_stem(self, sequence: Sequence) -> None:
        """The branch needs its stem no more; a stem without branches leaves."""
        stem, sequence.stem = sequence.stem, None
        if stem is None:
            return
        stem.branches -= 1
        if not stem.branches:
            self.leave(stem)
            stem.status = SequenceStatus.FINISHED

    def _drop_stem(self, stem: Sequence) -> None:
        for sequence in [waiting for waiting in self.waiting if waiting.stem is stem]:
            self._forget_stem(sequence)

    def _count(self, remaining: int, budget: int) -> int:
        if remaining <= budget:
            return remaining
        # without chunking a prompt waits for a step that takes it whole; the engine checks that one can
        return budget if self.chunked_prefill else 0

    def _grow(self, sequence: Sequence, count: int) -> bool:
        assert sequence.holding is not None
        return self.manager.grow(sequence.holding, sequence.computed, sequence.computed + count)

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.computed = 0
        sequence.status = SequenceStatus.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        assert sequence.holding is not None
        self.manager.release(sequence.holding)
        sequence.holding = None

    def advance(self, batch: Batch) -> None:
        """Note that the batch's keys are in the caches, and give back window blocks that nobody reads any more."""
        for item in batch.scheduled:
            sequence = item.sequence
            sequence.computed = item.end
            assert sequence.holding is not None
            self.manager.leave_behind(sequence.holding, item.end)

    def leave(self, sequence: Sequence) -> None:
        """Take a finished (or aborted) sequence out of the queues and give back what it holds."""
        if sequence.holding is not None:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._forget_stem(sequence)
