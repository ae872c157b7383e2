from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.small import write_config, write_tokenizer
from tetrad.cli.main import main
from tetrad.cli.progress import Progress
from tetrad.frontend.llm_engine import LLMEngine


class Run(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a byte-level tokenizer; its weights are dummies."""
    path = write_config(tmp_path_factory.mktemp("models") / "text")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def ids_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a tokenizer."""
    return write_config(tmp_path_factory.mktemp("models") / "ids-only")


@pytest.fixture
def tetrad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run a command in this process, with a text (or nothing) on its standard input."""

    def run(*arguments: object, stdin: str = "") -> Run:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as leaving:  # argparse leaves so
            code = int(leaving.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Run(code, out, err)

    return run


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the line of progress would say behind each step of the engine."""
    texts: list[str] = []
    current: list[Progress] = []
    enter, step = Progress.__enter__, LLMEngine.step

    def entered(self: Progress) -> Progress:
        current.append(self)
        return enter(self)

    def stepped(self: LLMEngine, **options: Any) -> Any:
        result = step(self, **options)
        texts.append(current[-1]._state())
        return result

    monkeypatch.setattr(Progress, "__enter__", entered)
    monkeypatch.setattr(LLMEngine, "step", stepped)
    return texts
