"""A recall measurement as a table, as JSON and back, and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tetrad.errors import ConfigError
from tetrad.eval.recall import BASELINE, Answer, RecallResult, RecallSettings, Variant
from tetrad.eval.statistics import interval_of_mean, interval_of_share

_WIDTH = 100
_AGAINST = f"minus {BASELINE} [95 %]"
_HEAD = f"{'length':>7} {'index':9} {'asked':>5} {'recall %':>8} {_AGAINST:>26} {'found %':>7}"


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One variant at one length. Shares are 0 to 1; differences are to the baseline, on the same questions.

    ``found`` is the share of the baseline's chosen entries, None without a baseline. Lows and highs are 95 % intervals:
    ``low`` and ``high`` of the difference.
    """

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
    recall_low: float
    recall_high: float
    found_low: float | None
    found_high: float | None


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
    found = np.array([answer.found for answer in mine.values() if answer.found is not None])
    found_low, found_high = interval_of_mean(found) if len(found) else (None, None)

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
        float(found.mean()) if len(found) else None,
        {depth: share(lambda a: a.depth, depth) for depth in sorted({a.depth for a in mine.values()})},
        {kind: share(lambda a: a.kind, kind) for kind in sorted({a.kind for a in mine.values()})},
        *interval_of_share(sum(answer.right for answer in mine.values()), len(mine)),
        found_low,
        found_high,
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
        "model": result.model,
        "device": result.device,
        "dtype": result.dtype,
        "interrupted": result.interrupted,
        "died": result.died,
        "cells": [dataclasses.asdict(cell) for cell in cells(result)],
    }
    if answers:
        document["answers"] = [dataclasses.asdict(answer) for answer in result.answers]
    return document


def from_dict(document: Any) -> RecallResult:
    """The result behind what :func:`to_dict` gave with ``answers``.

    Raises:
        ConfigError: it is something else, or has no answers.
    """
    if not isinstance(document, dict) or "settings" not in document:
        raise ConfigError("this is no result of tetrad eval recall --json")
    if "answers" not in document:
        raise ConfigError("the result has no answers; write it with --json --answers")
    try:
        settings = dict(document["settings"])
        settings["variants"] = tuple(Variant(**variant) for variant in settings["variants"])
        for name in ("lengths", "depths", "kinds"):
            settings[name] = tuple(settings[name])
        return RecallResult(
            RecallSettings(**settings),
            document["index_topk"],
            document["device"],
            [Answer(**answer) for answer in document["answers"]],
            document["interrupted"],
            document.get("died"),
            document.get("model", ""),
            document.get("dtype", ""),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"this is no result of tetrad eval recall --json: {error}") from error


def command(result: RecallResult) -> str:
    """The command that measures the same: what is not in it is a default."""
    settings, plain = result.settings, RecallSettings()
    flags = [f"--model {result.model}"] if result.model else []
    flags += [f"--device {result.device}"] if result.device == "cpu" else []
    flags += [f"--dtype {result.dtype}"] if result.dtype else []
    flags.append("--lengths " + ",".join(tokens_text(length) for length in settings.lengths))
    flags.append("--variants " + ",".join(variant.name for variant in settings.variants))
    if settings.depths != plain.depths:
        flags.append("--depths " + ",".join(f"{depth:g}" for depth in settings.depths))
    for flag, value, usual in (
        ("documents", settings.documents, plain.documents),
        ("questions", settings.questions, plain.questions),
        ("document-seed", settings.seed, plain.seed),
    ):
        flags += [f"--{flag} {value}"] if value != usual else []
    return " ".join(("tetrad eval recall", *flags))


def tokens_text(length: int) -> str:
    """A number of tokens as it is written on the command line: 8K for 8192."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)
