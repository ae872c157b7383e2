"""The roofline of a measurement: what each case reached, under what the device can do at its operations for a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tetrad.bench.cases import Kind, Op
from tetrad.bench.costs import cost_of
from tetrad.bench.measurement import BenchResult
from tetrad.errors import ConfigError

_COLORS = {"fp4": "tab:green", "fp8": "tab:blue", "bf16": "tab:orange", "fp32": "tab:red"}
_MARKERS = "os^Dv<>P*X"
"""One for each contender; prefill is hollow, plan + score + top-k is small."""


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


def picture(result: BenchResult, path: Path) -> None:
    """Draw operations for a byte against TFLOP/s, both logarithmic, and write it to ``path`` (PNG).

    What counts no operations (top-k, plan) is not in it.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    plt = require_matplotlib()
    figure, axis = plt.subplots(figsize=(8, 5.5))
    timed = [each for each in result.results if each.teraflops is not None]
    marker_of = {name: _MARKERS[number % len(_MARKERS)] for number, name in enumerate(result.contenders)}
    for each in timed:
        color, prefill = _COLORS[str(each.case.dtype)], each.case.shape.kind is Kind.PREFILL
        axis.plot(
            cost_of(each.case).intensity,
            each.teraflops,
            marker=marker_of[each.contender],
            color=color,
            markerfacecolor="none" if prefill else color,
            linestyle="none",
            markersize=7 if each.case.op is Op.SCORE else 4,
            label=f"{each.contender}, {each.case.dtype}, {each.case.shape.kind} {each.case.op}",
        )
    if result.ceilings is not None:
        _draw_ceilings(axis, result, [cost_of(each.case).intensity for each in timed])
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations for each byte that must move")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(
        f"{result.versions['device']}, tetrad {result.versions['tetrad']}, {result.versions['date']}", fontsize=9
    )
    axis.grid(which="major", alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axis.legend(once.values(), once.keys(), fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    try:
        figure.savefig(path, dpi=140, bbox_inches="tight", format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    finally:
        plt.close(figure)


def _draw_ceilings(axis: Any, result: BenchResult, intensities: list[float]) -> None:
    ceilings = result.ceilings
    assert ceilings is not None  # asked by the caller
    ridges = [rate.per_second / ceilings.read.per_second for rate in (ceilings.fp8, ceilings.bf16)]
    left, right = min([*intensities, *ridges]) / 2, max([*intensities, *ridges]) * 2
    slope = ceilings.read.per_second / 1e12
    axis.plot([left, max(ridges)], [slope * left, slope * max(ridges)], color="black", label=ceilings.read.what)
    for rate, style in zip(dict.fromkeys((ceilings.fp8, ceilings.bf16)), ("-", "--"), strict=False):
        top = rate.per_second / 1e12
        start = rate.per_second / ceilings.read.per_second
        axis.plot([start, max(right, 2 * start)], [top, top], color="black", linestyle=style, label=rate.what)
