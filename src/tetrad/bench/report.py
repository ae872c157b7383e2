"""The results of ``tetrad bench indexer`` as a table, as JSON and back."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from tetrad.bench.cases import BenchSettings, Case, Kind, Op, Shape, parse_shapes
from tetrad.bench.costs import Ceilings, Rate, cost_of, floor_of
from tetrad.bench.measurement import BenchResult, Result, Status
from tetrad.bench.peers import BackendUse
from tetrad.bench.timing import Timing
from tetrad.errors import ConfigError
from tetrad.geometry import IndexDtype

_METHODS = {
    "graph": "CUDA graphs",
    "events": "calls from the host between CUDA events (the back end cannot be captured; the host's time is in it)",
    "host": "the host's clock around calls",
}
_HEAD = (
    f"{'op':5} {'index':5} {'by':16} {'us':>10} {'TB/s':>8} {'TFLOP/s':>9} {'floor us':>9} {'bound':6} "
    f"{'%':>5} {'ratio':>6}  note"
)
_WIDTH = 100


def table(result: BenchResult) -> str:
    """The table: what it was measured with and on, then a block for each shape."""
    lines = [*(part for line in _header(result) for part in _wrapped(line)), ""]
    shape = None
    for each in result.results:
        if each.status is Status.REFUSED:
            continue
        if each.case.shape != shape:
            shape = each.case.shape
            lines += [str(shape), _HEAD]
        lines.append(_line(each, result))
    return "\n".join([*lines, *(part for line in _refusals(result) for part in _wrapped(line))])


def _wrapped(line: str) -> list[str]:
    """A sentence of the header in lines that a terminal holds; what follows the first is indented further."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _header(result: BenchResult) -> list[str]:
    known, settings, device = result.versions, result.settings, result.versions["device"]
    software = ", ".join(
        f"{name} {known[name]}" for name in ("tetrad", "torch", "triton", "cuda", "driver") if known[name]
    )
    lines = [
        f"{device} ({known['arch']}), {software}, {known['date']}",
        f"{settings.heads} heads of {settings.head_dim} channels, k {settings.k}; us: median of {settings.repeats}",
    ]
    if result.ceilings is not None:
        read, fp8, bf16 = result.ceilings.read, result.ceilings.fp8, result.ceilings.bf16
        lines.append(f"measured: reads {read.per_second / 1e12:.3g} TB/s ({read.what})")
        rates = dict.fromkeys((fp8, bf16))
        lines += [f"measured: {rate.per_second / 1e12:.4g} TFLOP/s ({rate.what})" for rate in rates]
    lines.append(
        "floor: the larger of bytes that must move, each once, over the read rate and operations over the matrix rate "
        "(fp4 and fp8: FP8's; top-k and plan: bytes only); %: of the floor"
    )
    timings = [each.timing.method for each in result.results if each.timing is not None]
    lines += [f"timed by {_METHODS[method]}" for method in dict.fromkeys(timings)]
    if result.device_type == "cpu":
        lines.append("on a CPU: caches may be warm, and absolute figures mean little")
    for use in result.uses:
        dtypes = f" of {', '.join(use.dtypes)}" if use.dtypes else ""
        lines.append(f"{use.contender}: {use.op}{dtypes} by {use.name}: {use.reason}")
        lines += [f"    not {name}: {reason}" for name, reason in use.refused]
    if len(result.contenders) > 1:
        lines.append(f"ratio: time over that of {result.contenders[0]}")
    return lines


def _line(each: Result, result: BenchResult) -> str:
    head = f"{each.case.op:5} {each.case.dtype or '':5} {each.label:16}"
    if each.timing is None:
        return f"{head} {each.status.upper():>10}  {each.note}"
    notes = [each.note] if each.note else []
    if each.timing.method == "graph" and not each.cold:
        notes.append("warm cache")
    elif each.timing.method != "graph" and result.device_type != "cpu":
        notes.append("uncaptured")
    floor = percent = bound = ""
    if result.ceilings is not None:
        least = floor_of(each.case, result.ceilings)
        floor, bound = f"{least.microseconds:.2f}", least.bound
        percent = f"{each.percent_of_floor(result.ceilings):.1f}"
    teraflops = "" if each.teraflops is None else f"{each.teraflops:.4g}"
    ratio = result.ratio(each)
    return (
        f"{head} {each.timing.microseconds:10.2f} {each.terabytes_per_second:8.3g} {teraflops:>9} {floor:>9} "
        f"{bound:6} {percent:>5} {'' if ratio is None else f'{ratio:.2f}x':>6}  {', '.join(notes)}"
    ).rstrip()


def _refusals(result: BenchResult) -> list[str]:
    """Each reason once, with the ops and dtypes that it was given for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in result.results:
        if each.status is Status.REFUSED:
            what = " ".join((str(each.case.op), *([str(each.case.dtype)] if each.case.dtype else [])))
            ops = reasons.setdefault((each.contender, each.note), [])
            if what not in ops:
                ops.append(what)
    return [f"not timed: {name} {', '.join(ops)}: {reason}" for (name, reason), ops in reasons.items()]


def to_dict(result: BenchResult) -> dict[str, Any]:
    """Plain values for JSON; times in microseconds, rates a second."""
    return {
        "versions": result.versions,
        "device_type": result.device_type,
        "settings": result.settings.to_dict(),
        "ceilings": None if result.ceilings is None else dataclasses.asdict(result.ceilings),
        "contenders": result.contenders,
        "back_ends": [dataclasses.asdict(use) | {"refused": dict(use.refused)} for use in result.uses],
        "interrupted": result.interrupted,
        "died": result.died,
        "results": [_result_dict(each, result) for each in result.results],
    }


def _result_dict(each: Result, result: BenchResult) -> dict[str, Any]:
    case, cost = each.case, cost_of(each.case)
    floor = None if result.ceilings is None else floor_of(case, result.ceilings)
    return {
        "op": str(case.op),
        "kind": str(case.shape.kind),
        "requests": case.shape.requests,
        "rows": case.shape.rows,
        "entries": case.shape.entries,
        "dtype": None if case.dtype is None else str(case.dtype),
        "contender": each.contender,
        "by": each.label,
        "status": str(each.status),
        "note": each.note,
        "microseconds": None if each.timing is None else each.timing.microseconds,
        "least_microseconds": None if each.timing is None else each.timing.least,
        "most_microseconds": None if each.timing is None else each.timing.most,
        "method": None if each.timing is None else each.timing.method,
        "calls": None if each.timing is None else each.timing.calls,
        "cold": each.cold,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "terabytes_per_second": each.terabytes_per_second,
        "teraflops": each.teraflops,
        "floor_microseconds": None if floor is None else floor.microseconds,
        "bound": None if floor is None else floor.bound,
        "percent_of_floor": None if result.ceilings is None else each.percent_of_floor(result.ceilings),
        "ratio": result.ratio(each),
    }


def from_dict(document: Any) -> BenchResult:
    """The result behind what :func:`to_dict` gave.

    Raises:
        ConfigError: it is something else.
    """
    try:
        settings = _settings(document["settings"])
        ceilings = document["ceilings"]
        return BenchResult(
            settings,
            document["versions"],
            document["device_type"],
            document["contenders"],
            [
                BackendUse(**use | {"dtypes": tuple(use["dtypes"]), "refused": tuple(use["refused"].items())})
                for use in document["back_ends"]
            ],
            None if ceilings is None else Ceilings(**{name: Rate(**rate) for name, rate in ceilings.items()}),
            [_result(each, settings) for each in document["results"]],
            document["interrupted"],
            document["died"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"this is no result of tetrad bench indexer --json: {error!r}") from error


def _settings(values: dict[str, Any]) -> BenchSettings:
    shapes = (text.partition(" ") for text in values["shapes"])
    return BenchSettings(
        **values
        | {
            "shapes": tuple(shape for kind, _, sizes in shapes for shape in parse_shapes(sizes, Kind(kind))),
            "dtypes": tuple(IndexDtype(dtype) for dtype in values["dtypes"]),
            "ops": tuple(Op(op) for op in values["ops"]),
        }
    )


def _result(values: dict[str, Any], settings: BenchSettings) -> Result:
    shape = Shape(Kind(values["kind"]), values["requests"], values["entries"], values["rows"])
    dtype = None if values["dtype"] is None else IndexDtype(values["dtype"])
    timing = None
    if values["microseconds"] is not None:
        names = ("microseconds", "least_microseconds", "most_microseconds", "method", "calls")
        timing = Timing(*(values[name] for name in names))
    return Result(
        Case(Op(values["op"]), shape, dtype, settings.heads, settings.head_dim, settings.k),
        values["contender"],
        values["by"],
        Status(values["status"]),
        values["note"],
        timing,
        values["cold"],
    )
