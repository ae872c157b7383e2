"""Nothing is silent for long: text as it comes, a line that moves on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import gc
import io
import sys
import threading
import weakref
from typing import Any

import pytest

from tests.engine.small import EOS, bytes_of, script
from tetrad import EngineArgs, SamplingParams, bundled
from tetrad.cli import generate, progress
from tetrad.cli.main import main
from tetrad.cli.progress import Progress, minutes
from tetrad.eval.recall import RecallProgress, RecallSettings, Variant, run_recall
from tetrad.frontend.llm_engine import LLMEngine
from tetrad.frontend.token_meter import TokenMeter

RUN = ("--load-dummy", "--device=cpu", "--max-model-len=128", "--max-num-seqs=2", "--kv-cache-memory-gb=0.5")
FLAGS = (*RUN, "--temperature=0", "--max-tokens=5", "--ignore-eos")


class Terminal(io.StringIO):
    """Remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def test_a_terminal_has_one_line():
    """It is written over itself, cut to the width, and erased before results follow."""
    terminal, seconds = Terminal(), iter([0.0, 0.0, 7.0, 75.0])
    shown = Progress(lambda: "x" * 100, stream=terminal, clock=lambda: next(seconds))
    with shown:
        shown.show()
        shown.hide()
        shown.show()
    assert terminal.writes == ["\r\x1b[K" + "x" * 79, "\r\x1b[K"]


def test_a_pipe_has_lines():
    pipe, seconds = io.StringIO(), iter([0.0, 0.0, 60.0, 3725.0])
    with Progress(lambda: "3 of 7", stream=pipe, clock=lambda: next(seconds)) as shown:
        shown.show()
        shown.hide()
        shown.show()
    assert pipe.getvalue() == "3 of 7, 1:00\n3 of 7, 1:02:05\n"


def test_the_line_comes_whatever_the_command_does(monkeypatch):
    """A single step may take minutes, in which nothing was shown."""
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.001)
    seen = threading.Event()

    def state() -> str:
        seen.set()
        return "busy"

    with Progress(state, stream=io.StringIO()):
        assert seen.wait(timeout=60)


def test_another_bar_on_the_terminal():
    terminal = Terminal()
    with Progress(lambda: "x", rewrite=False, stream=terminal) as shown:
        shown.show()
    assert terminal.writes == []


def test_elapsed_time():
    assert [minutes(seconds) for seconds in (0.9, 59, 60, 3599, 36061)] == ["0:00", "0:59", "1:00", "59:59", "10:01:01"]


@pytest.fixture
def scripted(monkeypatch):
    """The engine's first request writes "héllo" and ends."""

    def built(*arguments: Any, **options: Any) -> LLMEngine:
        engine = LLMEngine(*arguments, **options)
        script(engine, {"request-0": [*bytes_of("héllo"), EOS]})
        return engine

    monkeypatch.setattr(generate, "LLMEngine", built)


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_text_comes_as_it_is_written(model, monkeypatch, capsys, scripted, flags):
    """A terminal showed "0 %", and then all of the text at once."""
    out = Terminal() if not flags else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", str(model), *RUN, *flags, "--temperature=0", "--max-tokens=9", "--prompt=x"]) == 0
    assert out.getvalue() == "héllo\n"
    if not flags:
        assert out.writes == ["h", "é", "l", "l", "o", "\n"]  # type: ignore[union-attr]
    assert "1 tokens read, 7 written in" in capsys.readouterr().err


def test_text_at_once(model, monkeypatch, scripted):
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", str(model), *RUN, "--no-stream", "--temperature=0", "--prompt=x"]) == 0
    assert out.writes == ["héllo\n"]


def test_ids_come_one_by_one(ids_model, monkeypatch, tetrad):
    arguments = ("generate", ids_model, *FLAGS, "--prompt-token-ids=5,6")
    assert tetrad(*arguments, "--stream").out == tetrad(*arguments).out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--prompt=a", "--prompt=b"), "several prompts"),
        (("--prompt=a", "--n=2", "--temperature=1"), "--n"),
        (("--prompt=a", "--json"), "JSON"),
        (("--prompt=a", "--output=f"), "--output"),
    ],
)
def test_what_does_not_go_with_streaming(tetrad, model, flags, reason):
    """A flag that would be ignored is refused."""
    run = tetrad("generate", model, *FLAGS, *flags, "--stream")
    assert run.code == 2
    assert f"as it comes; it does not go with {reason}" in run.err


def test_a_refused_prompt_is_not_an_empty_line(tetrad, model):
    run = tetrad("generate", model, *FLAGS, "--stream", "--prompt=")
    assert (run.code, run.out) == (1, "")
    assert "tetrad: error: prompt 0: the prompt is empty" in run.err


def test_an_interrupted_text_ends_its_line(tetrad, model, monkeypatch):
    """So that the shell's own prompt starts on a line of its own."""
    step, made = LLMEngine.step, []

    def interrupted(self: LLMEngine, **options: Any) -> Any:
        made.append(1)
        if len(made) == 4:
            raise KeyboardInterrupt
        return step(self, **options)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    run = tetrad("generate", model, *FLAGS, "--stream", "--prompt=x")
    assert run.code == 130
    assert run.out.endswith("\n")


def test_a_batch_counts_tokens(tetrad, model, shown):
    """It counted prompts alone: nothing moved until the first was done."""
    assert tetrad("generate", model, *FLAGS, "--prompt=aaa", "--prompt=bb", "--prompt=c").code == 0
    assert shown[0] == "0 of 3 prompts done, 5 of at most 21 tokens"
    assert "2 of 3 prompts done" in shown[-1]
    assert len(set(shown)) == len(shown)


def test_recall_counts_tokens():
    """A pipe got nothing for 20 minutes; a terminal's bar stood at 0 until the first answers, and then jumped."""
    settings = RecallSettings(lengths=(1024,), depths=(0.5,), questions=2, variants=(Variant.parse("fp4"),))
    state, seen = RecallProgress(), []
    step = LLMEngine.step

    def stepped(self: LLMEngine, **options: Any) -> Any:
        result = step(self, **options)
        seen.append((state.doing, state.done, state.tokens))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLMEngine, "step", stepped)
        run_recall(EngineArgs(model=bundled.NAME, device="cpu"), settings, progress=state)
    assert (state.questions, state.done, state.doing) == (2, 2, "fp4 at 1024 tokens")
    tokens = [count for _, _, count in seen]
    assert tokens[0] > 0
    assert tokens == sorted(set(tokens))
    assert state.tokens == tokens[-1], "the tokens of an engine that is gone still count"


def test_a_long_step_is_counted_layer_by_layer(model):
    """A prompt of one step stood at 0 until all of it was read."""
    engine = LLMEngine(EngineArgs(model=str(model), load_format="dummy", device="cpu", max_model_len=128))
    meter, seen = TokenMeter(engine), []
    for layer in engine.runner.model.layers:
        layer.register_forward_hook(lambda *_: seen.append(meter.tokens))
    engine.add_request(list(range(2, 37)), SamplingParams(max_tokens=2, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
    assert seen == [35 // 3, 70 // 3, 35, 35, 35, 36]
    assert meter.tokens == engine.computed_tokens == 36


def test_the_meter_does_not_keep_the_engine(model):
    """The next engine of a measurement needs its memory, at once and not when garbage is collected."""
    engine = LLMEngine(EngineArgs(model=str(model), load_format="dummy", device="cpu", max_model_len=128))
    meter, gone = TokenMeter(engine), weakref.ref(engine.runner.model)
    gc.disable()
    try:
        del meter, engine
        assert gone() is None
    finally:
        gc.enable()
