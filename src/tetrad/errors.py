"""What a user can get wrong, by kind. Each error says what was wrong and what to change."""

from __future__ import annotations

from typing import Any


class TetradError(Exception):
    """The base of every error that this package raises on purpose."""


class ConfigError(TetradError, ValueError):
    """A configuration (command line, ``EngineArgs`` or ``config.json``) that cannot be served as it stands."""


class CheckpointError(TetradError, ValueError):
    """A checkpoint whose files or tensors do not fit the model."""


class RequestError(TetradError, ValueError):
    """One request that cannot be served; other requests go on."""


class DeviceLostError(TetradError, RuntimeError):
    """The device answers no more: every request ends with this error, and the engine must be built anew."""


def check_integer(name: str, value: Any) -> None:
    """Refuse what is not a plain int; True is no number, and neither is a tensor, which would have to be waited for.

    Raises:
        TypeError: if it is not
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a plain int; got {type(value).__name__}")


def check_whole(name: str, value: Any, least: int, *, error: type[ValueError] = ValueError) -> None:
    """Refuse what is not a plain int of at least ``least``.

    Raises:
        TypeError: if it is no plain int
        ValueError: if it is too small, or the ``error`` given instead
    """
    check_integer(name, value)
    if value < least:
        raise error(f"{name} must be at least {least}; got {value}")
