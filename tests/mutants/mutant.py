"""One mistake, as a change of source text."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path


class StaleError(Exception):
    """A mutant's source text does not stand exactly once in the package."""


@dataclass(frozen=True, slots=True)
class Edit:
    """``old``, which must stand exactly once in a file of the package, becomes ``new``."""

    file: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        """Change the file in ``package``.

        :raises StaleError: if ``old`` is not there, or not once
        """
        path = package / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise StaleError(f"{self.file} holds {text.count(self.old)} times, not once: {self.old}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        # compiled code that came along with the copy may look as new as the change
        Path(cache_from_source(path)).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake. ``tests`` are pytest's names of the tests that must see it; none means the oracle subset."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()


def mutant(name: str, *places: str, test: str | None = None) -> Mutant:
    """``places``: file, old and new of every edit, one after the other."""
    edits = tuple(Edit(*places[start : start + 3]) for start in range(0, len(places), 3))
    return Mutant(name, edits, (test,) if test else ())
