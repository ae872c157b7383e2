"""Turns a training run's result into a checkpoint folder in the native format, with its tokenizer.

    python export.py RUN FOLDER

RUN holds `model.safetensors` and `config.json` as `train.py` writes them. Only this script needs the package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tokenizer import write
from train import load_final

from tetrad.models.checkpoint.writer import write_checkpoint
from tetrad.models.config import ModelConfig


def export(run: Path, folder: Path) -> None:
    """Writes the checkpoint. The weights were rounded in training, so the FP8 and FP4 stored here hold them exactly."""
    config = ModelConfig.from_dict(json.loads((run / "config.json").read_text()))
    write_checkpoint(folder, config, load_final(run / "model.safetensors"), overwrite=True)
    write(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB")


def main(arguments: list[str]) -> str | None:
    """Exports; returns what was wrong, or None."""
    if len(arguments) != 2:
        return "export.py: error: name the run's folder and the checkpoint's: python export.py RUN FOLDER"
    run, folder = map(Path, arguments)
    for name in ("config.json", "model.safetensors"):
        if not (run / name).is_file():
            return f"export.py: error: {run} has no {name}; name the folder that train.py --out wrote"
    export(run, folder)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
