"""A sequence as the core knows it: tokens, what is computed, and what it holds."""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from tetrad.core.messages import AddSequence, FinishReason, TokenLogprobs
from tetrad.core.plan import NEXT, Admission, Segment

NONE = -1
"""No row of the request table."""


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a prompt, or a prefix that others wait for (``draws`` is false: it draws no token).

    computed: tokens whose keys are in the caches; request: its row in the request table while it runs; blocks: its
    block table; failures: steps that an exception ended since it last got further than ``failed_at``, the
    furthest place where one did; reported: output tokens that the front end knows; started: when the first of its
    tokens was computed; on_device: whether the request table has its last token.
    """

    added: AddSequence
    order: int
    draws: bool = True
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: Status = Status.WAITING
    computed: int = 0
    request: int = NONE
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    failures: int = 0
    failed_at: int = NONE
    reported: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    started: float | None = None
    on_device: bool = False
    _decode: Segment | None = None

    @property
    def number(self) -> int:
        """The front end's name for it."""
        return self.added.number

    @property
    def length(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.added.prompt_token_ids) + len(self.output)

    @property
    def remaining(self) -> int:
        """Known tokens whose keys are not in the caches yet."""
        return self.length - self.computed

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """The token ids at positions ``start`` to ``end`` - 1."""
        prompt, cut = self.added.prompt_token_ids, len(self.added.prompt_token_ids)
        if end <= cut:
            return prompt[start:end]
        return prompt[start:end] + tuple(self.output[max(start - cut, 0) : end - cut])

    def segment(self, count: int) -> Segment:
        """Its next ``count`` tokens as rows of a step."""
        if self.on_device:
            # its position and its token are in the table, so that every decode step has the same segment
            if self._decode is None:
                self._decode = Segment(self.request, 1, NEXT, (), 1)
            return self._decode
        end = self.computed + count
        wanted = int(self.draws and end == self.length)
        return Segment(self.request, count, self.computed, self.tokens(self.computed, end), wanted)

    def admission(self) -> Admission:
        """What the runner must know when the sequence takes its row."""
        added = self.added
        return Admission(
            request=self.request,
            computed=self.computed,
            prompt_token_ids=added.prompt_token_ids,
            output_token_ids=tuple(self.output),
            sampling=added.sampling,
            seed=added.seed,
        )

    def restart(self) -> None:
        """Wait again, with nothing computed. What it held is the caller's to free."""
        self.status, self.computed, self.request, self.blocks = Status.WAITING, 0, NONE, []
        self.on_device, self._decode = False, None

    def fail(self, computed: int) -> None:
        """An exception has ended a step that it was in with so many tokens computed before."""
        self.failures += 1
        self.failed_at = max(self.failed_at, computed)

    def progress(self) -> None:
        """A step has gone well. It counts where it went on beyond the place that had failed.

        The chunks before that place are computed anew each time, so their success says nothing: a chunk that always
        fails would be tried for ever.
        """
        if self.computed > self.failed_at:
            self.failures = 0

    def append(self, token_ids: SequenceOf[int], logprobs: SequenceOf[TokenLogprobs]) -> None:
        """Take drawn tokens, up to one that ends the output. The last of them is in the request table."""
        self.on_device = True
        for place, token_id in enumerate(token_ids):
            if logprobs:
                self.logprobs.append(logprobs[place])
            self.output.append(token_id)
            if self.settle():
                return

    def settle(self) -> bool:
        """Finish it if its last token ends the output. Whether it is finished, however often it is asked."""
        count, added = len(self.output), self.added
        # an interrupt may have come between a token and its log probabilities
        del self.logprobs[count:]
        if count > added.sampling.min_tokens and self.output[-1] in added.stop_token_ids:
            self.finish("stop")
        elif self.draws and count >= added.max_tokens:
            self.finish("length")
        return self.status is Status.FINISHED

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Mark it as finished; what it holds is the scheduler's to free."""
        self.status, self.finish_reason, self.error = Status.FINISHED, reason, error
