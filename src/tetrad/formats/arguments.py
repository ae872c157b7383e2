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

    Raises:
        TypeError: if it is not
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch tensor; got {described(value)}")
