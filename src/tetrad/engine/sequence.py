"""A request and the sequences that it asks for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tetrad.cache.block_manager import Holding
from tetrad.engine.detokenizer import Detokenizer
from tetrad.engine.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from tetrad.engine.sampler import SamplingRow
from tetrad.engine.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a prompt. ``computed`` counts the tokens whose keys are in the caches.

    Sequences that begin alike wait for a *stem*, a sequence of their common prefix that draws no token, and start from
    a fork of what it holds. ``branches`` counts those that a stem still waits for.
    """

    request: Request
    index: int
    output_token_ids: list[int]
    sampling_row: SamplingRow
    max_tokens: int
    detokenizer: Detokenizer
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    computed: int = 0
    holding: Holding | None = None
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    is_stem: bool = False
    branches: int = 0
    stem: Sequence | None = None

    @property
    def length(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def remaining(self) -> int:
        """Known tokens whose keys are not in the caches yet."""
        return self.length - self.computed

    def tokens(self, start: int, end: int) -> list[int]:
        """The token ids at positions ``start`` to ``end`` - 1."""
        prompt = self.request.prompt_token_ids
        cut = len(prompt)
        return prompt[start:end] + self.output_token_ids[max(start - cut, 0) : max(end - cut, 0)]

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Mark the sequence as finished; its holdings are the scheduler's to give back."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.detokenizer.finish()

    def output(self) -> CompletionOutput:
        """The continuation as the user sees it."""
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.text,
            token_ids=list(self.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=list(self.logprobs) if self.request.params.logprobs is not None else None,
        )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and how to continue it, ``params.n`` times."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    sequences: list[Sequence] = field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every continuation is finished."""
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """The request as the user sees it, finished or not."""
        metrics = {"arrival": self.arrival, "preemptions": float(sum(s.preemptions for s in self.sequences))}
        if self.first_token is not None and self.last_token is not None:
            metrics |= {"first_token": self.first_token, "last_token": self.last_token}
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.finished,
            metrics=metrics,
            error=self.error,
        )
