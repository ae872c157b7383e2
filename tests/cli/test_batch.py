"""Batches that end early: what is done is kept, and the same command does the rest."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tetrad.frontend.llm_engine import LLMEngine

ENGINE = ("--load-dummy", "--device=cpu", "--max-model-len=128", "--max-num-seqs=2", "--kv-cache-memory-gb=0.5")
FLAGS = (*ENGINE, "--max-tokens=3", "--ignore-eos", "--seed=5")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Seven prompts, of which the fourth is bad, and the longest to compute is the first."""
    file = tmp_path / "in.jsonl"
    records: list[dict[str, Any]] = [{"prompt": f"prompt {number}", "request_id": number} for number in range(7)]
    records[0]["max_tokens"] = 9
    records[3]["prompt"] = ""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def end_at_step(monkeypatch: pytest.MonkeyPatch, number: int, how: Any) -> None:
    """The engine's step of this number ends the command instead."""
    step, made = LLMEngine.step, 0

    def stepped(self: LLMEngine, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == number:
            how()
        return step(self, **options)

    monkeypatch.setattr(LLMEngine, "step", stepped)


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def interrupt() -> None:
    raise KeyboardInterrupt


def fail() -> None:
    raise RuntimeError("the device is gone")


def outputs(text: str) -> list[Any]:
    records = [json.loads(line) for line in text.splitlines()]
    return [(record["request_id"], record["outputs"], record["error"]) for record in records]


@pytest.mark.parametrize(("how", "code"), [(terminate, 143), (fail, None)], ids=["sigterm", "an exception"])
def test_a_batch_that_ends_early_is_taken_up(tetrad, model, lines, monkeypatch, how, code):
    """It kept nothing: no file, no line, after SIGTERM a stray hidden file. Now the rest alone is computed, with the
    same draws, and the file is what one run would have given."""
    arguments = ("generate", model, *FLAGS, "--input-jsonl", lines)
    whole = tetrad(*arguments)
    out, partial = lines.with_name("out.jsonl"), lines.with_name("out.jsonl.partial")
    with monkeypatch.context() as patch:
        end_at_step(patch, 8, how)
        if code is None:
            with pytest.raises(RuntimeError, match="the device is gone"):
                tetrad(*arguments, "--output", out)
        else:
            run = tetrad(*arguments, "--output", out)
            assert run.code == code
            assert f"2 of 7 results are kept in {partial}; the same command goes on with the rest" in run.err
            assert "interrupted" in run.err
    assert sorted(os.listdir(lines.parent)) == ["in.jsonl", "out.jsonl.partial"]
    kept = [record[0] for record in outputs(partial.read_text())]
    assert len(kept) == 2
    added: list[Any] = []
    add_request = LLMEngine.add_request
    monkeypatch.setattr(
        LLMEngine, "add_request", lambda self, *given: added.append(given[0]) or add_request(self, *given)
    )
    run = tetrad(*arguments, "--output", out)
    assert run.code == 1
    assert f"{partial} has 2 of 7 results; going on with the rest" in run.err
    assert len(added) == 5
    assert outputs(out.read_text()) == outputs(whole.out)
    assert [record[0] for record in outputs(whole.out)] == list(range(7))
    assert sorted(os.listdir(lines.parent)) == ["in.jsonl", "out.jsonl"]


def test_standard_output_gets_what_is_done(tetrad, model, lines, monkeypatch):
    """Also what waits for a prompt before it; and how many there are is said."""
    end_at_step(monkeypatch, 8, terminate)
    run = tetrad("generate", model, *FLAGS, "--input-jsonl", lines)
    assert run.code == 143
    assert [record[0] for record in outputs(run.out)] == [1, 2, 3]
    assert "3 of 7 results were written; with --output FILE a run can be taken up" in run.err


def interrupted(tetrad: Any, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    with monkeypatch.context() as patch:
        end_at_step(patch, 8, interrupt)
        assert tetrad(*arguments).code == 130


@pytest.mark.parametrize("changed", ["flags", "input", "foreign", "foreign-unended"])
def test_results_of_something_else_are_not_mixed_in(tetrad, model, lines, monkeypatch, changed):
    """Neither lost nor mixed: it is refused, until --restart says what to do."""
    out, partial = lines.with_name("out.jsonl"), lines.with_name("out.jsonl.partial")
    arguments = ["generate", model, *FLAGS, "--input-jsonl", lines, "--output", out]
    interrupted(tetrad, monkeypatch, *arguments)
    if changed == "flags":
        arguments.append("--temperature=0.5")
    elif changed == "input":
        lines.write_text(lines.read_text().replace("prompt 1", "prompt one"))
    else:
        partial.write_text("mine" + "\n" * (changed == "foreign"))
    held = partial.read_text()
    run = tetrad(*arguments)
    assert run.code == 2
    assert "give --restart to" in run.err
    assert partial.read_text() == held
    assert tetrad(*arguments, "--restart").code == 1  # the bad line
    assert len(outputs(out.read_text())) == 7
    assert not partial.exists()


def test_a_mended_line_is_done_with_the_rest(tetrad, model, lines, monkeypatch):
    """Failures are tried again. Other room for the engine, and a torn last line, change nothing."""
    out, partial = lines.with_name("out.jsonl"), lines.with_name("out.jsonl.partial")
    arguments = ["generate", model, *FLAGS, "--input-jsonl", lines, "--output", out]
    interrupted(tetrad, monkeypatch, *arguments)
    with partial.open("ab") as file:
        file.write(b'{"request_id": 6, "outp')
    lines.write_text(lines.read_text().replace('""', '"mended"'))
    run = tetrad(*arguments, "--max-num-seqs=3", "--max-num-batched-tokens=64")
    assert run.code == 0
    assert "has 2 of 7 results" in run.err
    assert [record[2] for record in outputs(out.read_text())] == [None] * 7


def test_two_runs_do_not_write_the_same_file(tetrad, model, lines, monkeypatch):
    """Its results would be doubled."""
    arguments = ("generate", model, *FLAGS, "--input-jsonl", lines, "--output", lines.with_name("out.jsonl"))
    other: list[Any] = []
    there: list[bool] = []

    def start_another() -> None:
        other.append(tetrad(*arguments))
        there.append(lines.with_name("out.jsonl.partial").exists())

    end_at_step(monkeypatch, 3, start_another)
    tetrad(*arguments)
    assert other[0].code == 2
    assert "another run writes" in other[0].err
    assert there == [True], "the refused run removed the file of the other, which held nothing yet"
    assert len(outputs(lines.with_name("out.jsonl").read_text())) == 7


def test_text_is_taken_up_too(tetrad, model, tmp_path, monkeypatch):
    """Prompts of the command line, whose results are no JSON."""
    prompts = [f"--prompt=number {number}" for number in range(4)]
    arguments = ("generate", model, *FLAGS, "--temperature=0", *prompts)
    out = tmp_path / "out.txt"
    with monkeypatch.context() as patch:
        end_at_step(patch, 5, interrupt)
        assert "2 of 4 results are kept" in tetrad(*arguments, "--output", out).err
    assert tetrad(*arguments, "--output", out).code == 0
    assert out.read_text() == tetrad(*arguments).out
    assert os.listdir(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o444])
def test_the_output_keeps_its_mode(tetrad, model, tmp_path, monkeypatch, mode):
    """A file of mode 640 became 644, and what was private could be read by all. So could what is not whole yet."""
    out, partial = tmp_path / "out.txt", tmp_path / "out.txt.partial"
    out.touch()
    out.chmod(mode)
    seen: list[int] = []
    end_at_step(monkeypatch, 2, lambda: seen.append(partial.stat().st_mode & 0o777))
    assert tetrad("generate", model, *FLAGS, "--prompt=x", "--output", out).code == 0
    assert out.stat().st_mode & 0o777 == mode
    assert seen == [mode | 0o600]


def test_failures_are_said(tetrad, model, lines):
    """The terminal said "0 tokens read, 0 written" and no word of them. A request_id hid the line's number."""
    run = tetrad("generate", model, *FLAGS, "--input-jsonl", lines)
    assert run.code == 1
    assert "tetrad: error: 1 of 7 prompts failed: line 4: the prompt is empty" in run.err
    assert outputs(run.out)[3] == (3, [], "line 4: the prompt is empty; give at least one token")
    lines.write_text('{"prompt": 5}\n{"text": "x"}\n')
    run = tetrad("generate", model, *FLAGS, "--input-jsonl", lines)
    assert "2 of 2 prompts failed; the first: line 1: a prompt is text" in run.err


def test_custom_ids_come_back(tetrad, model, tmp_path):
    """As OpenAI's batches have them."""
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}))
    run = tetrad("generate", model, *FLAGS, "--input-jsonl", file)
    assert run.code == 0
    record = json.loads(run.out)
    assert (record["custom_id"], record["request_id"]) == ("c", "c")
    assert len(record["outputs"][0]["token_ids"]) == 2


def test_restart_needs_something_to_throw_away(tetrad, model):
    run = tetrad("generate", model, *FLAGS, "--prompt=x", "--restart")
    assert run.code == 2
    assert "--restart throws away what is kept beside --output" in run.err
    run = tetrad("generate", model, *FLAGS, "--prompt=x", "--restart", "--output=/dev/null")
    assert run.code == 2
    assert "--restart: /dev/null is no ordinary file" in run.err
