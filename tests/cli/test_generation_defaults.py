"""``tetrad generate`` and the model's generation_config.json: flags and lines, then the file, then our defaults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tetrad import SamplingParams
from tetrad.frontend.llm_engine import LLMEngine

ENGINE = ("--load-dummy", "--device=cpu", "--max-model-len=128", "--max-num-seqs=2", "--kv-cache-memory-gb=0.5")


@pytest.fixture
def chat_model(model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "chat"
    shutil.copytree(model, folder)
    document = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 3, "eos_token_id": [1, 40]}
    (folder / "generation_config.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The parameters with which requests reach the engine."""
    params: list[SamplingParams] = []
    add_request = LLMEngine.add_request

    def record(self, prompt, given=None, request_id=None):
        params.append(given)
        return add_request(self, prompt, given, request_id)

    monkeypatch.setattr(LLMEngine, "add_request", record)
    return params


def test_a_flag_wins_over_the_file_and_the_file_over_the_defaults(tetrad, chat_model, seen, caplog):
    """The file was not read: a chat model sampled as if it had none, and ran on behind the end of its turn."""
    run = tetrad("generate", chat_model, *ENGINE, "--prompt=a", "--top-p=0.8")
    assert run.code == 0
    assert seen == [SamplingParams(temperature=0.5, top_p=0.8, max_tokens=3)]
    (said,) = caplog.messages
    assert "generation_config.json: outputs also end at token 40; the sampling defaults are temperature 0.5" in said


def test_a_line_wins_over_flag_and_file(tetrad, chat_model, seen):
    line = json.dumps({"prompt": "a", "temperature": 0.7})
    assert tetrad("generate", chat_model, *ENGINE, "--input-jsonl=-", "--top-p=0.8", stdin=line).code == 0
    assert seen == [SamplingParams(temperature=0.7, top_p=0.8, max_tokens=3)]


def test_none_reads_no_file(tetrad, chat_model, seen, caplog):
    run = tetrad("generate", chat_model, *ENGINE, "--prompt=a", "--generation-config=none")
    assert run.code == 0
    assert seen == [SamplingParams()]
    assert caplog.messages == []


def test_a_file_that_cannot_be_followed_is_one_line(tetrad, chat_model):
    (chat_model / "generation_config.json").write_text('{"temperature": 9}')
    run = tetrad("generate", chat_model, *ENGINE, "--prompt=a")
    assert run.code == 2
    assert run.err.count("\n") == 1
    assert "temperature=9 is not allowed" in run.err
