"""The house: docs/architecture.md names every folder, and the core can be imported without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tetrad"


def rooms() -> set[str]:
    """Folders and files of the package's top, as the page writes them."""
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    return folders | {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("_")}


def test_the_page_names_every_room_once():
    """A room that nobody wrote about, or that is gone, makes the page a description of another house."""
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## A step")[0]
    named = re.findall(r"^\| `([\w./]+)` \|", table, re.M)
    assert sorted(named) == sorted(rooms())


def test_the_core_needs_no_torch():
    """A scheduler in a process of its own must not spend a second and half a gigabyte on torch."""
    code = "import sys, tetrad.core.engine_core; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
