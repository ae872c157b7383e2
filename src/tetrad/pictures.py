"""What every picture needs: matplotlib, drawing to files, and a file written or an error that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tetrad.errors import ConfigError


def require_matplotlib() -> Any:
    """matplotlib.pyplot, drawing to files.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'tetrad[plot]', or leave out --png") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a matplotlib figure to ``path`` (PNG) and close it.

    Raises:
        ConfigError: the file cannot be written.
    """
    plt = require_matplotlib()
    try:
        figure.savefig(path, dpi=140, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    finally:
        plt.close(figure)
