"""What is read from one document: the values, where each was found, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tetrad.models.config_checks import Problem


class Reading:
    """One document on its way to the fields of ``ModelConfig``.

    Args:
        document: the parsed JSON object, by the names of the released config.json.
        base: None for a whole document. For overrides, the values of the document that they change: an override may
            be a part of an object (only the factor of ``rope_scaling``), and the rest is then the base's.
    """

    def __init__(self, document: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> None:
        self.document = document
        self.is_override = base is not None
        self.base: Mapping[str, Any] = base or {}
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self._sources: dict[str, str] = {}

    def report(self, name: str, text: str) -> None:
        """Note that the value of this name cannot be used."""
        self.problems.append(Problem(name, text))

    def put(self, field: str, value: Any, name: str, shown: Any = None) -> None:
        """Set a field, or report that an earlier name of the document said something else.

        Args:
            field: the field of ``ModelConfig``.
            value: its value.
            name: where the document has it.
            shown: what the document has there, if that is not the value itself.
        """
        if field in self._sources and self.values[field] != value:
            shown = value if shown is None else shown
            other = f"{self._sources[field]} {self.values[field]!r}"
            self.report(name, f"is {shown!r}, which contradicts {other}; leave one of them out")
            return
        self.values.setdefault(field, value)
        self._sources.setdefault(field, name)

    def known(self, field: str) -> Any:
        """The value of a field as far as it is known: this document's, else the base's, else None."""
        return self.values.get(field, self.base.get(field))
