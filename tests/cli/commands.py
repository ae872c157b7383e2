"""Every command with its parser, and everyone's flags."""

from __future__ import annotations

import argparse

from tetrad.cli.main import build_parser
from tetrad.cli.parser import Parser


def all_parsers() -> dict[str, Parser]:
    """The parser of the whole, of each command, and of each kind of a command, by what is typed."""
    found, waiting = {}, [build_parser()]
    while waiting:
        parser = waiting.pop()
        found[parser.prog] = parser
        waiting += parser.commands.values()
    return found


def leaf_parsers() -> dict[str, Parser]:
    """The parsers that run something."""
    return {name: parser for name, parser in all_parsers().items() if not parser.commands}


def flags_of(parser: Parser) -> list[argparse.Action]:
    """Its flags but for --help."""
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]
