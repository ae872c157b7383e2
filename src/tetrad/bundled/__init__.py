"""What ships with the package: one small model, and the geometry of the two released ones.

``model="bundled"`` names the model, a few million parameters, trained to find facts in long documents, wherever a model
folder is asked for. Its card, ``notes/README.md``, says what it can do.

``model="deepseek-v4-flash"`` and ``"deepseek-v4-pro"`` name the configurations of the released models, without their
weights: enough to inspect them, and to run them on random weights where those fit.
"""

from __future__ import annotations

from pathlib import Path

from tetrad.errors import ConfigError

NAME = "bundled"
_HERE = Path(__file__).parent
FOLDER = _HERE / "notes"
GEOMETRIES = {name: _HERE / name for name in ("deepseek-v4-flash", "deepseek-v4-pro")}
"""Name -> folder, which holds config.json alone."""


def resolve(model: str | Path) -> str:
    """The folder of what a name of the package means, any other name as it is.

    The names of the geometries are also understood as the model hub writes them (``deepseek-ai/DeepSeek-V4-Flash``). A
    folder that exists goes before them, for that is what a download of the weights is called; ``bundled`` is always the
    package's own.
    """
    if model == NAME:
        return str(FOLDER)
    geometry = GEOMETRIES.get(str(model).lower().removeprefix("deepseek-ai/"))
    return str(model) if geometry is None or Path(model).exists() else str(geometry)


def name_of(folder: str | Path) -> str:
    """The name by which the package knows a folder, any other folder as it is."""
    names = {str(FOLDER): NAME} | {str(path): name for name, path in GEOMETRIES.items()}
    return names.get(str(folder), str(folder))


def require_weights(folder: str | Path, *, dummy: bool) -> None:
    """Refuses a geometry where weights are to be read.

    Args:
        folder: what ``resolve`` gave.
        dummy: whether the weights are random ones.

    Raises:
        ConfigError: says what to name instead.
    """
    name = name_of(folder)
    if name in GEOMETRIES and not dummy:
        raise ConfigError(
            f"{name} is in this package as its configuration alone, without weights; name the folder that the released "
            f"checkpoint was downloaded to, or ask for random weights with --load-dummy"
        )
