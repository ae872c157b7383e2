"""What one request asks of the sampler, checked once, before the request enters the engine."""

from __future__ import annotations

import math
import reprlib
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn, cast

from tetrad.errors import RequestError

MAX_CHOICES = 128
MAX_STOP_STRINGS = 4
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
_SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    The order in which the sampler applies the fields stands in :class:`tetrad.runner.sampler.Sampler`.

    Args:
        n: independent choices for the prompt, 1 to 128; more than one needs ``temperature > 0``.
        temperature: 0 to 2. 0 is greedy decoding: the token of the largest logit (the lowest id of equals), whatever
            ``top_k``, ``top_p``, ``min_p`` and ``seed`` say; penalties and ``logit_bias`` still count.
        top_p: in (0, 1]; the likeliest tokens whose probabilities together reach it are kept.
        top_k: the number of likeliest tokens kept; -1 and 0 keep all.
        min_p: in [0, 1]; tokens less likely than this share of the likeliest one are dropped.
        presence_penalty: in [-2, 2], subtracted from the logit of each token that is already in the output.
        frequency_penalty: in [-2, 2], subtracted once per occurrence in the output.
        repetition_penalty: above 0; logits of tokens in the prompt or the output are divided by it where positive and
            multiplied where negative.
        seed: a 64-bit signed integer. The same request with the same seed gets the same tokens whatever else runs.
            None draws a seed from the operating system.
        stop: a string, or up to four; the text ends before the first that appears. None counts as none.
        stop_token_ids: token ids that end the output, besides the model's own end-of-sequence ids.
        max_tokens: the most tokens to generate; None means as many as the model's length leaves room for.
        min_tokens: no end-of-sequence id, stop id or stop string ends the output before it has this many tokens.
        ignore_eos: the model's end-of-sequence ids do not end the output.
        logprobs: None, or for each generated token the log probabilities of this many likeliest tokens (0 to 20) and of
            the sampled one, from the logits as the model gave them.
        logit_bias: token id to a number in [-100, 100] that is added to its logit. Ids may be decimal strings, as JSON
            has them.

    Raises:
        RequestError: naming the field, its value and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | Set[int] | None = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "n": self._integer("n", 1, MAX_CHOICES),
            "temperature": self._number("temperature", 0, 2, "a finite number from 0 (greedy) to 2"),
            "top_p": self._number("top_p", 0, 1, "a number above 0 and up to 1 (1 keeps every token)", open_low=True),
            "top_k": self._integer("top_k", -1, None, "an integer of at least -1 (-1 and 0 keep every token)"),
            "min_p": self._number("min_p", 0, 1, "a number from 0 (off) to 1"),
            "presence_penalty": self._number("presence_penalty", -2, 2, "a number from -2 to 2"),
            "frequency_penalty": self._number("frequency_penalty", -2, 2, "a number from -2 to 2"),
            "repetition_penalty": self._number(
                "repetition_penalty", 0, math.inf, "a finite number above 0 (1 is off)", open_low=True
            ),
            "stop": self._stop_strings(),
            "stop_token_ids": self._stop_token_ids(),
            "min_tokens": self._integer("min_tokens", 0, None),
            "logit_bias": self._logit_bias(),
        }
        if self.max_tokens is not None:
            checked["max_tokens"] = self._integer(
                "max_tokens", 1, None, "an integer of at least 1, or None for as many as the model's length allows"
            )
        if self.seed is not None:
            checked["seed"] = self._integer("seed", -(2**63), 2**63 - 1, "None or a signed 64-bit integer")
        if self.logprobs is not None:
            checked["logprobs"] = self._integer(
                "logprobs", 0, MAX_LOGPROBS, f"None, or an integer from 0 (only the sampled token) to {MAX_LOGPROBS}"
            )
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "give true or false")
        for field_name, value in checked.items():
            object.__setattr__(self, field_name, value)
        if self.n > 1 and self.greedy:
            _refuse("n", self.n, "with temperature 0 all choices would be the same; give n=1, or a temperature above 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"give at most max_tokens, which is {self.max_tokens}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as it was checked."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as they were checked."""
        return cast("tuple[int, ...]", self.stop_token_ids)

    @property
    def biases(self) -> Mapping[int, float]:
        """``logit_bias`` as it was checked; empty for None."""
        return cast("Mapping[int, float]", self.logit_bias or {})

    @property
    def greedy(self) -> bool:
        """Whether the token of the largest logit is taken and nothing is drawn."""
        return self.temperature == 0

    def token_limit(self, room: int) -> int:
        """The most tokens to generate where ``room`` positions are left behind the prompt."""
        return room if self.max_tokens is None else min(self.max_tokens, room)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses token ids that the model does not have; called before the request enters the engine.

        Raises:
            RequestError: a ``stop_token_ids`` entry or a ``logit_bias`` key is ``vocab_size`` or larger.
        """
        for field_name, ids in (("stop_token_ids", self.stop_ids), ("logit_bias", self.biases)):
            largest = max(ids, default=-1)
            if largest >= vocab_size:
                _refuse(field_name, largest, f"the model's token ids are 0 to {vocab_size - 1}")

    def _integer(self, field_name: str, low: int, high: int | None, allowed: str | None = None) -> int:
        value = getattr(self, field_name)
        if not _is_integer(value) or value < low or (high is not None and value > high):
            span = f"of at least {low}" if high is None else f"from {low} to {high}"
            _refuse(field_name, value, f"give {allowed or f'an integer {span}'}")
        return int(value)

    def _number(self, field_name: str, low: float, high: float, allowed: str, *, open_low: bool = False) -> float:
        value = getattr(self, field_name)
        number = _as_float(value)
        if number is None or not low <= number <= high or (open_low and number == low):
            _refuse(field_name, value, f"give {allowed}")
        return number

    def _stop_strings(self) -> tuple[str, ...]:
        value: Any = self.stop
        strings = () if value is None else (value,) if isinstance(value, str) else value
        allowed = f"give a string or a list of at most {MAX_STOP_STRINGS} strings, none of them empty"
        if not isinstance(strings, (list, tuple)) or len(strings) > MAX_STOP_STRINGS:
            _refuse("stop", value, allowed)
        if not all(isinstance(string, str) and string for string in strings):
            _refuse("stop", value, allowed)
        if any("\ud800" <= character <= "\udfff" for string in strings for character in string):
            _refuse("stop", value, "a lone surrogate is no character, so it can never appear in the output")
        return tuple(strings)

    def _stop_token_ids(self) -> tuple[int, ...]:
        value: Any = self.stop_token_ids
        ids = () if value is None else value
        if isinstance(ids, (str, bytes)) or not isinstance(ids, (Sequence, Set)):
            _refuse("stop_token_ids", value, "give a list of token ids")
        _check_token_ids("stop_token_ids", ids)
        return tuple(int(token_id) for token_id in ids)

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        if not isinstance(self.logit_bias, Mapping):
            _refuse("logit_bias", self.logit_bias, "give a mapping of token id to bias")
        keys = [int(key) if isinstance(key, str) and _is_decimal(key) else key for key in self.logit_bias]
        _check_token_ids("logit_bias", keys)
        biases: dict[int, float] = {}
        for key, value in zip(keys, self.logit_bias.values(), strict=True):
            bias = _as_float(value)
            if bias is None or abs(bias) > MAX_LOGIT_BIAS:
                allowed = f"give a number from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
                _refuse(f"logit_bias[{int(key)}]", value, allowed)
            biases[int(key)] = bias
        return biases


def resolve_seed(params: SamplingParams, choice_index: int) -> int:
    """The key of the random stream of one choice, settled once when the request is made: 0 <= key < 2**128.

    Choice i of a seeded request has a stream of its own, the same in every run. Without a seed the key comes from the
    operating system.
    """
    if params.seed is None:
        return secrets.randbits(_SEED_BITS)
    return (choice_index << _SEED_BITS) | (params.seed % 2**_SEED_BITS)


def _refuse(field_name: str, value: Any, allowed: str) -> NoReturn:
    raise RequestError(f"{field_name}={reprlib.repr(value)} is not allowed: {allowed}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _as_float(value: Any) -> float | None:
    """The value as a finite float, or None where it is none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _check_token_ids(field_name: str, ids: Iterable[Any]) -> None:
    for token_id in ids:
        if not _is_integer(token_id) or token_id < 0:
            _refuse(field_name, token_id, "token ids are integers of at least 0")
