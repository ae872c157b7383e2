"""``tetrad eval``: measurements of accuracy."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tetrad import bundled
from tetrad.cli.flags import add_engine_flags, engine_args, file_name
from tetrad.cli.progress import Progress
from tetrad.cli.signals import INTERRUPTED
from tetrad.cli.stored import read_json
from tetrad.cli.streams import say
from tetrad.config.engine_config import parse_tokens
from tetrad.errors import ConfigError
from tetrad.eval import picture, report
from tetrad.eval.recall import RecallProgress, RecallSettings, Variant, run_recall
from tetrad.pictures import require_matplotlib

_SET_HERE = {
    "index_cache_dtype": "it measures the formats that --variants names",
    "enable_deepseek_v4_fp4_indexer": "it measures the formats that --variants names",
    "index_hadamard": "a name with -plain among --variants leaves the rotation out",
    "max_model_len": "it follows from --lengths",
}
_EXAMPLES = (
    "tetrad eval recall --lengths 4K",
    "tetrad eval recall --lengths 8K,32K --variants bf16,fp4,fp4-plain --png recall.png",
    "tetrad eval recall MODEL --device cuda --questions 50 --json --answers",
)


def add_command(commands: Any) -> None:
    """Add the subcommand and its own."""
    text = "measure accuracy"
    parser = commands.add_parser("eval", help=text, description=text)
    kinds = parser.add_subparsers(dest="evaluation", metavar="KIND", title="what to measure")
    text = "how many facts a model recalls from long documents, by length, depth and format of the index cache"
    recall = kinds.add_parser("recall", help=text, description=text, examples=_EXAMPLES)
    add_engine_flags(recall, model=bundled.NAME, without=_SET_HERE)
    group = recall.add_argument_group("what to ask")
    group.add_argument(
        "--lengths", default="8K,32K", metavar="LIST", help="tokens of a document with its question; 8K is 8192"
    )
    group.add_argument(
        "--depths",
        default="0.1,0.3,0.5,0.7,0.9",
        metavar="LIST",
        help="where in a document the facts stand: 0 is its start, 1 its end",
    )
    group.add_argument(
        "--variants",
        default="bf16,fp8,fp4,fp4-plain",
        metavar="LIST",
        help="formats of the index cache: fp4, fp8, bf16, fp32; fp4-plain leaves the Hadamard rotation out, fp4/2 "
        "halves the number of chosen entries",
    )
    group.add_argument("--documents", type=int, default=1, metavar="N", help="documents of each length and depth")
    group.add_argument("--questions", type=int, default=20, metavar="N", help="questions about each document")
    group.add_argument(
        "--document-seed", type=int, default=0, metavar="N", help="another number makes other documents and questions"
    )
    group = recall.add_argument_group("output")
    group.add_argument(
        "--from-json",
        type=file_name,
        metavar="FILE",
        help="measure nothing: print or draw what --json --answers wrote into this file (default: measure)",
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
    group.add_argument("--answers", action="store_true", help="with --json: list every question with its answer")
    group.add_argument(
        "--png", type=file_name, metavar="FILE", help="draw answers and entries found into this file (default: none)"
    )
    recall.set_defaults(run=run_recall_command, parser=recall)


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} is not a list of numbers; write 0.1,0.5,0.9") from error


def run_recall_command(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Measure and print."""
    if parsed.answers and not parsed.json:
        parser.error("--answers adds to the JSON output; give --json as well")
    # questions about a document are asked together, behind its common prefix
    if getattr(parsed, "max_num_seqs", parsed.questions + 1) <= parsed.questions:
        parser.error(f"--max-num-seqs must be above --questions, at least {parsed.questions + 1}")
    settings = RecallSettings(
        lengths=tuple(parse_tokens(part, "--lengths") for part in parsed.lengths.split(",")),
        depths=_numbers(parsed.depths, "--depths"),
        variants=tuple(Variant.parse(name.strip()) for name in parsed.variants.split(",")),
        documents=parsed.documents,
        questions=parsed.questions,
        seed=parsed.document_seed,
    )
    if parsed.png:
        require_matplotlib()  # known before the measurement, not after it
        if not parsed.png.absolute().parent.is_dir():
            raise ConfigError(f"--png {parsed.png}: there is no folder {parsed.png.absolute().parent}")
    if parsed.from_json:
        result = report.from_dict(read_json(parser, parsed, ("png", "json", "answers")))
    else:
        progress = RecallProgress()
        with Progress(lambda: _state(progress)):
            result = run_recall(engine_args(parser, parsed), settings, progress=progress)
    if parsed.json:
        print(json.dumps(report.to_dict(result, answers=parsed.answers), indent=2))
    else:
        print(report.table(result))
    if parsed.png:
        picture.picture(result, parsed.png)
        say(f"wrote {parsed.png}")
    if result.interrupted:
        say(f"tetrad: interrupted after {len(result.answers)} answers, which are counted")
        return INTERRUPTED
    if result.died:
        say(f"tetrad: error: {result.died}; the report is of the {len(result.answers)} answers before it")
        return 1
    return 0


def _state(progress: RecallProgress) -> str:
    return f"{progress.doing}, {progress.done} of {progress.questions} questions answered, {progress.tokens:,} tokens"
