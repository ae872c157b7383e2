"""Checks of what a caller hands to a public function: its type first, so that no error comes from the inside of torch.

They look at what the host knows, never at values, so they cost no synchronisation. Every error names the argument,
what was needed, and what came.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def described(value: Any) -> str:
    """``value`` for an error: a plain value as it is written, anything else by its type."""
    if value is None or isinstance(value, (str, bool, int, float, torch.dtype)):
        return repr(value)
    return type(value).__name__


def check_is_tensor(name: str, value: Any) -> None:
    """Refuse what is not a tensor.

    :raises TypeError: if it is not
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch tensor; got {described(value)}")


def check_integer(name: str, value: Any) -> None:
    """Refuse what is not a plain int; True is no number, and neither is a tensor, which would have to be waited for.

    :raises TypeError: if it is not
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a plain int; got {type(value).__name__}")


def check_whole(name: str, value: Any, least: int, *, error: type[ValueError] = ValueError) -> None:
    """Refuse what is not a plain int of at least ``least``.

    :raises TypeError: if it is no plain int
    :raises ValueError: if it is too small, or the ``error`` given instead
    """
    check_integer(name, value)
    if value < least:
        raise error(f"{name} must be at least {least}; got {value}")
