"""Results that a command wrote as JSON, read again to print or draw them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tetrad.errors import ConfigError


def read_json(parser: argparse.ArgumentParser, parsed: argparse.Namespace, beside: Collection[str]) -> Any:
    """What the file of ``--from-json`` holds.

    beside: the destinations of the flags that mean something without a measurement.

    Raises:
        ConfigError: the file cannot be read or is no JSON, or a flag says how to measure although nothing is measured.
    """
    for action in parser._actions:
        if action.dest in (*beside, "from_json", "help") or not action.option_strings:
            continue
        if getattr(parsed, action.dest, action.default) != action.default:
            flag = action.option_strings[-1]
            raise ConfigError(f"--from-json measures nothing, so {flag} has no meaning beside it; leave one out")
    path: Path = parsed.from_json
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--from-json {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor JSON, or nested too deep
        raise ConfigError(f"--from-json {path} is no JSON: {error}") from error
