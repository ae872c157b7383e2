"""``tetrad eval``: measurements of accuracy."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tetrad import bundled
from tetrad.cli.flags import Parser, add_engine_flags, engine_args
from tetrad.cli.results import read_json
from tetrad.engine.config import parse_tokens
from tetrad.errors import ConfigError
from tetrad.eval import picture, report
from tetrad.eval.recall import RecallSettings, Variant, run_recall


def add_command(commands: Any) -> None:
    """Add the subcommand and its own."""
    parser = commands.add_parser("eval", help="measure accuracy")
    kinds = parser.add_subparsers(dest="evaluation", metavar="KIND", required=True, parser_class=Parser)
    recall = kinds.add_parser("recall", help="recall of facts by length, depth and index format")
    add_engine_flags(recall, model=bundled.NAME)
    group = recall.add_argument_group("recall")
    group.add_argument("--lengths", default="8K,32K", metavar="LIST", help="tokens of a document and question: 8K,32K")
    group.add_argument(
        "--depths", default="0.1,0.3,0.5,0.7,0.9", metavar="LIST", help="where facts stand: 0 is the start"
    )
    group.add_argument(
        "--variants",
        default="bf16,fp8,fp4,fp4-plain",
        metavar="LIST",
        help="index formats; -plain leaves the Hadamard rotation out, /2 halves the top-k: fp4,fp4-plain,fp4/2",
    )
    group.add_argument("--documents", type=int, default=1, metavar="N", help="documents of each length and depth")
    group.add_argument("--questions", type=int, default=20, metavar="N", help="questions about each document")
    group.add_argument("--document-seed", type=int, default=0, metavar="N", help="other documents and questions")
    group.add_argument("--png", type=Path, metavar="FILE", help="draw answers and entries found")
    group.add_argument(
        "--from-json", type=Path, metavar="FILE", help="measure nothing: print or draw what --json --answers wrote"
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
    group.add_argument("--answers", action="store_true", help="with --json: every question with its answer")
    recall.set_defaults(run=run_recall_command, parser=recall)


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} is not a list of numbers; write 0.1,0.5,0.9") from error


def run_recall_command(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Measure and print."""
    settings = RecallSettings(
        lengths=tuple(parse_tokens(part, "--lengths") for part in parsed.lengths.split(",")),
        depths=_numbers(parsed.depths, "--depths"),
        variants=tuple(Variant.parse(name.strip()) for name in parsed.variants.split(",")),
        documents=parsed.documents,
        questions=parsed.questions,
        seed=parsed.document_seed,
    )
    if parsed.png:
        picture.require_matplotlib()  # known before the measurement, not after it
        if not parsed.png.absolute().parent.is_dir():
            raise ConfigError(f"--png {parsed.png}: there is no folder {parsed.png.absolute().parent}")
    if parsed.from_json:
        result = report.from_dict(read_json(parser, parsed, ("png", "json", "answers")))
    else:
        result = run_recall(engine_args(parser, parsed), settings, progress=sys.stderr.isatty())
    if parsed.json:
        print(json.dumps(report.to_dict(result, answers=parsed.answers), indent=2))
    else:
        print(report.table(result))
    if parsed.png:
        picture.picture(result, parsed.png)
        print(f"wrote {parsed.png}", file=sys.stderr)
    if result.interrupted:
        print(f"tetrad: interrupted after {len(result.answers)} answers; these are what there is", file=sys.stderr)
        return 130
    return 0
