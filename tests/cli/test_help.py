"""Help and tables as a newcomer reads them: texts, defaults, plain group names, examples that run, 100 columns."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from tests.cli.commands import all_parsers, flags_of, leaf_parsers
from tests.released import flash_document
from tetrad import __version__
from tetrad.__main__ import run as run_command
from tetrad.cli.main import build_parser
from tetrad.cli.parser import HELP_WIDTH
from tetrad.cli.signals import INTERRUPTED
from tetrad.eval import report
from tetrad.eval.recall import Answer, RecallResult, RecallSettings

PLAIN_TITLES = {
    "arguments",
    "options",
    "commands",
    "model",
    "number formats",
    "lengths, batches and memory",
    "prompts (standard input where none is given)",
    "sampling",
    "what to ask",
    "what to measure",
    "what to compare",
    "output",
    "results",
    "selection",
}


@pytest.mark.parametrize("name", all_parsers())
def test_every_flag_has_a_text(name):
    """Eleven sampling flags had none."""
    for action in all_parsers()[name]._actions:
        texts = [choice.help for choice in getattr(action, "_choices_actions", ())] or [action.help]
        assert all(texts), action.option_strings or action.dest


@pytest.mark.parametrize("name", leaf_parsers())
def test_every_flag_with_a_value_tells_its_default(name):
    """But for ways to give a prompt and the place of the output, where the text says what happens without."""
    parser = leaf_parsers()[name]
    formatter = parser._get_formatter()
    without = {"model", "prompt_file", "prompt_token_ids", "input_jsonl", "output"}
    for action in flags_of(parser):
        if action.nargs != 0 and action.dest not in without:
            assert re.search(r"\bdefault\b", formatter._expand_help(action)), action.option_strings


@pytest.mark.parametrize("name", all_parsers())
def test_groups_have_plain_names(name):
    """They were once called what, whom and how."""
    groups = [group for group in all_parsers()[name]._action_groups if group._group_actions]
    assert {group.title for group in groups} <= PLAIN_TITLES


@pytest.mark.parametrize("name", all_parsers())
def test_help_has_the_exit_codes_and_fits(name, monkeypatch):
    """In a terminal of any width at most 100 columns, and fewer where it has fewer."""
    monkeypatch.setenv("COLUMNS", "300")
    text = all_parsers()[name].format_help()
    assert text.startswith(f"usage: {name} ")
    assert len(text.splitlines()[0]) < 60, "the usage listed every flag"
    assert "exit codes:" in text
    assert max(map(len, text.splitlines())) <= HELP_WIDTH
    monkeypatch.setenv("COLUMNS", "80")
    own = text[: text.index("examples:")] if "examples:" in text else ""
    narrow = all_parsers()[name].format_help().split("examples:")[0]
    assert not own or max(map(len, narrow.splitlines())) <= 80


@pytest.mark.parametrize("name", leaf_parsers())
def test_examples_are_accepted(name):
    """Each one parses, and runs the command that it stands under."""
    parser = leaf_parsers()[name]
    assert len(parser.examples) >= 3
    for example in parser.examples:
        words = shlex.split(example)
        assert example.startswith(name)
        assert build_parser().parse_args(words[1:]).run is parser.get_default("run")
        assert f"  {example}\n" in parser.format_help()


def test_python_m():
    """``python -m tetrad`` is the command where its script is not on the path; it once could not be executed."""
    run = subprocess.run([sys.executable, "-m", "tetrad", "--version"], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, f"tetrad {__version__}\n", "")


class _Interrupting:
    """Ctrl-C while a module is imported."""

    def find_spec(self, name: str, *_arguments: object) -> None:
        if name == "tetrad.cli.main":
            raise KeyboardInterrupt


@pytest.mark.parametrize("closed", [False, True], ids=["", "stderr-closed"])
def test_interrupted_imports(monkeypatch, capsys, closed):
    """The imports take seconds; Ctrl-C in them was a traceback of thirty lines."""
    monkeypatch.delitem(sys.modules, "tetrad.cli.main")
    monkeypatch.setattr(sys, "meta_path", [_Interrupting(), *sys.meta_path])
    if closed:
        monkeypatch.setattr(sys, "stderr", None)
    assert run_command() == INTERRUPTED
    assert closed or capsys.readouterr().err == "tetrad: interrupted\n"


def _widest(text: str) -> str:
    return max(text.splitlines(), key=len)


def test_the_report_of_a_model_fits(tetrad, tmp_path):
    """It names the kinds of attention in full."""
    (tmp_path / "config.json").write_text(json.dumps(flash_document()))
    run = tetrad("inspect", tmp_path, "--device=cpu")
    text = "\n".join(run.out.splitlines()[1:])  # the first line is the folder
    assert len(_widest(text)) <= HELP_WIDTH, _widest(text)
    for words in ("compressed sparse attention", "heavily compressed attention", "sliding-window attention"):
        assert words in text


def test_the_table_of_a_benchmark_fits(tetrad, monkeypatch):
    """It was 117 columns wide and more, with header lines of 157."""
    monkeypatch.setattr("tetrad.bench.timing._SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr("tetrad.bench.ceilings._CPU_READ_BYTES", 1 << 20)
    monkeypatch.setattr("tetrad.bench.ceilings._CPU_SIZE", 64)
    sizes = ("--heads=4", "--head-dim=64", "--k=30", "--repeats=5", "--decode=3x100,1x10", "--dtypes=fp4,bf16")
    run = tetrad("bench", "indexer", "--device=cpu", *sizes, "--backend=reference")
    assert run.code == 0, run.err
    assert len(_widest(run.out)) <= HELP_WIDTH, _widest(run.out)


@pytest.mark.parametrize("depths", [(0.5,), (0.1, 0.3, 0.5, 0.7, 0.9), tuple(k / 12 for k in range(13))])
def test_the_table_of_recall_fits(depths):
    """Columns are under their heads also where every figure has its most digits and there are many depths."""
    settings = RecallSettings(lengths=(131072,), depths=depths, questions=2)
    result = RecallResult(settings, 2048, "NVIDIA H200")
    for variant in ("bf16", "fp4-plain"):
        for depth in depths:
            for question in range(2):
                got = "1" if variant == "bf16" else "2"
                result.answers.append(Answer(variant, 131072, depth, 0, question, "code", "1", got, 1.0))
    table = report.table(result)
    assert len(_widest(table)) <= HELP_WIDTH, _widest(table)
    assert "-100.00 [-100.00, -100.00]" in table
    head = next(line for line in table.splitlines() if " at " in line)
    last = table.splitlines()[-1]
    assert len(last) == len(head)
    assert last.endswith("   0.0" * len(depths))
