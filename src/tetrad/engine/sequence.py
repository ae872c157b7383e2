"""A request and the sequences that it asks for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tetrad.cache.block_manager import Holding
from tetrad.engine.detokenizer import Detokenizer
from tetrad.engine.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
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
    cumulative_logprob: float = 0.0
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

    def append(self, token_id: int, logprobs: dict[int, Logprob] | None) -> None:
        """Take the next generated token, and its log probabilities where they were asked for."""
        self.output_token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id].logprob

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Mark the sequence as finished; its holdings are the scheduler's to give back."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.detokenizer.finish()

    def output(self) -> CompletionOutput:
        """The continuation as the user sees it: a copy that nothing else holds."""
        asked = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.text,
            token_ids=list(self.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=[dict(entries) for entries in self.logprobs] if asked else None,
            cumulative_logprob=self.cumulative_logprob if asked else None,
        )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and how to continue it, ``params.n`` times.

    Times are of ``time.monotonic``. ``common`` is the request of the stem that computes what this prompt and others
    begin with.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    sequences: list[Sequence] = field(default_factory=list)
    common: Request | None = None
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every continuation is finished."""
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """The request as the user sees it, finished or not: a copy that nothing else holds."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.finished,
            metrics=self.metrics(),
            error=self.error,
        )

    def metrics(self) -> RequestMetrics:
        """How long its parts took so far."""
        started = self.started
        if self.common is not None and self.common.started is not None:
            started = self.common.started
        return RequestMetrics(
            queue_seconds=_between(self.arrival, started),
            prefill_seconds=_between(started, self.first_token),
            time_to_first_token_seconds=_between(self.arrival, self.first_token),
            decode_seconds=_between(self.first_token, self.last_token),
            end_to_end_seconds=_between(self.arrival, self.ended),
            preemptions=sum(sequence.preemptions for sequence in self.sequences),
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
