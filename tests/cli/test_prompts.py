"""Prompts as people have them: bytes of any kind, and the forms of a line of JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tetrad import SamplingParams
from tetrad.cli.prompts import Item, items_of_lines, text_of

DEFAULTS = SamplingParams(temperature=0, max_tokens=5)


def items(*lines: bytes | dict[str, Any], seed: int | None = None) -> list[Item]:
    data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return list(items_of_lines(data, DEFAULTS, seed))


def openai(body: dict[str, object], **changes: object) -> dict[str, object]:
    return {"custom_id": "c-7", "method": "POST", "url": "/v1/completions", "body": {"model": "m"} | body} | changes


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": [5, 6], "max_tokens": 3},
        {"prompt_token_ids": [5, 6], "max_tokens": 3},
        openai({"prompt": [5, 6], "max_tokens": 3, "stop": None, "stream": False, "echo": False, "user": "u"}),
        {"custom_id": 7, "body": {"prompt": [5, 6], "max_tokens": 3}},
        {"custom_id": 7, "body": {"prompt": [[5, 6]], "max_tokens": 3}},
    ],
    ids=str,
)
def test_forms_of_a_line(line):
    """Only "prompt" was known; a batch as OpenAI has it was refused key by key, and so was a list of one prompt."""
    (item,) = items(line)
    assert item.error is None
    assert (item.prompt, item.params.max_tokens, item.params.temperature) == ([5, 6], 3, 0)
    assert item.name == line.get("custom_id", "line 1")
    assert item.custom_id == line.get("custom_id")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, '"messages" need a chat encoding, and tetrad has none yet'),
        (openai({"messages": []}, url="/v1/chat/completions"), 'url /v1/chat/completions: "messages" need a chat'),
        (openai({"messages": []}), '"messages" need a chat encoding'),
        (openai({"input": "x"}, url="/v1/embeddings"), 'url "/v1/embeddings" is not served; give /v1/completions'),
        (openai({"prompt": "x"}, method="GET"), 'method "GET" is not POST'),
        (openai({"prompt": "x"}, priority=3), "unknown keys priority beside a body; known are custom_id, method, url"),
        (openai({"prompt": "x", "stream": True}), "stream=true is not possible in a body; leave it out"),
        (openai({"prompt": "x", "best_of": 3}), "best_of=3 is not possible"),
        (openai({"prompt": "x", "request_id": "a"}), "unknown keys request_id; known are prompt, stream"),
        (openai({"model": "m"}), 'give one of "prompt" and "prompt_token_ids"'),
        ({"custom_id": "a", "body": [1]}, "body is not a JSON object"),
        ({"text": "x"}, "this one has 'text'"),
        ({}, "this one has no keys"),
        ({"request_id": "a", "text": "b"}, "this one has 'request_id', 'text'"),
        ({"prompt": "x", "prompt_token_ids": [5]}, "not both"),
        ({"prompt": "x", "top": 1}, "known are prompt, prompt_token_ids, messages, request_id, custom_id, frequency_"),
        ({"prompt_token_ids": "x"}, "prompt_token_ids is a list of token ids, not str"),
        ({"prompt": ["one", "two"]}, "write a line for each of several prompts"),
        ({"prompt": {"text": "x"}}, "not an object"),
        ({"prompt": "x", "request_id": 1.5}, "request_id 1.5 is neither a string nor an integer"),
        ({"prompt": "x", "request_id": True}, "request_id true is neither"),
        ({"prompt": "x", "custom_id": ["a"]}, 'custom_id ["a"] is neither'),
        (b"caf\xe9", "not UTF-8 ('utf-8' codec can't decode byte 0xe9"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_line_that_cannot_be_used(line, message):
    """It fails alone, with its number and with what is known."""
    before, bad, after = items({"prompt": "a"}, line, {"prompt": "b"})
    assert before.error is after.error is None
    assert bad.error.startswith("line 2: ")
    assert message in bad.error


def test_bytes_around_the_lines():
    """A byte-order mark made line 1 "not JSON"; blank lines count, and line ends of either kind end a line."""
    found = items(b'\xef\xbb\xbf{"prompt": "a"}\r', b"", b"  \r", b'{"prompt": "b\xe2\x80\xa8"}')
    assert [(item.line, item.prompt, item.error) for item in found] == [(1, "a", None), (4, "b\u2028", None)]


def test_a_prompt_file_is_its_bytes():
    """Its CRLF became LF, so that the same bytes gave other tokens than from standard input."""
    assert text_of(b"\xef\xbb\xbfa\r\nb\r", "f") == "a\r\nb\r"


def test_the_line_decides_its_draws():
    """With the engine's seed alone, a line that was refused or done already shifted the draws of all that followed."""
    lines = ({"prompt": "a"}, {"prompt": "b", "seed": 4}, {"prompt": "c"})
    first, own, third = items(*lines, seed=1)
    assert own.params.seed == 4
    assert first.params.seed != third.params.seed
    assert items({}, b"", lines[2], seed=1)[-1].params.seed == third.params.seed
    assert items(*lines, seed=-1)[0].params.seed != first.params.seed
    assert items(*lines)[0].params.seed is None
