"""``tetrad bench staging``: what the host does for a decode step."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tetrad.bench.device import resolve_device
from tetrad.bench.staging import run_staging
from tetrad.errors import ConfigError, check_whole

_EXAMPLES = (
    "tetrad bench staging",
    "tetrad bench staging --device cpu --sequences 64 --context 8192",
    "tetrad bench staging --json",
)


def add_command(kinds: Any) -> None:
    """Add it to the kinds of measurement."""
    text = "the host's part of a decode step: scheduling, block tables, tokens; no model"
    staging = kinds.add_parser("staging", help=text, description=text, examples=_EXAMPLES)
    staging.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: a GPU where there is one)")
    staging.add_argument("--sequences", type=int, default=256, metavar="N", help="sequences that decode together")
    staging.add_argument("--context", type=int, default=1_000_000, metavar="N", help="tokens that each of them has")
    staging.add_argument("--steps", type=int, default=101, metavar="N", help="steps to measure; their median counts")
    staging.add_argument("--json", action="store_true", help="print JSON instead of the table")
    staging.set_defaults(run=run_staging_command, parser=staging)


def run_staging_command(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Measure and print."""
    for name in ("sequences", "context", "steps"):
        check_whole(f"--{name}", getattr(parsed, name), 1, error=ConfigError)
    result = run_staging(
        resolve_device(parsed.device), sequences=parsed.sequences, context=parsed.context, steps=parsed.steps
    )
    print(json.dumps(result.to_dict(), indent=2) if parsed.json else result.text())
    return 0
