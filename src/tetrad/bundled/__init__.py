"""The model that ships with the package: a few million parameters, trained to find facts in long documents.

``model="bundled"`` names it wherever a model folder is asked for. Its card, ``notes/README.md``, says what it can do.
"""

from __future__ import annotations

from pathlib import Path

NAME = "bundled"
FOLDER = Path(__file__).parent / "notes"


def resolve(model: str | Path) -> str:
    """The folder of the bundled model for the name ``bundled``, any other name as it is."""
    return str(FOLDER) if model == NAME else str(model)
