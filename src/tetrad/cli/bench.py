"""``tetrad bench``: measurements of speed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tetrad.bench import report, roofline
from tetrad.bench.cases import BenchSettings, Kind, Op, Shape, default_shapes, parse_shapes
from tetrad.bench.device import resolve_device
from tetrad.bench.measurement import BenchResult, run_bench
from tetrad.bench.peers import contenders
from tetrad.cli.flags import Parser
from tetrad.cli.results import read_json
from tetrad.errors import ConfigError
from tetrad.geometry import IndexDtype

T = TypeVar("T")


def add_command(commands: Any) -> None:
    """Add the subcommand and its own."""
    parser = commands.add_parser("bench", help="measure speed")
    kinds = parser.add_subparsers(dest="benchmark", metavar="KIND", required=True, parser_class=Parser)
    indexer = kinds.add_parser("indexer", help="the indexer's ops: plan, score, top-k, against what the device can do")
    group = indexer.add_argument_group("what")
    group.add_argument(
        "--decode", metavar="LIST", help="requests x entries x rows: 64x32768x1,8x32768x4; rows default to 1"
    )
    group.add_argument("--prefill", metavar="LIST", help="rows x entries of one request: 4096x16384")
    group.add_argument("--dtypes", default="fp4,fp8,bf16", metavar="LIST", help="of the index cache; fp32 too")
    group.add_argument("--only", default="plan,score,topk,total", metavar="LIST", help="ops; total is all three")
    group.add_argument("--heads", type=int, default=64, metavar="N", help="heads of the indexer")
    group.add_argument("--head-dim", type=int, default=128, metavar="N", help="channels of a head")
    group.add_argument("--k", type=int, default=512, metavar="N", help="entries to choose")
    group = indexer.add_argument_group("whom")
    group.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="LIST",
        help="back ends of ours to compare, instead of the chosen ones: sm90,reference; + joins the names of one "
        "contender, as in sm90+cuda. The first is what the others are compared with",
    )
    group.add_argument(
        "--peer", action="append", default=[], metavar="LIST", help="deep_gemm, or any module with the same calls"
    )
    group.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu; a GPU if there is one")
    group = indexer.add_argument_group("how")
    group.add_argument("--repeats", type=int, default=7, metavar="N", help="measurements, of which the median counts")
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
    group.add_argument("--png", type=Path, metavar="FILE", help="draw the times and a roofline")
    group.add_argument(
        "--from-json", type=Path, metavar="FILE", help="measure nothing: print or draw what --json wrote"
    )
    indexer.set_defaults(run=run_indexer_command, parser=indexer)


def run_indexer_command(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Measure and print. Exit codes as everywhere: 1 if a result was wrong or a call failed, 2 for wrong flags."""
    try:
        if parsed.png:
            roofline.require_matplotlib()  # known before the measurement, not after it
            if not parsed.png.absolute().parent.is_dir():
                raise ConfigError(f"--png {parsed.png}: there is no folder {parsed.png.absolute().parent}")
        if parsed.from_json:
            return _tell(report.from_dict(read_json(parser, parsed, ("png", "json"))), parsed)
        device = resolve_device(parsed.device)
        settings = BenchSettings(
            shapes=_shapes(parsed, device.type),
            dtypes=_choices(parsed.dtypes, "--dtypes", IndexDtype, tuple(IndexDtype)),
            ops=_choices(parsed.only, "--only", Op, tuple(Op)),
            heads=parsed.heads,
            head_dim=parsed.head_dim,
            k=parsed.k,
            repeats=parsed.repeats,
        )
        backends = [tuple(name.split("+")) for name in _names(parsed.backend)]
        everyone = contenders(device, backends, _names(parsed.peer))
        refused = {peer.name: [peer.refusal(case) for case in settings.cases()] for peer in everyone}
        for name, reasons in refused.items():
            if None not in reasons:
                raise ConfigError(f"{name} computes none of these cases: {'; '.join(dict.fromkeys(map(str, reasons)))}")
    except ConfigError as error:
        print(f"tetrad: error: {error}", file=sys.stderr)
        return 2
    return _tell(run_bench(settings, device, everyone, progress=sys.stderr.isatty()), parsed)


def _tell(result: BenchResult, parsed: argparse.Namespace) -> int:
    """Print and draw; the exit code."""
    print(json.dumps(report.to_dict(result), indent=2) if parsed.json else report.table(result))
    if parsed.png:
        roofline.picture(result, parsed.png)
        print(f"wrote {parsed.png}", file=sys.stderr)
    if result.interrupted:
        print(f"tetrad: interrupted after {len(result.results)} results; these are what there is", file=sys.stderr)
        return 130
    if result.died:
        print(
            f"tetrad: the device failed after {len(result.results)} results ({result.died}); the last case of the "
            "table killed it, run it alone under compute-sanitizer",
            file=sys.stderr,
        )
    return 0 if result.clean else 1


def _shapes(parsed: argparse.Namespace, device_type: str) -> tuple[Shape, ...]:
    if parsed.decode is None and parsed.prefill is None:
        return default_shapes(device_type)
    decode = parse_shapes(parsed.decode, Kind.DECODE) if parsed.decode is not None else ()
    return (*decode, *(parse_shapes(parsed.prefill, Kind.PREFILL) if parsed.prefill is not None else ()))


def _names(lists: list[str]) -> list[str]:
    """The flag may be repeated, and each time hold several names."""
    return [name.strip() for text in lists for name in text.split(",")]


def _choices(text: str, flag: str, make: Callable[[str], T], known: tuple[T, ...]) -> tuple[T, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag} {name!r} is unknown; choose among {', '.join(map(str, known))}")
    return tuple(make(name) for name in names)
