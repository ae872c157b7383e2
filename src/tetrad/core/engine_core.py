"""The core: takes messages, runs steps, gives back tokens. It knows when and for whom, never what a tensor is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tetrad.core.block_manager import BlockManager
from tetrad.core.messages import Abort, Add, TokenLogprobs, Tokens
from tetrad.core.plan import StepPlan
from tetrad.core.scheduler import Scheduler
from tetrad.core.sequence import Sequence, Status
from tetrad.errors import DeviceLostError

ATTEMPTS = 2
"""Failed steps after which a sequence that was in them, and got no further in between, is given up."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one segment with wanted rows gave: tokens in order, and why there is none."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class Runner(Protocol):
    """What the core needs of whoever carries out its plans."""

    def execute(self, plan: StepPlan) -> list[Drawn]:
        """Run one step; one result for each segment with wanted rows, in order."""
        ...


class EngineCore:
    """Sequences in, tokens out, one step at a time.

    When an exception ends a step, all sequences that ran are computed anew, which changes none of their tokens. One
    that was in two such steps, and got no further between them, ends with an error. Nothing hangs, and no block is
    lost, wherever the exception (or an interrupt from the keyboard) came from.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.computed_rows = 0
        self.handed_over: list[Tokens] = []
        """What the last step told: for a front end that was interrupted while it took it."""
        self._lost: str | None = None
        self._touched: dict[int, Sequence] = {}
        self._unsettled = False

    @classmethod
    def build(
        cls,
        runner: Runner,
        *,
        blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool,
    ) -> EngineCore:
        """A core over so many blocks and requests."""
        scheduler = Scheduler(
            BlockManager(blocks, max_num_seqs),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunked_prefill=chunked_prefill,
        )
        return cls(scheduler, runner)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to report."""
        return self.scheduler.has_work or bool(self._touched)

    def numbers(self) -> frozenset[int]:
        """The sequences that are unfinished, or whose end was not told yet."""
        return frozenset(self.scheduler.sequences) | frozenset(self._touched)

    def require_device(self) -> None:
        """Refuse what comes after the device was lost.

        Raises:
            DeviceLostError: nothing can be computed any more.
        """
        if self._lost is not None:
            raise DeviceLostError(self._lost)

    def add(self, message: Add) -> None:
        """Queue sequences.

        Raises:
            DeviceLostError: an earlier step lost the device.
        """
        self.require_device()
        self._settle()
        self._unsettled = True
        self.scheduler.add(message)
        self._unsettled = False

    def abort(self, message: Abort) -> list[Tokens]:
        """Stop sequences and free what they hold. What they had got, for those that were here."""
        self._settle()
        found = [self.scheduler.sequences[number] for number in message.numbers if number in self.scheduler.sequences]
        reports = []
        self._unsettled = True
        for sequence in found:
            sequence.finish("abort")
            self.scheduler.leave(sequence)
            self._touched.pop(sequence.number, None)
            reports.append(_report(sequence))
        self._unsettled = False
        return reports

    def step(self) -> list[Tokens]:
        """Run one step. One message for each sequence that got a token, or ended, in it."""
        self._settle()
        self._unsettled = True
        chosen: dict[Sequence, int] = {}
        try:
            plan = self.scheduler.schedule()
            chosen = {sequence: sequence.computed for sequence in self.scheduler.chosen}
            if plan.segments:
                self._commit(plan, list(chosen), self.runner.execute(plan))
        except DeviceLostError as error:
            self._lost = str(error)
            self._end_all(self._lost)
        except Exception as error:
            self._failed(error, chosen)
        self._unsettled = False
        return self._hand_over()

    def _hand_over(self) -> list[Tokens]:
        self.handed_over = [_report(sequence) for sequence in self._touched.values()]
        for sequence in self._touched.values():
            sequence.reported = len(sequence.output)
        self._touched = {}
        return self.handed_over

    def _settle(self) -> None:
        """An interrupt has left a step, or a message, somewhere in the middle."""
        if self._unsettled:
            self._restart()
            self._unsettled = False

    def _restart(self) -> None:
        """Compute everything anew, from what is certain wherever a step was left: the tokens."""
        for sequence in self.scheduler.sequences.values():
            if sequence.settle():
                self._touched[sequence.number] = sequence
        self.scheduler.restart()

    def _commit(self, plan: StepPlan, sequences: list[Sequence], drawn: list[Drawn]) -> None:
        drawing = [sequence for sequence, part in zip(sequences, plan.segments, strict=True) if part.wanted]
        accepted = [part.count for part in plan.segments]
        self._touched |= {sequence.number: sequence for sequence in drawing}
        self.scheduler.commit(accepted)
        self.computed_rows += sum(accepted)
        for sequence in sequences:
            sequence.progress()
        for sequence, one in zip(drawing, drawn, strict=True):
            if one.error is not None:
                sequence.finish("error", one.error)
            else:
                sequence.append(one.token_ids, one.logprobs)
            if sequence.status is Status.FINISHED:
                self.scheduler.leave(sequence)

    def _failed(self, error: Exception, chosen: dict[Sequence, int]) -> None:
        """Compute everything anew; give up what an exception has ended twice at one place.

        chosen: the sequences of the step, and how far each was before it; none where the step was not put together,
        which is then everybody's failure.
        """
        failed = chosen or {sequence: sequence.computed for sequence in self.scheduler.sequences.values()}
        self._restart()
        for sequence, computed in failed.items():
            sequence.fail(computed)
            if sequence.failures >= ATTEMPTS and sequence.number in self.scheduler.sequences:
                self._end(sequence, f"{ATTEMPTS} of its steps failed; the last with {type(error).__name__}: {error}")

    def _end_all(self, reason: str) -> None:
        self._restart()
        for sequence in list(self.scheduler.sequences.values()):
            if sequence.number in self.scheduler.sequences:
                self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: str) -> None:
        if sequence.draws:
            self._touched[sequence.number] = sequence
            sequence.finish("error", reason)
            self.scheduler.leave(sequence)
            return
        for number in self.scheduler.prefixes.waiting_for(sequence):
            self._end(self.scheduler.sequences[number], reason)


def _report(sequence: Sequence) -> Tokens:
    """What the front end does not know yet."""
    new = sequence.reported
    return Tokens(
        number=sequence.number,
        start=new,
        token_ids=tuple(sequence.output[new:]),
        logprobs=tuple(sequence.logprobs[new:]),
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        preemptions=sequence.preemptions,
        started=sequence.started,
    )
