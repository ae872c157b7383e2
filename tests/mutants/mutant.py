"""One mistake, as behaviour that is replaced at run time."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


class StaleError(Exception):
    """What a mutant replaces is not there."""


@dataclass(frozen=True, slots=True)
class Patch:
    """``target``, "module:name" or "module:Class.name", becomes ``make`` of what it was.

    Only where the target says: a function that another module has imported is patched there, in the module that uses
    it. ``everywhere``: also in every module of the package that has imported the same thing under the same name.
    """

    target: str
    make: Callable[[Any], Any]
    everywhere: bool = False

    def apply(self) -> None:
        """Replace it, for the rest of the process.

        Raises:
            StaleError: if the target is not there
        """
        owner, name = self._find()
        raw, original = vars(owner)[name], getattr(owner, name)
        wrong = self.make(original)
        if isinstance(raw, (classmethod, staticmethod)):
            wrong = staticmethod(wrong)
        holders = [owner]
        if self.everywhere:
            package = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "tetrad"]
            holders += [module for module in package if vars(module).get(name) is raw]
        for holder in holders:
            setattr(holder, name, wrong)

    def _find(self) -> tuple[Any, str]:
        """(what has the target as an attribute of its own, the attribute's name)."""
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        try:
            owner: Any = importlib.import_module(module)
            for part in owners:
                owner = getattr(owner, part)
        except (ImportError, AttributeError) as error:
            raise StaleError(f"{self.target}: {error}") from error
        if name not in vars(owner):
            raise StaleError(f"{self.target} is not there")
        return owner, name


def everywhere(target: str, make: Callable[[Any], Any]) -> Patch:
    """A patch of a function, or constant, that other modules have imported."""
    return Patch(target, make, everywhere=True)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake. ``tests`` are pytest's names of the tests that must see it; none means the oracle subset."""

    name: str
    patches: tuple[Patch, ...]
    tests: tuple[str, ...] = ()


def mutant(name: str, *patches: Patch, test: str | None = None) -> Mutant:
    """A mistake of one or several patches."""
    return Mutant(name, patches, (test,) if test else ())


@contextlib.contextmanager
def holding(parameter: nn.Parameter, value: Tensor) -> Iterator[None]:
    """The parameter has another value for a while."""
    before = parameter.data
    parameter.data = value
    try:
        yield
    finally:
        parameter.data = before
