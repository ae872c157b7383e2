"""The command ``tetrad``, also as ``python -m tetrad`` where its script is not on the path."""

from __future__ import annotations

import sys
from contextlib import suppress

_INTERRUPTED = 130
"""As ``tetrad.cli.signals`` has it, which is not imported yet."""


def run() -> int:
    """Run the command. Ctrl-C while the modules are imported, which takes seconds, ends it as quietly as later."""
    try:
        from tetrad.cli.main import main

        return main()
    except KeyboardInterrupt:
        with suppress(OSError, ValueError, AttributeError):  # standard error may be closed
            sys.stderr.write("tetrad: interrupted\n")
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())
