"""generation_config.json: which of it is followed, for whom, and what is said about it."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.small import ABC, EOS, greedy, run, script, small_engine, small_options, write_config, write_tokenizer
from tetrad import LLM, ConfigError, SamplingParams
from tetrad.frontend.generation_config import FILE, GenerationConfig

END = ABC[2]
DOCUMENT = {
    "_from_model_config": True,
    "bos_token_id": 0,
    "eos_token_id": [EOS, END],
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 0,
    "max_new_tokens": 7,
    "transformers_version": "4.46.3",
}


def write(folder: Path, document: Any) -> Path:
    (folder / FILE).write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_config(tmp_path / "model")
    write_tokenizer(folder)
    return folder


def test_its_end_tokens_end_an_output(model):
    """Chat checkpoints name the end of a turn there alone; outputs ran on behind it."""
    built = small_engine(write(model, DOCUMENT))
    assert built.eos_token_ids == {EOS, END}
    script(built, {"it": ABC, "on": ABC, "long": ABC})
    built.add_request([70], greedy(), "it")
    built.add_request([70], greedy(ignore_eos=True), "on")
    built.add_request([70], greedy(min_tokens=5, max_tokens=5), "long")
    outputs = {name: output.outputs[0] for name, output in run(built).items()}
    assert (outputs["it"].text, outputs["it"].token_ids, outputs["it"].finish_reason) == ("ab", ABC[:3], "stop")
    assert outputs["it"].stop_reason is None
    assert outputs["on"].token_ids == ABC[:8]
    assert END not in outputs["long"].token_ids, "min_tokens excludes every token that would end the output"


def test_its_sampling_defaults_are_for_requests_that_give_none(model):
    """What a request gives stands as it is, also the fields that it left at their defaults."""
    llm = LLM(**small_options(write(model, DOCUMENT)))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.95, top_k=0, max_tokens=7)
    seen: list[SamplingParams] = []
    sequences = llm.engine._sequences
    llm.engine._sequences = lambda request: seen.append(request.params) or sequences(request)  # type: ignore[method-assign]
    llm.generate([5])
    llm.engine.add_request([5])
    llm.engine.add_requests([[5], [6]])
    run(llm.engine)
    assert seen == [llm.get_default_sampling_params()] * 4
    seen.clear()
    llm.generate([5], SamplingParams())
    assert seen == [SamplingParams()]


def test_another_folder_or_none(model, tmp_path):
    write(model, DOCUMENT)
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", {"eos_token_id": 40, "min_p": 0.1})

    def load(choice: Any) -> GenerationConfig:
        return GenerationConfig.load(model, choice)

    assert load("auto").eos_token_ids == (EOS, END)
    assert load("none") == GenerationConfig()
    assert load(other).eos_token_ids == load(str(other)).eos_token_ids == (40,)
    assert load(other).sampling_params == SamplingParams(min_p=0.1)
    built = small_engine(model, generation_config="none")
    assert built.eos_token_ids == {EOS}
    assert built.default_sampling_params == SamplingParams()


def test_a_model_without_the_file(model):
    assert GenerationConfig.load(model) == GenerationConfig()
    assert GenerationConfig.load("bundled") == GenerationConfig()


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (DOCUMENT, rf"outputs also end at token {END}; the sampling defaults are temperature 0\.6, top_p 0\.95, top_k"),
        ({"eos_token_id": [7, 5, EOS]}, r"json: outputs also end at token 5 or 7 \(--generation-config none ignores"),
        ({"max_new_tokens": 9}, r"json: the sampling defaults are max_tokens 9 \(--generation-config none"),
        ({"eos_token_id": EOS, "temperature": 1.0, "top_p": None, "num_beams": 1}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_what_it_changes_is_said_at_the_start(model, caplog, document, said):
    """Once, and only where it changes anything."""
    with caplog.at_level(logging.WARNING, "tetrad"):
        small_engine(write(model, document))
    assert len(caplog.messages) == (said is not None)
    if said is not None:
        assert re.search(said, caplog.messages[0])


BAD: list[tuple[Any, str]] = [
    ("{", r"is not readable JSON \("),
    ("[" * 100_000, r"is not readable JSON \("),
    ("[]", r"holds list, not one JSON object"),
    ({"eos_token_id": "</s>"}, r"eos_token_id: is '</s>', must be a token id or a list of them"),
    ({"eos_token_id": [1, -1]}, r"eos_token_id: is \[1, -1\], must be a token id or a list of them"),
    ({"eos_token_id": True}, r"eos_token_id: is True, must be"),
    ({"eos_token_id": 1.0}, r"eos_token_id: is 1\.0, must be"),
    ({"eos_token_id": [1, 320]}, r"eos_token_id: holds 320; the model's token ids are 0 to 319"),
    ({"temperature": 7}, r"temperature=7 is not allowed"),
    ({"top_p": "0.9"}, r"top_p='0\.9' is not allowed"),
    ({"max_new_tokens": 0}, r"max_tokens=0 is not allowed"),
]


@pytest.mark.parametrize(("document", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_file_that_cannot_be_followed(model, document, message):
    write(model, document)
    pattern = rf"(?s)generation_config\.json:? {message}.*correct the file, or .* --generation-config none$"
    with pytest.raises(ConfigError, match=pattern):
        small_engine(model)
    assert small_engine(model, generation_config="none").eos_token_ids == {EOS}


def test_a_link_to_nowhere_is_no_model_without_the_file(model, tmp_path):
    (model / FILE).symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not readable JSON"):
        small_engine(model)


@pytest.mark.parametrize("choice", ["vllm", "", "/nowhere"])
def test_a_folder_without_the_file(model, choice):
    with pytest.raises(ConfigError, match=r"generation_config '.*' is not a folder with a \S+\.json; give auto"):
        small_engine(model, generation_config=choice)
