"""The code blocks of a document, and the commands in a shell block."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = tuple(
    str(path.relative_to(ROOT))
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "training" / "README.md",
    )
)

_FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}[^\n]*\n|\n(?= {4}))+")
_SPOKEN_TO_THE_SHELL = ("|", "||", "&&", ";", ">", ">>", "2>", "<", "&")


@dataclass(frozen=True)
class Block:
    """A code block: where it stands, the language that its fence names ("" without one, or without a fence), and its
    text."""

    document: str
    line: int
    language: str
    text: str
    fenced: bool = True

    @property
    def name(self) -> str:
        return f"{self.document}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a shell block as its words; what follows a pipe or a redirection is left out."""

    block: Block
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


def blocks_of(document: str, text: str | None = None) -> list[Block]:
    """The fenced blocks of a document, and the indented ones, in their order."""
    text = (ROOT / document).read_text(encoding="utf-8") if text is None else text
    found: list[Block] = []

    def blank(match: re.Match[str]) -> str:
        body = textwrap.dedent(match[4])
        found.append(Block(document, text.count("\n", 0, match.start(4)) + 1, match[3].strip(), body))
        return "\n" * match[0].count("\n")

    rest = _FENCE.sub(blank, text)
    for match in _INDENTED.finditer(rest):
        line = rest.count("\n", 0, match.start()) + 1
        found.append(Block(document, line, "", textwrap.dedent(match[0]), fenced=False))
    return sorted(found, key=lambda block: block.line)


def inline_code(document: str) -> list[str]:
    """What stands between single backticks, fenced blocks left out; a line break in it is a space."""
    text = _FENCE.sub("", (ROOT / document).read_text(encoding="utf-8"))
    return [" ".join(span.split()) for span in _INLINE.findall(text)]


def commands_of(block: Block) -> list[Command]:
    """The commands of a shell block: a quoted text may run over several lines, a backslash goes on with the next one.

    Of the path of a program its last part is kept.
    """
    commands: list[Command] = []
    pending = ""
    for line in block.text.splitlines():
        pending += ("\n" if pending else "") + line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that is still open
            continue
        pending = ""
        if words[:1] == ["$"]:
            words = words[1:]
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        end = next((place for place, word in enumerate(words) if word in _SPOKEN_TO_THE_SHELL), len(words))
        if words[:end]:
            commands.append(Command(block, (words[0].rsplit("/", 1)[-1], *words[1:end])))
    assert not pending, f"{block.name}: a quotation is not closed"
    return commands
