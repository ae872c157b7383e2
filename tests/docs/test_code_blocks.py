"""Every code block of README.md, CONTRIBUTING.md, docs/*.md and training/README.md does what it says.

* ``python``: all blocks of a document are run in their order, in one namespace, as a reader would paste them.
* ``sh``, ``bash``, ``console``, and blocks without a language that begin with a known program: the commands of
  ``tetrad`` are read by its own parser and run in this process, with ``bundled`` for ``MODEL`` and a file
  ``prompts.jsonl``. What ``PARSED_ONLY`` lists is only read. So is a command with another placeholder in capitals. Of
  other programs what a file can tell is checked: targets of ``make``, extras of ``pip``, flags of a script.
* ``json`` is parsed. ``text`` is not code.
* In the running text, ``tetrad ...`` between backticks must name commands and flags that there are.

A block that fits none of these fails: name its language, or add it to a table below with the reason.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib

import pytest
from tests.docs.code_blocks import DOCUMENTS, ROOT, Block, Command, blocks_of, commands_of, inline_code

from tetrad.cli.main import build_parser, main

PARSED_ONLY = {
    "tetrad bench": "measures: minutes on a GPU, and figures of a busy machine are none",
    "tetrad eval": "minutes on a CPU",
    "tetrad demo": "minutes on a busy CPU",
}
"""What begins like this is read, not run."""

COMPILED_ONLY: dict[str, str] = {}
"""A line of a Python block that is not run, and why; the block must still compile."""

NO_CODE = {"Scheduler.schedule()": "a picture of a step"}
"""The beginning of a block without a language that is no code."""

PYTHON, SHELL = ("python", "py"), ("sh", "bash", "shell", "console")
PROGRAMS = ("tetrad", "make", "pip", "python", "git", "cd", "curl", "export")

ALL = [block for document in DOCUMENTS for block in blocks_of(document)]


def kind_of(block: Block) -> str:
    """ "python", "shell", "json" or "text"; "" if there is no rule for the block."""
    if block.language in PYTHON:
        return "python"
    if block.language in SHELL:
        return "shell"
    if block.language in ("json", "text"):
        return block.language
    words = block.text.split(maxsplit=1)
    first = words[0].rsplit("/", 1)[-1] if words else ""
    if not block.language and first in (*PROGRAMS, "$"):
        return "shell"
    # formulas and layouts are set off by indentation
    return "text" if not block.fenced or first.startswith(tuple(NO_CODE)) else ""


COMMANDS = [command for block in ALL if kind_of(block) == "shell" for command in commands_of(block)]


def test_there_is_a_rule():
    """A block that nothing checks goes stale without a word."""
    unruled = [f"{block.name} (language {block.language!r})" for block in ALL if not kind_of(block)]
    assert not unruled, "no rule for these; name one of python, sh, json and text, or see the tables of this test"


# ---- Python -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if "python" in map(kind_of, blocks_of(name))])
def test_python(document, tmp_path, monkeypatch):
    """The snippet of the indexer chose entries at random and nobody saw it: it was never run."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(document):
        if kind_of(block) == "python":
            run_python(block, namespace)


def run_python(block: Block, namespace: dict[str, object]) -> None:
    # lines are counted as in the document
    code = compile("\n" * (block.line - 1) + block.text, block.document, "exec")
    if not any(line in COMPILED_ONLY for line in block.text.splitlines()):
        exec(code, namespace)


def test_the_docstring_of_the_ops():
    """It shows what README shows."""
    import tetrad.ops

    [shown] = blocks_of("tetrad.ops", (tetrad.ops.__doc__ or "") + "\n")
    run_python(shown, {})
    assert shown.text.strip() in [block.text.strip() for block in blocks_of("README.md")]


# ---- shell --------------------------------------------------------------------------------------------------------


def test_something_is_found():
    """Otherwise the tests below would prove nothing."""
    assert sum(command.words[0] == "tetrad" for command in COMMANDS) > 8
    assert sum(command.words[0] in ("make", "pip", "python") for command in COMMANDS) > 5


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.block.name} {command.text}"[:70])
def test_command(command, tmp_path, monkeypatch, capsys):
    """A flag that is gone, or a command that fails as it stands, is what a new user meets first."""
    program, *arguments = command.words
    if program != "tetrad":
        check_other(command)
        return
    parse(arguments)
    if command.text.startswith(tuple(PARSED_ONLY)) or placeholders(arguments):
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The code of", "max_tokens": 2}\n', encoding="utf-8")
    code = main(["bundled" if word == "MODEL" else word for word in arguments])
    assert code == 0, capsys.readouterr().err


def parse(arguments: list[str]) -> None:
    try:
        build_parser().parse_args(arguments)
    except SystemExit as leaving:  # argparse leaves so, having said why
        if leaving.code:
            pytest.fail(f"tetrad {' '.join(arguments)} is refused")


def placeholders(arguments: list[str]) -> list[str]:
    return [word for word in arguments if re.fullmatch(r"[A-Z][A-Z0-9_.]+", word) and word != "MODEL"]


def check_other(command: Command) -> None:
    program, *arguments = command.words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in arguments:
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"make has no target {target}"
    elif program == "pip":
        check_pip(arguments)
    elif program == "python" and arguments[0].endswith(".py"):
        beside = (ROOT / command.block.document).parent / arguments[0]
        script = beside if beside.is_file() else ROOT / arguments[0]
        assert script.is_file(), f"there is no {arguments[0]}"
        # a script's options may stand in a module beside it
        source = "".join(path.read_text(encoding="utf-8") for path in sorted(script.parent.glob("*.py")))
        for flag in (word for word in arguments if word.startswith("--")):
            assert f'"{flag}"' in source, f"{arguments[0]} has no flag {flag}"
    else:
        assert program in PROGRAMS, f"{command.block.name}: no rule for {program}; see the tables of this test"


def check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in arguments:
        if word.endswith(".txt"):
            assert (ROOT / word).is_file(), f"there is no {word}"
        if extras := re.fullmatch(r"(?:\.|tetrad)\[(.+)\]", word):
            unknown = set(extras[1].split(",")) - set(project["optional-dependencies"])
            assert not unknown, f"there are no extras {unknown}"


def test_json():
    """A block of JSON is one value, or one value a line."""
    for block in ALL:
        if kind_of(block) == "json":
            try:
                json.loads(block.text)
            except json.JSONDecodeError:
                for line in block.text.splitlines():
                    json.loads(line)


# ---- in the running text ------------------------------------------------------------------------------------------

SPOKEN_OF = [
    (document, span.split())
    for document in DOCUMENTS
    if document != "docs/log.md"  # it speaks of what was
    for span in inline_code(document)
    if span.startswith("tetrad ")
]


@pytest.mark.parametrize(("document", "words"), SPOKEN_OF, ids=lambda value: " ".join(value)[:60])
def test_flags_in_the_text(document, words):
    """A sentence may leave arguments out, but its commands and flags must be there."""
    parser: argparse.ArgumentParser = build_parser()
    for word in words[1:]:
        choices = subcommands(parser)
        if choices and not word.startswith("-"):
            assert word in choices, f"{document}: there is no command {word!r}; there are {', '.join(choices)}"
            parser = choices[word]
        elif word.startswith("--"):
            flag = word.split("=")[0]
            assert flag in parser._option_string_actions, f"{document}: {parser.prog} has no flag {flag}"


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next(found, {}))


# ---- the reading itself -------------------------------------------------------------------------------------------


def test_commands_over_several_lines():
    text = 'tetrad generate M --prompt "two\nlines" --n 2   # said\n$ A=1 tetrad x \\\n  --flag y | less\n\nmake test\n'
    words = [command.words for command in commands_of(Block("", 1, "sh", text))]
    assert words == [
        ("tetrad", "generate", "M", "--prompt", "two\nlines", "--n", "2"),
        ("tetrad", "x", "--flag", "y"),
        ("make", "test"),
    ]


def test_blocks_of_a_document():
    text = "a\n\n    tetrad inspect M\n\n```python\nx = 1\n\n    y\n```\n\n```\nfoo\n```\n"
    blocks = blocks_of("d", text)
    assert [(block.line, block.language, block.fenced) for block in blocks] == [
        (3, "", False),
        (6, "python", True),
        (12, "", True),
    ]
    assert [kind_of(block) for block in blocks] == ["shell", "python", ""]


def test_a_stale_flag_is_found():
    with pytest.raises(pytest.fail.Exception, match="is refused"):
        parse(["inspect", "bundled", "--no-such-flag"])
