"""What is wrong with a request, said before it enters the engine; other requests go on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.small import assert_idle, run, small_engine, small_options
from tetrad import LLM, LLMEngine, RequestError, SamplingParams

FORMS = r"a prompt is text or a list of token ids"
"""What is taken besides stands behind it, in brackets."""

PROMPTS: list[tuple[Any, str]] = [
    ("", r"the prompt is empty; give at least one token"),
    ([], r"the prompt is empty"),
    (None, FORMS + r", not NoneType"),
    (7, FORMS + r", not int"),
    (b"bytes", FORMS + r", not bytes"),
    ({5, 6}, FORMS + r", not set"),
    ((i for i in (5, 6)), FORMS + r", not generator"),
    ({}, r'a prompt has neither "prompt" nor "prompt_token_ids"; ' + FORMS),
    ({"prompt": None}, r'a prompt has neither "prompt" nor "prompt_token_ids"; ' + FORMS),
    ({"prompt": ""}, r"the prompt is empty; give at least one token"),
    ({"prompt_token_ids": []}, r"the prompt is empty; give at least one token"),
    ({"prompt": [5, 6]}, r'"prompt" is list, not text; token ids go into "prompt_token_ids"'),
    ({"prompt_token_ids": "wor"}, r'"prompt_token_ids" is str, not a list of token ids; text goes into "prompt"'),
    ({"prompt_token_ids": [5, "6"]}, r"the prompt's item 1 is '6', not a token id; " + FORMS),
    ({"prompt_token_ids": {"prompt": "x"}}, r'"prompt_token_ids" is dict, not a list of token ids'),
    ({"prompt_token_ids": 5}, FORMS + r", not int"),
    ({"prompt": 5, "prompt_token_ids": [5]}, r'"prompt" is int, not text'),
    ({"text": "x", 7: "y"}, r"a prompt has the unknown keys 7, text; " + FORMS),
    ({"messages": []}, r"a prompt has the unknown keys messages \(there is no chat format yet\); " + FORMS),
    (
        {"role": "user", "content": "x"},
        r"a prompt has the unknown keys content, role \(there is no chat format yet\); ",
    ),
    ({"input_ids": [5], "attention_mask": [1]}, r"a prompt has the unknown keys attention_mask, input_ids; " + FORMS),
    (np.array([[5, 6], [7, 8]]), r"this ndarray has 2; give list\(ids\), one prompt a row and without padding"),
    (np.array(5), r"token ids have one dimension, but this ndarray has 0$"),
    (np.array([5.0]), r"token ids are integers, but this ndarray holds float64"),
    (np.array([True]), r"token ids are integers, but this ndarray holds bool"),
    (np.array(["a"]), r"token ids are integers, but this ndarray holds <U1"),
    (np.array([5, -1]), r"token id -1 is out of range: ids are 0 to 319"),
    (np.array([]), r"the prompt is empty"),
    (torch.zeros(2, 2, dtype=torch.int64), r"this Tensor has 2; give list\(ids\), one prompt a row"),
    (torch.tensor(5), r"token ids have one dimension, but this Tensor has 0$"),
    (torch.tensor([5.0]), r"token ids are integers, but this Tensor holds torch\.float32"),
    (torch.tensor([True]), r"token ids are integers, but this Tensor holds torch\.bool"),
    (torch.tensor([5, 320]), r"token id 320 is out of range: ids are 0 to 319"),
    ([torch.tensor(True)], r"the prompt's item 0 is tensor\(True\), not a token id; " + FORMS),
    ([torch.tensor(5.0)], r"the prompt's item 0 is tensor\(5\.\), not a token id"),
    ([torch.tensor([5, 6])], r"the prompt's item 0 is tensor\(\[5, 6\]\), not a token id"),
    ([np.bool_(True)], r"the prompt's item 0 is .*True.*, not a token id"),
    ([np.float32(5)], r"the prompt's item 0 is .*5\.0.*, not a token id"),
    ([1, "2"], r"the prompt's item 1 is '2', not a token id; " + FORMS),
    ([1, 2.0], r"the prompt's item 1 is 2\.0"),
    ([True], r"the prompt's item 0 is True"),
    ([[1, 2]], r"the prompt's item 0 is \[1, 2\]"),
    ([5, -1], r"token id -1 is out of range: ids are 0 to 319"),
    ([320], r"token id 320 is out of range: ids are 0 to 319"),
    ([10**30], r"token id 10{30} is out of range"),
    ([5] * 512, r"maximum context length is 512 tokens\. However, your prompt contains 512 input tokens.*shorten"),
    ("a" * 600, r"maximum context length is 512 tokens\. However, your prompt contains 600 input tokens"),
    ("half \ud800 a character", r"the text has a lone surrogate"),
]

PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, r"n=0 is not allowed: give an integer from 1 to 128"),
    ({"n": 129}, r"n=129 is not allowed"),
    ({"n": 2, "temperature": 0}, r"n=2 is not allowed: with temperature 0 all choices would be the same"),
    ({"temperature": -0.1}, r"temperature=-0\.1 is not allowed: give a finite number from 0"),
    ({"temperature": 2.5}, r"temperature=2\.5"),
    ({"temperature": float("nan")}, r"temperature=nan"),
    ({"temperature": "hot"}, r"temperature='hot'"),
    ({"temperature": True}, r"temperature=True"),
    ({"top_p": 0}, r"top_p=0 is not allowed: give a number above 0"),
    ({"top_p": 1.01}, r"top_p=1\.01"),
    ({"top_k": -2}, r"top_k=-2 is not allowed: give an integer of at least -1"),
    ({"top_k": 1.5}, r"top_k=1\.5"),
    ({"min_p": -0.1}, r"min_p=-0\.1 is not allowed: give a number from 0"),
    ({"presence_penalty": 2.1}, r"presence_penalty=2\.1 is not allowed: give a number from -2 to 2"),
    ({"frequency_penalty": float("inf")}, r"frequency_penalty=inf"),
    ({"repetition_penalty": 0}, r"repetition_penalty=0 is not allowed: give a finite number above 0"),
    ({"seed": 2**63}, r"seed=\d+ is not allowed: give None or a signed 64-bit integer"),
    ({"seed": 1.0}, r"seed=1\.0"),
    ({"stop": ""}, r"stop='' is not allowed: give a string or a list of at most 4 strings, none of them empty"),
    ({"stop": ["a"] * 5}, r"stop=.*at most 4 strings"),
    ({"stop": [5]}, r"stop=\[5\]"),
    ({"stop": "\udc00"}, r"stop=.*a lone surrogate"),
    ({"stop_token_ids": 5}, r"stop_token_ids=5 is not allowed: give a list of token ids"),
    ({"stop_token_ids": [-1]}, r"stop_token_ids=-1 is not allowed"),
    ({"stop_token_ids": "12"}, r"stop_token_ids='12'"),
    ({"max_tokens": 0}, r"max_tokens=0 is not allowed: give an integer of at least 1, or None"),
    ({"max_tokens": "5"}, r"max_tokens='5'"),
    ({"min_tokens": -1}, r"min_tokens=-1"),
    ({"min_tokens": 17}, r"min_tokens=17 is not allowed: give at most max_tokens, which is 16"),
    ({"ignore_eos": 1}, r"ignore_eos=1 is not allowed: give true or false"),
    ({"logprobs": 21}, r"logprobs=21 is not allowed: give None, or an integer from 0"),
    ({"logprobs": True}, r"logprobs=True"),
    ({"logit_bias": [5]}, r"logit_bias=\[5\] is not allowed: give a mapping of token id to bias"),
    ({"logit_bias": {5: 101}}, r"logit_bias\[5\]=101 is not allowed: give a number from -100 to 100"),
    ({"logit_bias": {"five": 1}}, r"logit_bias='five' is not allowed: token ids are integers"),
]

REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"params": {"temperature": 0}}, r"params must be SamplingParams, not dict"),
    ({"params": 0}, r"params must be SamplingParams, not int"),
    ({"params": SamplingParams(stop_token_ids=[320])}, r"stop_token_ids=320 is not allowed: .* ids are 0 to 319"),
    ({"params": SamplingParams(logit_bias={400: 1})}, r"logit_bias=400 is not allowed: .* ids are 0 to 319"),
    ({"request_id": "running"}, r"request_id 'running' is in use by an unfinished request; choose another"),
    ({"request_id": 5}, r"request_id must be a string, not int"),
    ({"request_id": ["a"]}, r"request_id must be a string, not list"),
]


def spelled(value: Any) -> str:
    """A test's name for a value: without addresses, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", ascii(value))[:40]


@pytest.fixture(scope="module")
def engine(text_folder: Path) -> LLMEngine:
    return small_engine(text_folder)


def still_serves(engine: LLMEngine) -> None:
    """The refused request left nothing behind, and the next one is served."""
    assert set(engine.requests) <= {"running"}
    name = engine.add_request([5, 6], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert len(run(engine)[name].outputs[0].token_ids) == 2
    assert_idle(engine)


@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=spelled)
def test_prompts(engine, prompt, message):
    with pytest.raises(RequestError, match=f"(?s){message}"):
        engine.add_request(prompt)
    still_serves(engine)


def test_abort_takes_one_id(engine):
    """A list of ids, as other engines take it, ended in Python's own error about hashing."""
    with pytest.raises(RequestError, match="the id of one request, not list; call it for each"):
        engine.abort(["a"])
    still_serves(engine)


@pytest.mark.parametrize("prompt", [5, {"text": "x"}, ["a"], {}], ids=str)
def test_wrong_forms_name_all_the_right_ones(engine, prompt):
    with pytest.raises(RequestError) as caught:
        engine.add_request(prompt)
    for form in ("text", "list of token ids", "array or tensor", '{"prompt": text}', '{"prompt_token_ids": ids}'):
        assert form in str(caught.value)


@pytest.mark.parametrize(("parameters", "message"), PARAMETERS, ids=spelled)
def test_parameters(parameters, message):
    """Refused before there is a request."""
    with pytest.raises(RequestError, match=f"(?s)^{message}"):
        SamplingParams(**parameters)


@pytest.mark.parametrize(("request_", "message"), REQUESTS, ids=spelled)
def test_requests(engine, request_, message):
    engine.add_request([9], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), "running")
    engine.step()
    with pytest.raises(RequestError, match=f"(?s){message}"):
        engine.add_request([5], **request_)
    still_serves(engine)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("text", None, r"prompts must be a list, not str"),
        ([[5], [999]], None, r"prompt 1: the prompt's token id 999 is out of range"),
        ([[5], "x" * 512], None, r"prompt 1: This model's maximum context length"),
        ([[5], [6]], [SamplingParams()], r"there are 2 prompts but 1 sampling_params; give one for all or one each"),
        ([[5], [6]], [SamplingParams(), None], r"prompt 1: params must be SamplingParams, not NoneType"),
        ([[5]], {"n": 1}, r"params must be SamplingParams or a list of them, not dict"),
        ([[5]], 0.5, r"params must be SamplingParams or a list of them, not float"),
    ],
)
def test_several_requests(engine, prompts, params, message):
    """All or nothing: the good ones before the bad one are not queued either."""
    with pytest.raises(RequestError, match=message):
        engine.add_requests(prompts, params)
    assert not engine.has_unfinished_requests
    still_serves(engine)


PROMPT_LISTS: list[tuple[Any, str]] = [
    *((prompts, r"prompts must be a prompt or a list of prompts, not \w+; " + FORMS) for prompts in (5, None, b"x")),
    ((prompt for prompt in ("a", "b")), r"prompts must be a prompt or a list of prompts, not generator; " + FORMS),
    (SamplingParams(), r"prompts must be a prompt or a list of prompts, not SamplingParams; " + FORMS),
    ({"a": 1}, r"prompt 0: a prompt has the unknown keys a; " + FORMS),
    ([[5], {"text": "x"}], r"prompt 1: a prompt has the unknown keys text; " + FORMS),
    ([[5], 6], r"prompt 1: " + FORMS + r", not int"),
    ([None, None], r"prompt 0: the prompt's item 0 is None, not a token id; " + FORMS),
    (np.array([[5, 6]]), r"prompt 0: token ids have one dimension, but this ndarray has 2; give list\(ids\)"),
    (np.array(None), r"prompt 0: token ids have one dimension, but this ndarray has 0"),
    (torch.tensor([[5, 6]]), r"prompt 0: token ids have one dimension, but this Tensor has 2; give list\(ids\)"),
]


@pytest.fixture(scope="module")
def llm(text_folder: Path) -> LLM:
    return LLM(**small_options(text_folder))


@pytest.mark.parametrize(("prompts", "message"), PROMPT_LISTS, ids=spelled)
def test_what_generate_does_not_take(llm, prompts, message):
    with pytest.raises(RequestError, match=f"(?s)^{message}"):
        llm.generate(prompts)
    still_serves(llm.engine)


@pytest.mark.parametrize("use_tqdm", [None, 1, "yes", SamplingParams()], ids=lambda value: ascii(value)[:12])
def test_what_use_tqdm_does_not_take(llm, use_tqdm):
    with pytest.raises(RequestError, match=r"use_tqdm must be true, false or a class like tqdm, not \w+"):
        llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm)
    still_serves(llm.engine)
