"""A request as its user sees it: choices, text, times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tetrad.core.messages import AddSequence, FinishReason, Sampling, TokenLogprobs, Tokens
from tetrad.frontend.detokenizer import Detokenizer
from tetrad.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tetrad.frontend.sampling_params import SamplingParams

DecodeToken = Callable[[int], str]
"""One token's text alone."""


@dataclass(slots=True, eq=False)
class Choice:
    """One continuation of a prompt. ``number`` is the core's name for it."""

    request: Request
    index: int
    number: int
    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def rewind(self, count: int, detokenizer: Detokenizer) -> None:
        """Go back to the first ``count`` tokens, none of which ended it. ``detokenizer``: one that has seen nothing.

        It is right wherever an exception has left ``take``.
        """
        del self.token_ids[count:], self.logprobs[count:]
        self.cumulative_logprob = 0.0
        for token_id, entries in zip(self.token_ids, self.logprobs, strict=False):
            self.cumulative_logprob += entries[token_id].logprob
        for token_id in self.token_ids:
            detokenizer.append(token_id)
        self.detokenizer, self.finish_reason, self.stop_reason = detokenizer, None, None

    def take(self, tokens: Tokens, decode_token: DecodeToken) -> None:
        """What the core tells of it: new tokens, and how it ended. A stop string ends it before the core knows."""
        assert tokens.start == len(self.token_ids), "a message is missing, or came twice"
        self.preemptions = tokens.preemptions
        last = len(tokens.token_ids) - 1
        for place, token_id in enumerate(tokens.token_ids):
            self.token_ids.append(token_id)
            if tokens.logprobs:
                self._take_logprobs(token_id, tokens.logprobs[place], decode_token)
            if place == last and tokens.finish_reason == "stop":
                # a token that ends the output is one of its ids, but never part of its text
                stops = token_id in self.request.params.stop_ids
                self.finish("stop", token_id if stops else None)
                return
            self.detokenizer.append(token_id)
            if self.detokenizer.stop_string is not None:
                self.finish("stop", self.detokenizer.stop_string)
                return
        if tokens.error is not None:
            self.request.error = tokens.error
        if tokens.finish_reason is not None:
            self.finish(tokens.finish_reason)

    def _take_logprobs(self, token_id: int, logprobs: TokenLogprobs, decode_token: DecodeToken) -> None:
        entries = {other: Logprob(value, rank, decode_token(other)) for other, value, rank in logprobs.entries}
        self.logprobs.append(entries)
        self.cumulative_logprob += entries[token_id].logprob

    def fail(self, error: str) -> None:
        """Mark it as finished by an error. Its text stays as it is, for that may be what failed."""
        self.request.error, self.finish_reason, self.stop_reason = error, "error", None

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Mark it as finished; text that was held back is let go."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.detokenizer.finish()

    def output(self) -> CompletionOutput:
        """The continuation as the user sees it: a copy that nothing else holds."""
        asked = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.text,
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=[dict(entries) for entries in self.logprobs] if asked else None,
            cumulative_logprob=self.cumulative_logprob if asked else None,
        )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and how to continue it, ``params.n`` times. Times are of ``time.monotonic``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    choices: list[Choice] = field(default_factory=list)
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every choice is finished."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def add_sequence(self, choice: Choice, seed: int, eos_token_ids: frozenset[int], room: int) -> AddSequence:
        """What the core must know of a choice. ``room``: positions behind the prompt."""
        params = self.params
        ends = frozenset(params.stop_ids)
        return AddSequence(
            number=choice.number,
            prompt_token_ids=tuple(self.prompt_token_ids),
            sampling=sampling_of(params, tuple(sorted(ends | eos_token_ids))),
            seed=seed,
            max_tokens=params.token_limit(room),
            stop_token_ids=ends if params.ignore_eos else ends | eos_token_ids,
        )

    def note(self, tokens: Tokens, now: float) -> None:
        """Keep the times that a message tells of."""
        if tokens.started is not None:
            self.started = tokens.started if self.started is None else min(self.started, tokens.started)
        if tokens.token_ids:
            self.first_token = now if self.first_token is None else self.first_token
            self.last_token = now

    def output(self) -> RequestOutput:
        """The request as the user sees it, finished or not: a copy that nothing else holds."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[choice.output() for choice in self.choices],
            finished=self.finished,
            metrics=self.metrics(),
            error=self.error,
        )

    def metrics(self) -> RequestMetrics:
        """How long its parts took so far."""
        return RequestMetrics(
            queue_seconds=_between(self.arrival, self.started),
            prefill_seconds=_between(self.started, self.first_token),
            time_to_first_token_seconds=_between(self.arrival, self.first_token),
            decode_seconds=_between(self.first_token, self.last_token),
            end_to_end_seconds=_between(self.arrival, self.ended),
            preemptions=sum(choice.preemptions for choice in self.choices),
        )


def sampling_of(params: SamplingParams, end_token_ids: tuple[int, ...]) -> Sampling:
    """What the sampler needs of the parameters: the numbers among them, and the ids that end an output."""
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.biases or None,
        min_tokens=params.min_tokens,
        end_token_ids=end_token_ids,
        logprobs=params.logprobs,
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
