"""An argument parser whose answers to a wrong command line are one line, and whose help has examples."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from tetrad.cli.foreign_flags import FOREIGN_COMMANDS, foreign_hint

HELP_WIDTH = 100
"""The most columns of a line of help, whatever the terminal has."""
EXIT_CODES = """\
exit codes:
  0    done
  1    something failed: a checkpoint, a prompt, a measurement, the writing of a result
  2    a flag, its value or the model's configuration is wrong, or results have nowhere to go
  130  interrupted; 143 ended by SIGTERM, 129 by SIGHUP
  141  the reader of standard output left"""
_NEAR_FLAG = 0.75
_NEAR_COMMAND = 0.6


def described(text: str, default: Any) -> str:
    """The help text of a flag with its default, unless the text speaks of the default itself."""
    speaks = re.search(r"\bdefault\b", text)
    if default is None or default is False or default in ("", [], ()) or speaks or callable(default):
        return text
    return f"{text} (default {'on' if default is True else default})".replace("%", "%%")


class Parser(argparse.ArgumentParser):
    """An argument parser that takes ``--snake_case`` for every ``--kebab-case`` flag and suggests the nearest.

    Args:
        examples: command lines for the end of the help.
    """

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        lines = ["examples:", *(f"  {example}" for example in examples), ""] if examples else []
        options.setdefault("epilog", "\n".join((*lines, EXIT_CODES)))
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)
        self._positionals.title = "arguments"
        self.examples = tuple(examples)
        self._refused: dict[str, str] = {}

    @property
    def flags(self) -> list[str]:
        """Every spelling of every flag that is accepted."""
        return list(self._option_string_actions)

    @property
    def refused(self) -> dict[str, str]:
        """Flags that other commands have and this one does not, and why."""
        return dict(self._refused)

    def refuse(self, *flags: str, why: str) -> None:
        """Answer these flags with a reason instead of a suggestion."""
        self._refused |= dict.fromkeys(flags, why)

    def add_subparsers(self, **options: Any) -> Any:
        """As argparse does it; a missing or unknown command is answered by this class."""
        options |= {"required": False, "prog": self.prog, "parser_class": Parser}
        return super().add_subparsers(**options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does it, but what is unknown is an error that names the nearest known flag."""
        args = [_kebab(arg) for arg in args or ()]
        commands = self.commands
        if commands:
            for arg in itertools.takewhile(lambda arg: arg.startswith("-"), args):
                # argparse would take the value of a misplaced flag for the command
                if arg not in self._option_string_actions:
                    self.unknown(arg.split("=", 1)[0])
        parsed, rest = super().parse_known_args(args, namespace)
        for arg in rest:
            if arg.startswith("-") and len(arg) > 1:
                self.unknown(arg.split("=", 1)[0])
        if rest:
            self.error(f"too many arguments: {' '.join(rest)}")
        if commands and getattr(parsed, self._command_action.dest) is None:
            self.error(f"name one of {', '.join(commands)}, as in {self.prog} {next(iter(commands))}")
        return parsed, rest

    def unknown(self, flag: str) -> NoReturn:
        """Refuse a flag."""
        for name, command in self.commands.items():
            if flag in command.flags:
                self.error(f"{flag} belongs behind the command, as in {self.prog} {name} {flag}")
        if flag in self._refused:
            self.error(f"{self.prog} does not take {flag}: {self._refused[flag]}")
        hint = foreign_hint(flag, self.flags)
        if hint is None:
            near = {known.lstrip("-"): known for known in self.flags if known.startswith("--")}
            close = difflib.get_close_matches(flag.lstrip("-"), near, n=1, cutoff=_NEAR_FLAG)
            hint = f"did you mean {near[close[0]]}?" if close else None
        self.error(f"unknown flag {flag}" + (f"; {hint}" if hint else ""))

    def note_on(self, message: str) -> str:
        """What to add to an error that speaks of options which this command does not take."""
        named = {name.replace("_", "-") for name in re.findall(r"--[a-z][a-z0-9_-]*[a-z0-9]", message)}
        named |= {f"--{name.replace('_', '-')}" for name in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", message)}
        reasons: dict[str, list[str]] = {}
        for flag in sorted(named & self._refused.keys()):
            reasons.setdefault(self._refused[flag], []).append(flag)
        notes = [f"{self.prog} does not take {' or '.join(flags)}: {why}" for why, flags in reasons.items()]
        return f" ({'; '.join(notes)})" if notes else ""

    def error(self, message: str) -> NoReturn:
        """One line on what is wrong, one on where help is; exit code 2."""
        if missing := re.fullmatch(r"argument (.*/)?(--[\w-]+): expected one argument", message):
            message += f"; a value that begins with a dash is written as {missing[2]}=VALUE"
        message = re.sub(r"^argument (-[\w-]+)(/-[\w-]+)+", r"argument \1", message)  # without the aliases
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in self.commands:
            hint = FOREIGN_COMMANDS.get(value)
            if hint is None:
                close = difflib.get_close_matches(value, self.commands, n=1, cutoff=_NEAR_COMMAND)
                hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(self.commands)}"
            self.error(f"unknown command {self.prog} {value}; {hint}")
        super()._check_value(action, value)

    @property
    def commands(self) -> dict[str, Parser]:
        """The parsers of the subcommands by name; none in a subcommand's own parser."""
        action = self._command_action
        return {} if action is None else dict(action.choices)

    @property
    def _command_action(self) -> Any:
        return next((action for action in self._actions if isinstance(action, argparse._SubParsersAction)), None)


class _Formatter(argparse.HelpFormatter):
    """Help of at most ``HELP_WIDTH`` columns with a short usage line; texts of several lines keep them."""

    def __init__(self, prog: str, **options: Any) -> None:
        options.setdefault("max_help_position", 32)
        options.setdefault("width", min(HELP_WIDTH, shutil.get_terminal_size().columns - 2))
        super().__init__(prog, **options)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        places = [action for action in actions if not action.option_strings]
        words = [f"[{place.metavar}]" if place.nargs == "?" else f"{place.metavar} ..." for place in places]
        return super()._format_usage(usage or " ".join(("%(prog)s", *words, "[FLAGS]")), actions, groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"  # the value once, not behind every spelling

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.help or action.default == argparse.SUPPRESS:
            return action.help
        return described(action.help, action.default)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "\n".join(indent + line for line in text.split("\n"))
        return super()._fill_text(text, width, indent)


def _kebab(arg: str) -> str:
    if not arg.startswith("--") or arg == "--":
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value
