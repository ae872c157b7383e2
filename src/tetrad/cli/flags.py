"""Command-line flags: made from the option records, in kebab or snake case, with a suggestion for a mistyped one."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import json
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from tetrad.config.args import EngineArgs


class Parser(argparse.ArgumentParser):
    """An argument parser that takes ``--snake_case`` for every ``--kebab-case`` flag and suggests the nearest."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does it, but an unknown flag is an error that names the nearest known one."""
        args = [_kebab(arg) for arg in args or ()]
        if self._commands():
            for arg in itertools.takewhile(lambda arg: arg.startswith("-"), args):
                # argparse would take the value of a misplaced flag for the command
                if arg not in self._option_string_actions:
                    self.unknown(arg.split("=", 1)[0])
        parsed, rest = super().parse_known_args(args, namespace)
        for arg in rest:
            if arg.startswith("-") and len(arg) > 1:
                self.unknown(arg.split("=", 1)[0])
        return parsed, rest

    def unknown(self, flag: str) -> NoReturn:
        """Refuse a flag."""
        for name, command in self._commands().items():
            if flag in command._option_string_actions:
                self.error(f"{flag} belongs behind the command, as in {self.prog} {name} {flag}")
        known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "; --help lists the flags"
        self.error(f"unknown flag {flag}{hint}")

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        """The parsers of the subcommands by name; none in a subcommand's own parser."""
        actions = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return next((dict(action.choices) for action in actions), {})


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        options.setdefault("max_help_position", 32)
        super().__init__(prog, **options)


def _kebab(arg: str) -> str:
    if not arg.startswith("--") or arg == "--":
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def json_object(text: str) -> dict[str, Any]:
    """A flag's value that must be one JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return value


def _value_type(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        # a number that may also be written as text ("128K") is parsed where it is checked
        return str if str in members else members[0]
    if typing.get_origin(hint) is dict:
        return json_object
    return hint


def add_engine_flags(parser: argparse.ArgumentParser, *, model: str | None = None) -> None:
    """One flag per field of ``EngineArgs``, and the model as first argument; ``model`` where none is named."""
    parser.set_defaults(fallback_model=model)
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="folder of the checkpoint, or bundled")
    group = parser.add_argument_group("engine")
    hints = typing.get_type_hints(EngineArgs)
    for field in dataclasses.fields(EngineArgs):
        details = field.metadata
        flag = "--" + field.name.replace("_", "-")
        # unset flags stay absent, so that EngineArgs alone holds the defaults
        common: dict[str, Any] = {"help": details["help"], "dest": field.name, "default": argparse.SUPPRESS}
        if hints[field.name] is bool:
            if field.default:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
            else:
                group.add_argument(flag, action="store_true", **common)
            continue
        group.add_argument(
            flag,
            *details.get("aliases", ()),
            type=_value_type(hints[field.name]),
            choices=details.get("choices"),
            metavar=details.get("metavar"),
            **common,
        )
        if alias := details.get("const_alias"):
            group.add_argument(alias, action="store_const", const="dummy", dest=field.name, default=argparse.SUPPRESS)


def engine_args(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> EngineArgs:
    """The ``EngineArgs`` of parsed flags."""
    given = {name: getattr(parsed, name) for name in EngineArgs.__dataclass_fields__ if hasattr(parsed, name)}
    positional = parsed.positional_model
    if positional and given.setdefault("model", positional) != positional:
        parser.error(f"two models were named: {positional} and --model {given['model']}")
    if parsed.fallback_model is not None:
        given.setdefault("model", parsed.fallback_model)
    if not given.get("model"):
        parser.error("name a model: the folder of a checkpoint, first or after --model")
    return EngineArgs(**given)
