"""Every flag of every command does something: its command reads it, its value arrives, or it is refused."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tetrad as package
from tests.cli.commands import flags_of, leaf_parsers
from tests.cli.test_flags import VALUES
from tetrad import EngineArgs
from tetrad.cli import demo, evaluate
from tetrad.cli.foreign_flags import FOREIGN_FLAGS
from tetrad.cli.parser import Parser
from tetrad.config.engine_config import EngineConfig
from tetrad.eval.recall import Answer, RecallResult, RecallSettings

TINY = ("--load-dummy", "--device=cpu", "--max-model-len=64", "--max-num-seqs=1", "--prompt-token-ids=5")
BENCH = ("--device=cpu", "--heads=1", "--head-dim=32", "--k=3", "--repeats=5", "--decode=1x5", "--only=topk")


class Recorder(argparse.Namespace):
    """A namespace that knows which of its names were asked for once the flags were parsed."""

    def __getattribute__(self, name: str) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if not name.startswith("_") and not caller.endswith("argparse.py"):
            object.__getattribute__(self, "__dict__").setdefault("_reads", set()).add(name)
        return object.__getattribute__(self, name)


@pytest.fixture
def reads(monkeypatch) -> Iterator[set[str]]:
    """The names that a command read from its parsed flags."""
    names: set[str] = set()
    parse_args = Parser.parse_args

    def recorded(self: Parser, args: Any = None, namespace: Any = None) -> Recorder:
        parsed = Recorder(**vars(parse_args(self, args, namespace)))
        parsed._reads = names
        return parsed

    monkeypatch.setattr(Parser, "parse_args", recorded)
    return names


@pytest.fixture
def short(monkeypatch):
    """What runs long is cut: the demo at its engine, recall at its measurement."""

    def leave(*_arguments: Any) -> Any:
        raise KeyboardInterrupt

    def measure(_args: EngineArgs, settings: RecallSettings, **_options: Any) -> RecallResult:
        answer = Answer("fp4", settings.lengths[0], 0.5, 0, 0, "code", "1", "1", None)
        return RecallResult(settings, 3, "cpu", [answer])

    monkeypatch.setattr(demo, "LLMEngine", leave)
    monkeypatch.setattr(evaluate, "run_recall", measure)
    monkeypatch.setattr("tetrad.bench.timing._SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr("tetrad.bench.ceilings._CPU_READ_BYTES", 1 << 20)
    monkeypatch.setattr("tetrad.bench.ceilings._CPU_SIZE", 64)


@pytest.fixture
def command_line(ids_model) -> dict[str, tuple[str, ...]]:
    """A short run of each command with no flag that it can do without."""
    return {
        "tetrad generate": ("generate", str(ids_model), *TINY),
        "tetrad inspect": ("inspect", str(ids_model)),
        "tetrad eval recall": ("eval", "recall", "--lengths=1K", "--depths=0.5"),
        "tetrad bench indexer": ("bench", "indexer", *BENCH),
        "tetrad bench staging": ("bench", "staging", "--device=cpu", "--sequences=1", "--context=1", "--steps=1"),
        "tetrad demo": ("demo", "--tokens=1K"),
    }


@pytest.mark.parametrize("name", leaf_parsers())
def test_every_flag_is_read_or_refused(name, reads, short, command_line, tetrad):
    """Recall parsed --answers and ignored it without --json. What a plain run does not read must be refused alone."""
    assert tetrad(*command_line[name]).code in (0, 130)
    unread = [action for action in flags_of(leaf_parsers()[name]) if action.dest not in reads]
    for action in unread:
        value = [] if action.nargs == 0 else ["3"]
        reads.clear()
        run = tetrad(*command_line[name], action.option_strings[0], *value)
        assert run.code == 2, f"{name} {action.option_strings[0]} is parsed and ignored"
        assert action.option_strings[0] in run.err
        assert "invalid" not in run.err, "refused for its value, which proves nothing"


ENGINE_COMMANDS = ("tetrad generate", "tetrad inspect", "tetrad eval recall")
SWITCHES = {field.name for field in dataclasses.fields(EngineArgs) if isinstance(field.default, bool)}


@pytest.mark.parametrize("name", ENGINE_COMMANDS)
def test_every_value_arrives_at_the_engine(name, command_line, tetrad, monkeypatch):
    """Recall parsed --index-cache-dtype and --max-model-len and put its own in their place."""
    arrived: list[EngineArgs] = []

    def resolve(args: EngineArgs, **_options: Any) -> Any:
        arrived.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineConfig, "resolve", resolve)
    options = {field: (f"--{field}={text}", value) for field, (text, value) in VALUES.items()}
    options |= {
        field: (f"--{'no-' if EngineArgs.__dataclass_fields__[field].default else ''}{field}", None)
        for field in SWITCHES
    }
    for field, (flag, value) in options.items():
        arrived.clear()
        code = tetrad(*command_line[name], flag).code
        if code == 2:
            assert not arrived
            continue
        wanted = value if field in VALUES else not EngineArgs.__dataclass_fields__[field].default
        assert getattr(arrived[0], field) == wanted, f"{name} {flag} is replaced without a word"


def _engine_reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The fields of ``EngineArgs`` that are read for more than a check of their type, or to copy them."""
    names: set[str] = set()
    no_use = ("_check_types", "replace", "__post_init__")

    def record(self: EngineArgs, name: str) -> Any:
        caller = sys._getframe(1).f_code
        if name in EngineArgs.__dataclass_fields__ and caller.co_name not in no_use:
            names.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(EngineArgs, "__getattribute__", record)
    return names


@pytest.mark.parametrize("name", ["tetrad generate", "tetrad inspect"])
def test_every_option_of_the_engine_is_read(name, command_line, tetrad, monkeypatch):
    """A field of ``EngineArgs`` that nothing reads would be a flag that does nothing. Recall runs the same engine."""
    names = _engine_reads(monkeypatch)
    assert tetrad(*command_line[name]).code == 0
    refused = {flag.removeprefix("--").replace("-", "_") for flag in leaf_parsers()[name].refused}
    assert names | refused >= {field.name for field in dataclasses.fields(EngineArgs)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval", "recall", "--answers"), "--answers adds to the JSON output; give --json as well"),
        (
            ("eval", "recall", "--index-cache-dtype", "fp4"),
            "does not take --index-cache-dtype: it measures the formats",
        ),
        (("eval", "recall", "--no-index-hadamard"), "does not take --no-index-hadamard: a name with -plain"),
        (("eval", "recall", "--enable_deepseek_v4_fp4_indexer"), "it measures the formats that --variants names"),
        (("eval", "recall", "--max-model-len=4K"), "does not take --max-model-len: it follows from --lengths"),
        (("eval", "recall", "--context-length=4K"), "does not take --context-length: it follows from --lengths"),
        (("eval", "recall", "--max-num-seqs=20"), "--max-num-seqs must be above --questions, at least 21"),
        (("eval", "recall", "--lengths=10M"), "does not take --max-model-len: it follows from --lengths"),
        (("demo", "--hf-overrides", "{}"), "tetrad generate bundled takes it"),
        (("demo", "--tokens", "10M"), "--tokens 10M is not possible; give at least 1K and at most"),
        (("demo", "--tokens=1K", "--question= "), "--question has no text; leave it out"),
        (("demo", "--tokens", "100"), "--tokens 100 is not possible; give at least 1K and at most"),
    ],
    ids=" ".join,
)
def test_what_a_command_sets_itself_is_refused(tetrad, monkeypatch, arguments, message):
    """With the reason; the engine's own advice for a demo that was too long was a flag that the demo lacks."""

    def leave(*_arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "LLMEngine", leave)
    monkeypatch.setattr("tetrad.eval.recall._ask", leave)  # where nothing is refused, nothing long begins
    run = tetrad(*arguments)
    assert (run.code, run.out) == (2, "")
    assert message in run.err


FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z0-9-]*(?<!-)")
SOURCE = Path(package.__file__).parent
OWN_SOURCES = {
    "tetrad generate": ("cli/generate.py", "cli/sampling_flags.py"),
    "tetrad inspect": ("cli/inspect.py",),
    "tetrad eval recall": ("cli/evaluate.py", "eval"),
    "tetrad bench indexer": ("cli/bench.py", "bench"),
    "tetrad bench staging": ("cli/bench_staging.py", "bench/staging.py"),
    "tetrad demo": ("cli/demo.py",),
}
SHARED_SOURCES = ("config", "frontend", "core", "runner", "models", "cache", "geometry", "platforms.py", "cli/flags.py")


def _named(*places: str) -> dict[str, str]:
    """Flags in the texts of these modules, docstrings left out, with the file that names them."""
    found: dict[str, str] = {}
    for place in places:
        path = SOURCE / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain:
                    flags = re.findall(r"--[a-z][a-z0-9-]+[a-z0-9]", node.value)
                    found |= dict.fromkeys(flags, str(file.relative_to(SOURCE)))
    found.pop("--recursive", None)  # of git
    return found


@pytest.mark.parametrize("name", leaf_parsers())
def test_texts_name_only_flags_that_there_are(name):
    """An error of the engine told users of the demo to give --hf-overrides, which the demo does not have.

    A command's own texts name its own flags. What the engine says may name a flag that this command refuses; then the
    refusal is added to the error.
    """
    parser = leaf_parsers()[name]
    for flag, file in _named(*OWN_SOURCES[name]).items():
        assert flag in parser.flags, f"{file} names {flag}, which {name} does not have"
    if not name.startswith("tetrad bench"):  # it builds no engine of a user's
        for flag, file in _named(*SHARED_SOURCES).items():
            assert flag in (*parser.flags, *parser.refused), f"{file} names {flag}, which {name} knows nothing of"
    for reason in set(parser.refused.values()):
        assert set(re.findall(r"--[a-z-]+", reason)) <= set(parser.flags)


@pytest.mark.parametrize("name", leaf_parsers())
def test_an_error_says_which_of_its_flags_the_command_lacks(name):
    """In either spelling, so that no advice ends at an unknown flag; and nothing is added where it has them all."""
    parser = leaf_parsers()[name]
    for flag, reason in parser.refused.items():
        note = f" ({name} does not take {flag}: {reason})"
        assert parser.note_on(f"lower {flag}") == note
        if "_" in (option := flag.lstrip("-").replace("-", "_")):
            assert parser.note_on(f"{option} 3 is above 2") == note
    assert all(parser.note_on(f"lower {flag}, the cache_dtype or top_k") == "" for flag in parser.flags)


@pytest.mark.parametrize("name", leaf_parsers())
def test_answers_to_foreign_flags_name_flags_of_the_command(name, capsys):
    """--enforce-eager was answered with --ignore-eos, --quantization with --gpu-memory-utilization."""
    parser = leaf_parsers()[name]
    for foreign in FOREIGN_FLAGS:
        for flag in foreign.names:
            if flag in parser.flags or flag in parser.refused:
                continue
            with pytest.raises(SystemExit, match="2"):
                parser.parse_args([f"{flag}=3" if flag.startswith("--") else flag])
            line, where = capsys.readouterr().err.splitlines()
            assert f"unknown flag {flag}" in line
            assert set(FLAG.findall(line)) - {flag} <= set(parser.flags), line
            assert where == f"see {name} --help"
