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


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("export.py: error: name the run's folder and the checkpoint's: python export.py RUN FOLDER")
    missing = [name for name in ("config.json", "model.safetensors") if not (Path(sys.argv[1]) / name).is_file()]
    if missing:
        sys.exit(f"export.py: error: {sys.argv[1]} has no {missing[0]}; name the folder that train.py --out wrote")
    export(Path(sys.argv[1]), Path(sys.argv[2]))
