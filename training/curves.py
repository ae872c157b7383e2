"""Draws a run's losses and the share of answer bytes that were wrong.

    python curves.py log.jsonl curves.png

The first argument is a `log.jsonl` of `train.py`; the logs of legs one after the other make one run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_LOSSES = (
    ("answer", "answer bytes", "#0072B2", "-", "o"),
    ("other", "other bytes", "#D55E00", "--", "s"),
    ("index", "indexers' divergence", "#000000", ":", "^"),
)
"""Name in the log, label, one of Okabe and Ito's colours, line and marker: told apart in grey too."""


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log. Raises ValueError if it is none, or empty."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        for line in lines:
            _ = [line[name] for name in ("step", "lengths", "right", *(name for name, *_ in _LOSSES))]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no log of train.py: {error!r}") from error
    if not lines:
        raise ValueError(f"{path} is empty")
    return lines


def changes(lines: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """The stages that the log can tell apart: the step that each begins after, and its lengths as text."""
    found: list[tuple[int, str]] = []
    before, last = None, 0
    for line in lines:
        if line["lengths"] != before:
            lengths = line["lengths"]
            found.append((last, str(lengths[0]) if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"))
            before = lengths
        last = line["step"]
    return found


def draw(lines: list[dict[str, Any]], name: str) -> Any:
    """The figure. Nothing covers a curve: legend and stages stand outside of the axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, wrong) = plt.subplots(1, 2, figsize=(10.5, 4.8), layout="constrained")
    steps = [line["step"] for line in lines]
    every = max(1, len(lines) // 12)
    for number, (key, label, color, style, marker) in enumerate(_LOSSES):
        # markers of different curves stand at different steps, so that where curves meet both are seen
        losses.plot(
            steps,
            [line[key] for line in lines],
            color=color,
            linestyle=style,
            marker=marker,
            markersize=4,
            markevery=(number * every // 3, every),
            linewidth=1.3,
            label=label,
        )
    shares = [100 * (1 - line["right"]) for line in lines]
    wrong.plot(steps, shares, color=_LOSSES[0][2], linewidth=1.3, marker="o", markersize=4, markevery=every)
    end = {"xytext": (0, -10), "textcoords": "offset points", "fontsize": 8, "ha": "center"}
    wrong.annotate(f"{shares[-1]:.2g} %", (steps[-1], shares[-1]), **end)
    losses.set_title("loss", fontsize=9, pad=58)
    losses.set_ylabel("nats a byte; divergence: nats", fontsize=8)
    wrong.set_title("answer bytes wrong", fontsize=9, pad=58)
    wrong.set_ylabel("%", fontsize=8)
    for axis in (losses, wrong):
        axis.set_yscale("log")
        axis.set_xlabel("step (bytes of the documents above)", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.margins(y=0.1)
        for step, lengths in changes(lines):
            if step:
                axis.axvline(step, color="0.55", linewidth=0.8)
            axis.annotate(
                lengths,
                (step, 1.0),
                xycoords=axis.get_xaxis_transform(),
                xytext=(2, 4),
                textcoords="offset points",
                rotation=45,
                fontsize=7,
            )
    figure.legend(loc="outside lower center", ncols=len(_LOSSES), fontsize=8, frameon=False)
    last = lines[-1]["step"]
    between = lines[1]["step"] - lines[0]["step"] if len(lines) > 1 else last
    figure.suptitle(f"{name}: {last} steps, each point the mean of {between}; lines mark the stages", fontsize=9)
    return figure


def main(arguments: list[str]) -> str | None:
    """Draws; returns what was wrong, or None."""
    if len(arguments) != 2:
        return "curves.py: error: name the log and the picture: python curves.py log.jsonl curves.png"
    log = Path(arguments[0])
    try:
        figure = draw(read(log), f"training of {log.resolve().parent.name}/{log.name}")
        figure.savefig(arguments[1], dpi=130, format="png")
    except (ValueError, OSError) as error:
        return f"curves.py: error: {error}"
    except ModuleNotFoundError:
        return "curves.py: error: it needs matplotlib: pip install matplotlib"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
