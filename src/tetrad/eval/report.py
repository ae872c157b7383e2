"""A recall measurement as a table, as JSON, and as the picture that the field knows: depth against length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tetrad.errors import ConfigError
from tetrad.eval.recall import BASELINE, Answer, RecallResult
from tetrad.eval.statistics import interval_of_mean

_WIDTH = 100
_AGAINST = f"minus {BASELINE} [95 %]"
_HEAD = f"{'length':>7} {'index':9} {'asked':>5} {'recall %':>8} {_AGAINST:>26} {'found %':>7}"


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One variant at one length. Shares are 0 to 1; differences are to the baseline, on the same questions."""

    variant: str
    length: int
    questions: int
    recall: float
    difference: float | None
    low: float | None
    high: float | None
    found: float | None
    by_depth: dict[float, float]
    by_kind: dict[str, float]


def cells(result: RecallResult) -> list[Cell]:
    """One cell per length and variant, lengths ascending, the baseline first."""
    names = list(dict.fromkeys(answer.variant for answer in result.answers))
    return [
        _cell(result, name, length)
        for length in sorted(result.settings.lengths)
        for name in names
        if any(answer.variant == name and answer.length == length for answer in result.answers)
    ]


def _place(answer: Answer) -> tuple[float, int, int]:
    return answer.depth, answer.document, answer.question


def _cell(result: RecallResult, variant: str, length: int) -> Cell:
    mine = {_place(a): a for a in result.answers if a.variant == variant and a.length == length}
    base = {_place(a): a for a in result.answers if a.variant == BASELINE and a.length == length}
    difference = low = high = None
    both = sorted(mine.keys() & base.keys())
    if variant != BASELINE and both:
        pairs = np.array([float(mine[place].right) - float(base[place].right) for place in both])
        difference = float(pairs.mean())
        low, high = interval_of_mean(pairs)
    found = [answer.found for answer in mine.values() if answer.found is not None]

    def share(key: Callable[[Answer], Any], value: Any) -> float:
        return float(np.mean([answer.right for answer in mine.values() if key(answer) == value]))

    return Cell(
        variant,
        length,
        len(mine),
        float(np.mean([answer.right for answer in mine.values()])),
        difference,
        low,
        high,
        float(np.mean(found)) if found else None,
        {depth: share(lambda a: a.depth, depth) for depth in sorted({a.depth for a in mine.values()})},
        {kind: share(lambda a: a.kind, kind) for kind in sorted({a.kind for a in mine.values()})},
    )


def table(result: RecallResult) -> str:
    """The table: per cent right, the paired difference to the baseline with its 95 % interval, per cent by depth.

    The depths stand in a block of their own where they would make lines of more than 100 columns.
    """
    rows = cells(result)
    depths = sorted(result.settings.depths)
    at_depths = "".join(f" {depth:5.2f}" for depth in depths)
    lines = [f"index_topk {result.index_topk}, {result.device}; found: the share of {BASELINE}'s chosen entries"]
    if len(f"{_HEAD} at{at_depths}") <= _WIDTH:
        lines += [f"{_HEAD} at{at_depths}", *(f"{_row(cell)}   {_by_depth(cell, depths)}" for cell in rows)]
        return "\n".join(lines)
    lines += [_HEAD, *map(_row, rows), f"{'length':>7} {'index':9} at{at_depths}"]
    lines += [f"{cell.length:7d} {cell.variant:9}   {_by_depth(cell, depths)}" for cell in rows]
    return "\n".join(lines)


def _row(cell: Cell) -> str:
    """All of a cell but its depths."""
    difference = found = ""
    if cell.difference is not None and cell.low is not None and cell.high is not None:
        difference = f"{100 * cell.difference:+.2f} [{100 * cell.low:+.2f}, {100 * cell.high:+.2f}]"
    if cell.found is not None:
        found = f"{100 * cell.found:.1f}"
    return f"{cell.length:7d} {cell.variant:9} {cell.questions:5d} {100 * cell.recall:8.2f} {difference:>26} {found:>7}"


def _by_depth(cell: Cell, depths: list[float]) -> str:
    return "".join(f" {100 * cell.by_depth[depth]:5.1f}" if depth in cell.by_depth else " " * 6 for depth in depths)


def to_dict(result: RecallResult, *, answers: bool = False) -> dict[str, Any]:
    """Plain values for JSON; ``answers`` adds every single one."""
    settings = dataclasses.asdict(result.settings)
    document: dict[str, Any] = {
        "settings": settings,
        "index_topk": result.index_topk,
        "device": result.device,
        "interrupted": result.interrupted,
        "cells": [dataclasses.asdict(cell) for cell in cells(result)],
    }
    if answers:
        document["answers"] = [dataclasses.asdict(answer) for answer in result.answers]
    return document


def require_matplotlib() -> Any:
    """matplotlib.pyplot, drawing to files.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'tetrad[plot]', or leave out --png") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def picture(result: RecallResult, path: Path) -> None:
    """Draw depth against length, one panel per variant, and write it to ``path`` (PNG).

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    plt = require_matplotlib()
    rows = cells(result)
    names = list(dict.fromkeys(cell.variant for cell in rows))
    lengths = sorted({cell.length for cell in rows})
    depths = sorted(result.settings.depths)
    figure, axes = plt.subplots(1, len(names), figsize=(1.2 + 2.4 * len(names), 3.2), squeeze=False, sharey=True)
    image = None
    for axis, name in zip(axes[0], names, strict=True):
        by_length = {cell.length: cell for cell in rows if cell.variant == name}
        grid = np.array(
            [
                [by_length[length].by_depth[depth] if length in by_length else np.nan for length in lengths]
                for depth in depths
            ]
        )
        image = axis.imshow(100 * grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        for (row, column), value in np.ndenumerate(100 * grid):
            axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8)
        axis.set_title(f"index {name}", fontsize=9)
        axis.set_xticks(range(len(lengths)), [f"{length // 1024}K" for length in lengths], fontsize=8)
        axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=8)
        axis.set_xlabel("tokens", fontsize=8)
    axes[0][0].set_ylabel("depth of the fact", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=list(axes[0]), label="answers right, %", shrink=0.9)
    try:
        figure.savefig(path, dpi=140, bbox_inches="tight", format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    finally:
        plt.close(figure)
