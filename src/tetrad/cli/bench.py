"""``tetrad bench``: measurements of speed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from tetrad.bench import report, roofline
from tetrad.bench.cases import BenchSettings, Kind, Op, Shape, default_shapes, parse_shapes
from tetrad.bench.device import resolve_device
from tetrad.bench.measurement import BenchResult, run_bench
from tetrad.bench.peers import contenders
from tetrad.cli import bench_staging
from tetrad.cli.flags import file_name
from tetrad.cli.progress import Progress
from tetrad.cli.signals import INTERRUPTED
from tetrad.cli.stored import read_json
from tetrad.cli.streams import is_terminal, say
from tetrad.errors import ConfigError
from tetrad.geometry import IndexDtype
from tetrad.pictures import require_matplotlib

T = TypeVar("T")
_EXAMPLES = (
    "tetrad bench indexer",
    "tetrad bench indexer --decode 64x32768,8x32768x4 --dtypes fp4,fp8 --only score",
    "tetrad bench indexer --prefill 4096x16384 --peer deep_gemm --json",
)


def add_command(commands: Any) -> None:
    """Add the subcommand and its own."""
    text = "measure speed"
    parser = commands.add_parser("bench", help=text, description=text)
    kinds = parser.add_subparsers(dest="benchmark", metavar="KIND", title="what to measure")
    text = "the indexer's ops: how fast they are, beside what the device could do"
    indexer = kinds.add_parser("indexer", help=text, description=text, examples=_EXAMPLES)
    group = indexer.add_argument_group("what to measure")
    group.add_argument(
        "--decode",
        metavar="LIST",
        help="decode steps, as requests x entries x rows: 64x32768x1,8x32768x4; 1 row where none is given (default: a "
        "set for the device)",
    )
    group.add_argument(
        "--prefill",
        metavar="LIST",
        help="prefills of one request, as rows x entries: 4096x16384 (default: a set for the device)",
    )
    group.add_argument(
        "--dtypes", default="fp4,fp8,bf16", metavar="LIST", help="formats of the index cache, of fp4, fp8, bf16, fp32"
    )
    group.add_argument(
        "--only",
        default="plan,score,topk,total",
        metavar="LIST",
        help="ops: plan divides the work, score computes the scores, topk chooses entries, total is all three",
    )
    group.add_argument("--heads", type=int, default=64, metavar="N", help="heads of the indexer")
    group.add_argument("--head-dim", type=int, default=128, metavar="N", help="channels of a head")
    group.add_argument("--k", type=int, default=512, metavar="N", help="entries to choose for each row")
    group = indexer.add_argument_group("what to compare")
    group.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: a GPU where there is one)")
    group.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="LIST",
        help="our back ends to compare: sm90,reference; sm90+cuda is one contender that takes an op from either. The "
        "first is what the others are compared with (default: those that the engine takes)",
    )
    group.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="LIST",
        help="other libraries: deep_gemm, or a module with functions like ours (default: none)",
    )
    group.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="measurements of each case; their median counts"
    )
    group = indexer.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
    group.add_argument(
        "--png", type=file_name, metavar="FILE", help="draw times and a roofline into this file (default: none)"
    )
    group.add_argument(
        "--from-json",
        type=file_name,
        metavar="FILE",
        help="measure nothing: print or draw what --json wrote into this file (default: measure)",
    )
    indexer.set_defaults(run=run_indexer_command, parser=indexer)
    bench_staging.add_command(kinds)


def run_indexer_command(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Measure and print; 1 if a result was wrong or a call failed."""
    if parsed.png:
        require_matplotlib()  # known before the measurement, not after it
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
    with Progress(lambda: "measuring", rewrite=False):
        result = run_bench(settings, device, everyone, progress=is_terminal(sys.stderr))
    return _tell(result, parsed)


def _tell(result: BenchResult, parsed: argparse.Namespace) -> int:
    """Print and draw; the exit code."""
    print(json.dumps(report.to_dict(result), indent=2) if parsed.json else report.table(result))
    if parsed.png:
        roofline.picture(result, parsed.png)
        say(f"wrote {parsed.png}")
    if result.interrupted:
        say(f"tetrad: interrupted after {len(result.results)} results, which are printed")
        return INTERRUPTED
    if result.died:
        say(
            f"tetrad: the device failed after {len(result.results)} results ({result.died}); the last case of the "
            "table made it fail; run that case alone under compute-sanitizer"
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
