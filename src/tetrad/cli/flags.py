"""The engine's flags, made one by one from the fields of ``EngineArgs``, and the values that flags take."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tetrad.cli.parser import Parser, described
from tetrad.config.args import EngineArgs
from tetrad.errors import ConfigError, RequestError

__all__ = [
    "Parser",
    "add_engine_flags",
    "engine_args",
    "file_name",
    "flag_values",
    "json_object",
    "refuse_engine_flags",
    "token_ids",
]


def json_object(text: str) -> dict[str, Any]:
    """A flag's value that must be one JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return value


def file_name(text: str) -> Path:
    """A flag's value that must name a file; ``Path`` would make the current folder of nothing."""
    if not text:
        raise argparse.ArgumentTypeError("the name of a file is missing")
    return Path(text)


def token_ids(text: str) -> list[int]:
    """A flag's value that must be token ids with commas or spaces between them."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not token ids, as in 5,17,3: {text!r}") from error


@contextmanager
def flag_values() -> Iterator[None]:
    """What a request may not ask for is a wrong flag where it comes from the command line: exit code 2, not 1.

    Raises:
        ConfigError: in place of a RequestError.
    """
    try:
        yield
    except RequestError as error:
        raise ConfigError(str(error)) from error


def add_engine_flags(
    parser: Parser, *, model: str | None = None, without: Mapping[str, str] = types.MappingProxyType({})
) -> None:
    """One flag per field of ``EngineArgs``, and the model as first argument.

    Args:
        model: the model where none is named; without one the user must name it.
        without: fields that this command sets itself or has no use for, and why: their flags are refused with it.
    """
    parser.set_defaults(fallback_model=model)
    text = EngineArgs.__dataclass_fields__["model"].metadata["help"]
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=described(text, model))
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(EngineArgs):
        names = _names(field)
        if field.name in without:
            parser.refuse(*names, why=without[field.name])
            continue
        title = field.metadata.get("group", "model")
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_engine_flag(groups[title], field, names)


def refuse_engine_flags(parser: Parser, why: str) -> None:
    """Refuse, with a reason, every flag of the engine that a command does not have."""
    for field in dataclasses.fields(EngineArgs):
        missing = [name for name in _names(field) if name not in parser.flags]
        parser.refuse(*missing, why=why)


def _names(field: dataclasses.Field[Any]) -> list[str]:
    """Every spelling of a field's flag, the first the one to recommend."""
    kebab = field.name.replace("_", "-")
    names = [f"--{kebab}", *field.metadata.get("aliases", ())]
    if field.default is True:
        names.append(f"--no-{kebab}")
    if alias := field.metadata.get("const_alias"):
        names.append(alias)
    return names


def _add_engine_flag(group: Any, field: dataclasses.Field[Any], names: list[str]) -> None:
    details, hint = field.metadata, typing.get_type_hints(EngineArgs)[field.name]
    # unset flags stay absent, so that EngineArgs alone holds the defaults
    common: dict[str, Any] = {
        "help": described(details["help"], field.default),
        "dest": field.name,
        "default": argparse.SUPPRESS,
    }
    if hint is bool:
        action = argparse.BooleanOptionalAction if field.default else "store_true"
        group.add_argument(names[0], action=action, **common)
        return
    alias = details.get("const_alias")
    group.add_argument(
        *(name for name in names if name != alias),
        type=_value_type(hint),
        choices=details.get("choices"),
        metavar=details.get("metavar"),
        **common,
    )
    if alias:
        const, text = details["choices"][-1], f"the same as {names[0]} {details['choices'][-1]}"
        group.add_argument(
            alias, action="store_const", const=const, dest=field.name, default=argparse.SUPPRESS, help=text
        )


def _value_type(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        # a number that may also be written as text ("128K") is parsed where it is checked
        return str if str in members else members[0]
    if typing.get_origin(hint) is dict:
        return json_object
    return hint


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
