"""What front end and core tell each other: plain records that can be pickled, so that a process may stand between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen, as plain numbers; ``SamplingParams`` says what they mean.

    end_token_ids: ids that end an output, and that are excluded before ``min_tokens``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the token of the largest logit is taken and nothing is drawn."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class AddSequence:
    """One continuation of a prompt.

    number: the front end's name for it, never used twice; seed: the key of its random stream; stop_token_ids: ids that
    end the output (after ``sampling.min_tokens`` tokens); max_tokens: the output's longest.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Add:
    """Sequences that are queued together. What they begin with, ``shared`` tokens, is computed once."""

    sequences: tuple[AddSequence, ...]
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """Sequences that nobody wants any more. Numbers that are not here any more are passed over."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's place in the distribution, and the likeliest others: (token id, log probability, rank) each.

    The likeliest stand first, and the sampled one is always among them.
    """

    entries: tuple[tuple[int, float, int], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a sequence has got since the last message about it.

    start: output tokens that were told of before, so that a message that comes twice changes nothing; logprobs: one for
    each token, or none at all; finish_reason: None while it runs; error: why it failed; preemptions:
    how often it was computed anew so far; started: when the first of its tokens was computed, by ``time.monotonic``.
    """

    number: int
    start: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    preemptions: int = 0
    started: float | None = None
