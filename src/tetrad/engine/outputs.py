"""What a request gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


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

    Attributes:
        index: the choice's number, from 0.
        text: the text so far, cut before a stop string and without the token that ended the output (an end of sequence
            or a stop id); empty where the model folder has no tokenizer.
        token_ids: the generated ids, the one that ended the output included.
        finish_reason: None while it runs; "stop" (end of sequence, stop id or stop string), "length", "abort", "error".
        stop_reason: the stop string or the stop id that fired; None for an end of sequence or any other end.
        logprobs: None, or one dict for each generated token: token id to :class:`Logprob`, the likeliest first, the
            sampled id always among them.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None

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
        }


@dataclass(slots=True)
class RequestOutput:
    """A request and all its choices.

    Attributes:
        request_id: as given or made when the request was added.
        prompt: the prompt's text, None where it was given as ids.
        prompt_token_ids: the ids that the model read.
        outputs: one entry for each choice, by index.
        finished: whether every choice has ended.
        metrics: counts and seconds by name, None where none were taken.
        error: why the request failed, None where it did not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: Mapping[str, float] | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "outputs": [output.to_dict() for output in self.outputs],
            "finished": self.finished,
            "metrics": None if self.metrics is None else dict(self.metrics),
            "error": self.error,
        }
