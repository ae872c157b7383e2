"""A measurement as a picture: the time of each case over its floor, and the roofline of the scorers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tetrad.bench.cases import Case, Kind, Op, Shape
from tetrad.bench.costs import cost_of, floor_of
from tetrad.bench.measurement import BenchResult, Result
from tetrad.pictures import require_matplotlib, save

_COLORS = {"fp4": "#D55E00", "fp8": "#0072B2", "bf16": "#000000", "fp32": "#CC79A7", "": "#009E73"}
"""Okabe and Ito's palette, which the colour-blind can tell apart. A dtype has its place on the row too, for grey."""
_MARKERS = "os^Dv<>P*X"
"""One for each contender."""
_NAMES = {Op.PLAN: "plan", Op.SCORE: "score", Op.TOPK: "top-k", Op.TOTAL: "plan + score + top-k"}
_LEAST_APART = 0.026
"""Labels of one column are at least so far apart, in heights of the axes."""


def picture(result: BenchResult, path: Path) -> None:
    """Draw a measurement (see :func:`draw`) and write it to ``path`` (PNG).

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    save(draw(result), path)


def draw(result: BenchResult) -> Any:
    """A measurement as a matplotlib figure.

    Left: microseconds of each shape, a panel for each op that was timed, with its floor as a tick. Right: operations
    for each byte against TFLOP/s of the scorers, under what the device can do. Numbers name the same shapes on both
    sides; they stand at the points of the first contender.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = require_matplotlib()
    timed = [each for each in result.results if each.timing is not None]
    shapes = list(dict.fromkeys(each.case.shape for each in timed))
    ops = [op for op in Op if any(each.case.op is op for each in timed)]
    scores = [each for each in timed if each.case.op is Op.SCORE]
    panels = max(1, len(ops)) + (1 if scores else 0)
    lanes = max((len(_lanes(timed, op)) for op in ops), default=1)
    height = max(4.0, 1.6 + len(shapes) * (0.12 + 0.085 * lanes))
    widths = [1.0] * max(1, len(ops)) + ([2.0] if scores else [])
    figure = plt.figure(figsize=(2.0 + 2.3 * sum(widths), height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, width_ratios=widths)[0]
    for number, op in enumerate(ops):
        axes[number].sharey(axes[0])
        _draw_times(axes[number], result, [each for each in timed if each.case.op is op], shapes, op, first=not number)
    if scores:
        _draw_roofline(axes[-1], result, scores, shapes)
    _draw_legend(plt, figure, result, timed)
    known, settings = result.versions, result.settings
    software = ", ".join(f"{name} {known[name]}" for name in ("tetrad", "torch", "cuda", "driver") if known.get(name))
    figure.suptitle(
        f"tetrad bench indexer: {known['device']}, {software}, {known['date']}\n"
        f"{settings.heads} heads of {settings.head_dim} channels, k {settings.k}; points: median of "
        f"{settings.repeats}, bars: least to most",
        fontsize=9,
    )
    return figure


def _lanes(results: Sequence[Result], op: Op) -> list[tuple[str, str]]:
    """What stands below one another on a shape's row: dtypes, and in each the contenders."""
    return list(dict.fromkeys((_dtype(each.case), each.contender) for each in results if each.case.op is op))


def _dtype(case: Case) -> str:
    return "" if case.dtype is None else str(case.dtype)


def _marker(result: BenchResult, each: Result) -> str:
    return _MARKERS[result.contenders.index(each.contender) % len(_MARKERS)]


def _draw_times(
    axis: Any, result: BenchResult, results: Sequence[Result], shapes: Sequence[Shape], op: Op, *, first: bool
) -> None:
    lanes = _lanes(results, op)
    for each in results:
        timing = each.timing
        assert timing is not None  # only timed results are drawn
        lane = lanes.index((_dtype(each.case), each.contender))
        y = shapes.index(each.case.shape) + 0.8 * ((lane + 0.5) / len(lanes) - 0.5)
        color = _COLORS[_dtype(each.case)]
        bar = [[timing.microseconds - timing.least], [timing.most - timing.microseconds]]
        axis.errorbar(timing.microseconds, y, xerr=bar, color=color, marker=_marker(result, each), markersize=3.5)
        if result.ceilings is not None:
            axis.plot(floor_of(each.case, result.ceilings).microseconds, y, marker="|", color="0.35", markersize=5)
    for number in range(len(shapes)):
        if number % 2:
            axis.axhspan(number - 0.5, number + 0.5, color="0.94", zorder=0)
    axis.set_xscale("log")
    axis.set_ylim(len(shapes) - 0.5, -0.5)
    names = [f"{shape}  ({number})" for number, shape in enumerate(shapes, 1)]
    axis.set_yticks(range(len(shapes)), names, fontsize=7)
    axis.tick_params(axis="y", labelleft=first, length=0)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_title(_NAMES[op], fontsize=8)
    axis.set_xlabel("microseconds", fontsize=8)
    axis.grid(axis="x", alpha=0.3)


def _draw_roofline(axis: Any, result: BenchResult, scores: Sequence[Result], shapes: Sequence[Shape]) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    if result.ceilings is not None:
        _draw_ceilings(axis, result, [cost_of(each.case).intensity for each in scores])
    for each in scores:
        color = _COLORS[_dtype(each.case)]
        axis.plot(
            cost_of(each.case).intensity,
            each.teraflops,
            marker=_marker(result, each),
            color=color,
            markerfacecolor="none" if each.case.shape.kind is Kind.PREFILL else color,
            linestyle="none",
            markersize=5,
        )
    axis.margins(0.12)
    axis.autoscale_view()
    named = [each for each in scores if each.contender == result.contenders[0]] or scores
    _label_points(axis, named, shapes)
    axis.set_xlabel("operations for each byte that must move", fontsize=8)
    axis.set_ylabel("TFLOP/s", fontsize=8)
    axis.set_title("score under the roofline; hollow: prefill", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(which="major", alpha=0.3)


def _label_points(axis: Any, scores: Sequence[Result], shapes: Sequence[Shape]) -> None:
    """The number of its shape at each point; in a column of points the numbers are spread, with a line to the point."""
    columns: dict[float, list[tuple[float, str]]] = {}
    to_axes = axis.transData + axis.transAxes.inverted()
    for each in scores:
        x, y = to_axes.transform((cost_of(each.case).intensity, each.teraflops))
        near = next((column for column in columns if abs(column - x) < 0.02), float(x))
        columns.setdefault(near, []).append((float(y), str(shapes.index(each.case.shape) + 1)))
    for x, points in columns.items():
        points.sort()
        for place, (y, name) in zip(_spread([y for y, _ in points]), points, strict=True):
            axis.annotate(
                name,
                (x, y),
                xytext=(x + 0.03, place),
                xycoords="axes fraction",
                textcoords="axes fraction",
                fontsize=6,
                va="center",
                arrowprops={"arrowstyle": "-", "linewidth": 0.3, "color": "0.5", "shrinkA": 0, "shrinkB": 2},
            )


def _spread(heights: Sequence[float]) -> list[float]:
    """Places at least `_LEAST_APART` apart and as near as can be to the ascending ``heights``: groups that would touch
    are laid out evenly around their mean."""
    groups: list[list[float]] = []
    for number, height in enumerate(heights):
        groups.append([height - number * _LEAST_APART])
        while len(groups) > 1 and sum(groups[-2]) / len(groups[-2]) >= sum(groups[-1]) / len(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    means = [sum(group) / len(group) for group in groups for _ in group]
    return [mean + number * _LEAST_APART for number, mean in enumerate(means)]


def _draw_ceilings(axis: Any, result: BenchResult, intensities: list[float]) -> None:
    ceilings = result.ceilings
    assert ceilings is not None  # asked by the caller
    ridges = [rate.per_second / ceilings.read.per_second for rate in (ceilings.fp8, ceilings.bf16)]
    left, right = min([*intensities, *ridges]) / 2, max([*intensities, *ridges]) * 2
    slope = ceilings.read.per_second / 1e12
    axis.plot(
        [left, max(ridges)],
        [slope * left, slope * max(ridges)],
        color="black",
        linewidth=1,
        label=f"{slope:.3g} TB/s: {ceilings.read.what}",
    )
    for rate, style in zip(dict.fromkeys((ceilings.fp8, ceilings.bf16)), ("--", ":"), strict=False):
        top, start = rate.per_second / 1e12, rate.per_second / ceilings.read.per_second
        ends = [start, max(right, 2 * start)]
        axis.plot(
            ends, [top, top], color="black", linestyle=style, linewidth=1, label=f"{top:.4g} TFLOP/s: {rate.what}"
        )


def _draw_legend(plt: Any, figure: Any, result: BenchResult, timed: Sequence[Result]) -> None:
    """Colours are dtypes and markers are contenders, each named once."""
    line = plt.matplotlib.lines.Line2D
    dtypes = list(dict.fromkeys(_dtype(each.case) for each in timed))
    handles = [
        line([], [], color=_COLORS[dtype], linewidth=4, label=f"index {dtype}" if dtype else "reads no keys")
        for dtype in dtypes
    ]
    for number, name in enumerate(result.contenders):
        handles.append(
            line([], [], color="0.35", marker=_MARKERS[number % len(_MARKERS)], linestyle="none", label=name)
        )
    if result.ceilings is not None:
        handles.append(line([], [], color="0.35", marker="|", linestyle="none", label="floor of the case"))
    handles += [handle for axis in figure.axes for handle in axis.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=8, frameon=False)
