"""The forms in which a prompt may come, brought to one."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch

from tetrad.errors import RequestError


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids. The text beside them is not read; the output gives it back."""

    prompt_token_ids: Sequence[int] | np.ndarray | torch.Tensor
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | np.ndarray | torch.Tensor | TextPrompt | TokensPrompt

_PLAIN = "a prompt is text or a list of token ids"
_OTHERS = '(also taken: a one-dimensional array or tensor of integers, {"prompt": text}, and {"prompt_token_ids": ids})'
_KEYS = ("prompt", "prompt_token_ids")
_BYTES = (bytes, bytearray, memoryview)


class ReadPrompt(NamedTuple):
    """A prompt in its one form.

    Attributes:
        text: to be encoded where there are no ids; None where only ids were given.
        token_ids: plain integers in a list that nobody else holds; None where only text was given.
    """

    text: str | None
    token_ids: list[int] | None


def read_prompt(prompt: Any, vocab_size: int) -> ReadPrompt:
    """The text or the ids of a prompt in any of its forms.

    Raises:
        RequestError: it has none of the forms, or an id that the vocabulary lacks.
    """
    if isinstance(prompt, str):
        return ReadPrompt(str(prompt), None)
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt, vocab_size)
    return ReadPrompt(None, _token_ids(prompt, vocab_size))


def read_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of prompts: of a sequence without a single prompt the items are token ids.

    Raises:
        RequestError: it is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (np.ndarray, torch.Tensor)):
        holds_prompts = _dtype_kind(prompts) == "O" and prompts.ndim == 1
        return list(prompts) if holds_prompts else [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
        raise RequestError(f"prompts must be a prompt or a list of prompts, not {_name(prompts)}; {_PLAIN} {_OTHERS}")
    if len(prompts) and not any(_is_prompt(item) for item in prompts):
        return [prompts]
    return list(prompts)


def _is_prompt(item: Any) -> bool:
    if isinstance(item, (np.ndarray, torch.Tensor)):
        return item.ndim > 0
    return isinstance(item, (Sequence, Mapping))


def _read_mapping(prompt: Mapping[Any, Any], vocab_size: int) -> ReadPrompt:
    unknown = sorted(str(key) for key in prompt if key not in _KEYS)
    if unknown:
        hint = " (there is no chat format yet)" if {"messages", "role"} & {*unknown} else ""
        raise RequestError(f"a prompt has the unknown keys {', '.join(unknown)}{hint}; {_PLAIN} {_OTHERS}")
    text, ids = (prompt.get(key) for key in _KEYS)
    if text is None and ids is None:
        raise RequestError(f'a prompt has neither "prompt" nor "prompt_token_ids"; {_PLAIN} {_OTHERS}')
    if text is not None and not isinstance(text, str):
        raise RequestError(f'"prompt" is {_name(text)}, not text; token ids go into "prompt_token_ids"')
    if isinstance(ids, (str, Mapping)):
        raise RequestError(f'"prompt_token_ids" is {_name(ids)}, not a list of token ids; text goes into "prompt"')
    return ReadPrompt(None if text is None else str(text), None if ids is None else _token_ids(ids, vocab_size))


def _token_ids(ids: Any, vocab_size: int) -> list[int]:
    if isinstance(ids, (np.ndarray, torch.Tensor)):
        items: Sequence[Any] = _list_of_array(ids)
    elif isinstance(ids, Sequence) and not isinstance(ids, _BYTES):
        items = ids
    else:
        raise RequestError(f"{_PLAIN}, not {_name(ids)} {_OTHERS}")
    return [
        item if type(item) is int and 0 <= item < vocab_size else _token_id(place, item, vocab_size)
        for place, item in enumerate(items)
    ]


def _list_of_array(ids: np.ndarray | torch.Tensor) -> list[int]:
    if ids.ndim != 1:
        advice = "; give list(ids), one prompt a row and without padding" if ids.ndim == 2 else ""
        raise RequestError(f"token ids have one dimension, but this {_name(ids)} has {ids.ndim}{advice}")
    if len(ids) and _dtype_kind(ids) != "i":
        raise RequestError(f"token ids are integers, but this {_name(ids)} holds {ids.dtype}")
    return ids.tolist()


def _dtype_kind(values: np.ndarray | torch.Tensor) -> str:
    """ "i" for integers, "O" for objects and text, anything else for what no prompt is."""
    if isinstance(values, np.ndarray):
        return {"u": "i", "U": "O"}.get(values.dtype.kind, values.dtype.kind)
    is_integer = not (values.dtype.is_floating_point or values.dtype.is_complex or values.dtype is torch.bool)
    return "i" if is_integer else "other"


def _token_id(place: int, item: Any, vocab_size: int) -> int:
    try:
        if isinstance(item, (bool, np.bool_)) or (isinstance(item, torch.Tensor) and item.dtype is torch.bool):
            raise TypeError
        token_id = operator.index(item)
    except TypeError:
        raise RequestError(
            f"the prompt's item {place} is {reprlib.repr(item)}, not a token id; {_PLAIN} {_OTHERS}"
        ) from None
    if not 0 <= token_id < vocab_size:
        raise RequestError(f"the prompt's token id {token_id} is out of range: ids are 0 to {vocab_size - 1}")
    return token_id


def _name(value: Any) -> str:
    return type(value).__name__
