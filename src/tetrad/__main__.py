"""``python -m tetrad``: the command ``tetrad`` where its script is not on the path."""

from __future__ import annotations

import sys

from tetrad.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
