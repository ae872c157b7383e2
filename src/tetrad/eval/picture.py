"""A recall measurement as a picture: what was answered by depth and length, and what each index format found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tetrad.eval.recall import BASELINE, RecallResult
from tetrad.eval.report import Cell, cells, command, tokens_text
from tetrad.pictures import require_matplotlib, save

_COLORS = ("#000000", "#0072B2", "#D55E00", "#CC79A7", "#009E73", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette, which the colour-blind can tell apart; markers and lines tell them apart in grey."""
_MARKERS = "os^DvP<>*X"
_LINES = ("-", "--", ":", "-.")
_DODGE = 0.16
"""Variants stand so far apart beside their length, in units of one length."""


def picture(result: RecallResult, path: Path) -> None:
    """Draw a measurement (see :func:`draw`) and write it to ``path`` (PNG).

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    save(draw(result), path)


def draw(result: RecallResult) -> Any:
    """A measurement as a matplotlib figure.

    Above: answers right by depth and length, a panel for each variant. Below: answers right, and entries found of those
    that the baseline chose, by length, each with its 95 % interval. The command that measures the same stands below.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = require_matplotlib()
    rows = cells(result)
    names = list(dict.fromkeys(cell.variant for cell in rows))
    lengths = sorted({cell.length for cell in rows})
    figure = plt.figure(figsize=(max(8.8, 1.2 + 1.9 * len(names)), 6.8), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.0, 1.15))
    _draw_depths(above, result, rows, names, lengths)
    _draw_measures(below, rows, names, lengths)
    model = f"model {result.model}, " if result.model else ""
    dtype = f" {result.dtype}," if result.dtype else ""
    stopped = "; interrupted, some questions are missing" if result.interrupted else ""
    figure.suptitle(f"{model}{result.device},{dtype} index_topk {result.index_topk}{stopped}", fontsize=9)
    figure.supxlabel(command(result), fontsize=6.5, family="monospace", wrap=True)
    return figure


def _draw_depths(
    figure: Any, result: RecallResult, rows: Sequence[Cell], names: Sequence[str], lengths: Sequence[int]
) -> None:
    depths = sorted(result.settings.depths)
    axes = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    image = None
    for axis, name in zip(axes, names, strict=True):
        by_length = {cell.length: cell for cell in rows if cell.variant == name}
        grid = np.array(
            [
                [by_length[length].by_depth.get(depth, np.nan) if length in by_length else np.nan for length in lengths]
                for depth in depths
            ]
        )
        image = axis.imshow(100 * grid, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        for (row, column), value in np.ndenumerate(100 * grid):
            text, color = ("", "black") if np.isnan(value) else (f"{value:.0f}", "white" if value < 60 else "black")
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
        axis.set_title(f"index {name}", fontsize=9)
        axis.set_xticks(range(len(lengths)), [tokens_text(length) for length in lengths], fontsize=8)
        axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=8)
        axis.set_xlabel("tokens", fontsize=8)
    axes[0].set_ylabel("depth of the fact", fontsize=8)
    each = result.settings.documents * result.settings.questions
    label = f"answers right, %\n({'at most ' if result.interrupted else ''}{each} questions a field)"
    bar = figure.colorbar(image, ax=list(axes), shrink=0.9)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _draw_measures(figure: Any, rows: Sequence[Cell], names: Sequence[str], lengths: Sequence[int]) -> None:
    """Both measures with intervals; a number beside each point, so that none must be read off the axis."""
    answered, found = figure.subplots(1, 2)
    _draw_measure(
        answered,
        rows,
        names,
        lengths,
        lambda cell: (cell.recall, cell.recall_low, cell.recall_high),
        "answers right, %",
    )
    compared = any(cell.found is not None for cell in rows)
    if compared:
        _draw_measure(
            found,
            rows,
            names,
            lengths,
            lambda cell: (cell.found, cell.found_low, cell.found_high),
            f"entries found of those that {BASELINE} chose, %",
        )
    else:
        found.text(0.5, 0.5, f"entries found:\nnot measured without {BASELINE}", ha="center", va="center", fontsize=8)
        found.set_axis_off()
    handles, labels = answered.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)


def _draw_measure(
    axis: Any,
    rows: Sequence[Cell],
    names: Sequence[str],
    lengths: Sequence[int],
    measure: Callable[[Cell], tuple[float | None, float | None, float | None]],
    label: str,
) -> None:
    for number, name in enumerate(names):
        shift = _DODGE * (number - (len(names) - 1) / 2)
        points = []
        for cell in (cell for cell in rows if cell.variant == name):
            middle, low, high = measure(cell)
            if middle is not None and low is not None and high is not None:
                points.append((lengths.index(cell.length) + shift, 100 * middle, 100 * low, 100 * high))
        if not points:
            continue
        x, y, low, high = np.array(points).T
        axis.errorbar(
            x,
            y,
            # rounding may put an end of an interval past its middle by one unit in the last place
            yerr=(np.maximum(0, y - low), np.maximum(0, high - y)),
            color=_COLORS[number % len(_COLORS)],
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle=_LINES[number % len(_LINES)],
            linewidth=1,
            markersize=5,
            capsize=3,
            label=f"index {name}",
        )
        for place, value, _, top in points:
            axis.annotate(
                f"{value:.1f}",
                (place, top),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=6.5,
            )
    counts = [max(cell.questions for cell in rows if cell.length == length) for length in lengths]
    ticks = [f"{tokens_text(length)}\nn = {count}" for length, count in zip(lengths, counts, strict=True)]
    axis.set_xticks(range(len(lengths)), ticks, fontsize=8)
    axis.set_xlim(-0.6, len(lengths) - 0.4)
    axis.margins(y=0.12)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel("tokens; questions of each variant", fontsize=8)
    axis.set_title(f"{label}, with 95 % intervals", fontsize=8)
    axis.grid(axis="y", alpha=0.3)
