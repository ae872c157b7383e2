"""The command ``tetrad``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from tetrad import __version__
from tetrad.cli import bench, demo, evaluate, generate, inspect, signals, streams
from tetrad.cli.parser import Parser
from tetrad.errors import ConfigError, TetradError

Command = Callable[[argparse.ArgumentParser, argparse.Namespace], int]


def build_parser() -> Parser:
    """The parser of all subcommands."""
    parser = Parser(
        prog="tetrad",
        description="DeepSeek-V4 inference with a 4-bit lightning-indexer key cache.",
        examples=("tetrad demo", "tetrad generate --help"),
    )
    parser.add_argument(
        "--version", action="version", version=f"tetrad {__version__}", help="print the version and exit"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for module in (generate, inspect, evaluate, bench, demo):
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit codes are those of ``parser.EXIT_CODES``, which every help ends with.
    """
    with streams.guarded(), signals.caught() as signal:
        return signal.exit_code(_run(sys.argv[1:] if argv is None else argv))


def _run(arguments: Sequence[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    parsed = build_parser().parse_args(arguments)
    if getattr(parsed, "verbose", False):
        logging.getLogger("tetrad").setLevel(logging.INFO)
    try:
        if getattr(parsed, "output", None) is None:
            streams.require_output()
        code = parsed.run(parsed.parser, parsed)
        sys.stdout.flush()  # here, where a reader that left is an error that can be caught
        return code
    except TetradError as error:
        streams.say(f"tetrad: error: {error}{parsed.parser.note_on(str(error))}")
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        return streams.READER_LEFT
    except OSError as error:
        streams.say(f"tetrad: error: {error}")
        return 1
    except KeyboardInterrupt:
        streams.say("tetrad: interrupted")
        return signals.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
