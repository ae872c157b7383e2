"""What a request gives back. Every output is a copy: whatever is done to it, the request goes on as it was."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tetrad.core.messages import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability where another, or this one, was generated.

    Attributes:
        logprob: natural logarithm of the probability that the model's own logits give, before penalties, bias and
            temperature. Always finite.
        rank: 1 for the likeliest token of the vocabulary; of equals the lowest id comes first.
        decoded_token: the token's text alone; empty without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str

    def to_dict(self) -> dict[str, Any]:
        return {"logprob": self.logprob, "rank": self.rank, "decoded_token": self.decoded_token}


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    ``token_ids`` and ``logprobs`` are the output's own copies.

    Attributes:
        index: the choice's number, from 0.
        text: the text so far, cut before a stop string and without the token that ended the output (an end of sequence
            or a stop id); empty where the model folder has no tokenizer.
        token_ids: the generated ids, the one that ended the output included.
        finish_reason: None while it runs; "stop" (end of sequence, stop id or stop string), "length", "abort", "error".
        stop_reason: the stop string or the stop id that fired; None for an end of sequence or any other end.
        logprobs: None, or one dict for each generated token: token id to :class:`Logprob`, the likeliest first, the
            sampled id always among them.
        cumulative_logprob: the sum of the generated tokens' log probabilities (natural logarithm, of the model's own
            logits); None where ``logprobs`` was not asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the token ids that are keys become strings, as JSON would have them."""
        logprobs = None
        if self.logprobs is not None:
            logprobs = [{str(token_id): entry.to_dict() for token_id, entry in step.items()} for step in self.logprobs]
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "logprobs": logprobs,
            "cumulative_logprob": self.cumulative_logprob,
        }


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """How long the parts of a request took, in seconds of a clock that only goes forward.

    A part that is not over yet is None. Of several choices the first token is that of the quickest, the last token that
    of the slowest.

    Attributes:
        queue_seconds: from the request's arrival to the first step that computed some of its prompt.
        prefill_seconds: from there to the first token.
        time_to_first_token_seconds: from the arrival to the first token; the sum of the two above.
        decode_seconds: from the first token to the last one so far; 0 where there is one token.
        end_to_end_seconds: from the arrival to the end, whatever the end was; None while the request runs.
        preemptions: how often a choice gave its blocks back to others and was computed anew. A count.
    """

    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    time_to_first_token_seconds: float | None = None
    decode_seconds: float | None = None
    end_to_end_seconds: float | None = None
    preemptions: int = 0

    def to_dict(self) -> dict[str, float | int | None]:
        """Plain values for JSON, by the names of the attributes."""
        return asdict(self)


@dataclass(slots=True)
class RequestOutput:
    """A request and all its choices.

    Attributes:
        request_id: as given or made when the request was added.
        prompt: the prompt's text, None where it was given as ids alone.
        prompt_token_ids: the ids that the model read, as a copy of the output's own.
        outputs: one entry for each choice, by index.
        finished: whether every choice has ended.
        metrics: how long its parts took, None where nothing ran.
        error: why the request failed, None where it did not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "outputs": [output.to_dict() for output in self.outputs],
            "finished": self.finished,
            "metrics": None if self.metrics is None else self.metrics.to_dict(),
            "error": self.error,
        }
