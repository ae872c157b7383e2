"""Everything that is wrong with a checkpoint, collected first and raised as one error."""

from __future__ import annotations

import enum
from pathlib import Path

from tetrad.errors import CheckpointError

_NAMES_SHOWN = 10


class Trouble(enum.Enum):
    """A kind of mistake: what is said of one, of several, and what to do about it."""

    FILE = ("file cannot be read", "files cannot be read", "copy or download the checkpoint again")
    INDEX = (
        "index entry does not fit its file",
        "index entries do not fit their files",
        "copy or download the shards and their index from one place",
    )
    MISSING = (
        "tensor is missing",
        "tensors are missing",
        "the checkpoint is incomplete, or config.json (layers, their kinds, experts) is another model's",
    )
    UNEXPECTED = (
        "tensor is unexpected",
        "tensors are unexpected",
        "config.json (layers, their kinds, hash layers, experts) may be another model's",
    )
    DUPLICATE = ("tensor is stored twice", "tensors are stored twice", "keep one of the two")
    SHAPE = (
        "tensor has the wrong shape",
        "tensors have the wrong shape",
        "config.json and the checkpoint must be of one model",
    )
    DTYPE = (
        "tensor has the wrong dtype",
        "tensors have the wrong dtype",
        "convert the checkpoint to a dtype named here",
    )
    SCALE = (
        "quantised tensor has no fitting scale",
        "quantised tensors have no fitting scale",
        "store it beside the weight as .scale or .weight_scale_inv",
    )
    VALUE = ("tensor is out of range", "tensors are out of range", "a table must name experts of this model")
    MODULE = (
        "tensor of the model is not what config.json describes",
        "tensors of the model are not what config.json describes",
        "build the model from the configuration that is given here",
    )


class Report:
    """The mistakes found so far in one checkpoint."""

    def __init__(self, what: str | Path) -> None:
        self._what = what
        self._found: dict[Trouble, list[str]] = {}
        self._notes: list[str] = []

    def add(self, trouble: Trouble, name: str) -> None:
        """Notes one name, with whatever is to be said about it."""
        self._found.setdefault(trouble, []).append(name)

    def note(self, text: str) -> None:
        """Keeps what is no mistake, but explains those that may follow."""
        self._notes.append(text)

    def raise_if_any(self) -> None:
        """Raises one ``CheckpointError`` with the names of every kind of mistake; does nothing if there is none."""
        if not self._found:
            return
        lines = [f"the checkpoint {self._what} cannot be used:"]
        for trouble in Trouble:
            if names := self._found.get(trouble):
                one, several, remedy = trouble.value
                more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
                shown = ", ".join(names[:_NAMES_SHOWN])
                lines.append(
                    f"  - {len(names)} {one if len(names) == 1 else several}: {shown}{more}. Remedy: {remedy}."
                )
        lines += [f"  ({note})" for note in self._notes]
        raise CheckpointError("\n".join(lines))
