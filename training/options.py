"""The options of `train.py`: what is wrong with them is said before anything is computed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from recipes import RECIPES

INDEX_FORMATS = ("fp4", "fp4-plain", "fp8", "bf16")
"""How index queries and keys are stored; "dense" instead attends to all entries."""


@dataclass(frozen=True)
class Evaluation:
    """One recall at the end of a leg, and the text that asked for it. None: the model's top-k, the usual facts."""

    text: str
    length: int
    questions: int
    index_format: str
    topk: int | None = None
    facts: int | None = None

    @property
    def dense(self) -> bool:
        """Whether all entries are attended to instead of the selected ones."""
        return self.index_format == "dense"


def parse_evaluations(text: str) -> list[Evaluation]:
    """`length:questions:format[:topk[:facts]]`, several with commas between them; none for an empty text.

    Raises argparse.ArgumentTypeError if one is written otherwise.
    """
    return [_evaluation(part.strip()) for part in text.split(",")] if text.strip() else []


def _evaluation(text: str) -> Evaluation:
    form = f"{text!r} is not length:questions:format[:topk[:facts]]; write 8192:1024:fp4 or 32768:1024:bf16:8:700"
    parts = text.split(":")
    if not 3 <= len(parts) <= 5:
        raise argparse.ArgumentTypeError(form)
    known = (*INDEX_FORMATS, "dense")
    if parts[2] not in known:
        raise argparse.ArgumentTypeError(f"{text!r}: the format {parts[2]!r} is none of {', '.join(known)}")
    try:
        length, questions = int(parts[0]), int(parts[1])
        topk, facts = (int(part) if part else None for part in (*parts[3:], "", "")[:2])
    except ValueError:
        raise argparse.ArgumentTypeError(form) from None
    if length < 256 or min(questions, *(value for value in (topk, facts) if value is not None), 1 << 30) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a length is at least 256, the other numbers at least 1")
    return Evaluation(text, length, questions, parts[2], topk, facts)


def _device(text: str) -> str:
    try:
        kind = torch.device(text).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is no device to train on; write cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no GPU here; write cpu, and --recipe cpu or tiny")
    return text


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked; what is wrong ends the program with a line that names it (exit code 2)."""
    parser = argparse.ArgumentParser(description="Train the small DeepSeek-V4; see README.md.")
    parser.add_argument("--recipe", default="full", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights, the state and the log")
    parser.add_argument("--state", type=Path, help="continue from this leg's state")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stop", type=_whole, help="end this leg before this step")
    parser.add_argument("--seconds", type=_positive, default=float("inf"), help="end this leg after so long")
    parser.add_argument("--scale", type=_positive, default=1.0, help="multiplies every stage's steps")
    parser.add_argument("--tokens", type=_whole, help="tokens per step, whatever the stage says")
    parser.add_argument("--rate", type=_positive, default=3e-3, help="the highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--decay", type=float, default=0.4, help="the share of the steps over which the rate falls")
    parser.add_argument("--muon", action="store_true", help="Muon for the matrices inside the layers")
    parser.add_argument("--other", type=float, default=0.05, help="weight of the loss outside answers")
    parser.add_argument("--index", type=float, default=0.3, help="weight of the indexers' loss")
    parser.add_argument("--balance", type=float, default=1e-3, help="how fast the experts' loads are evened out")
    parser.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graphs", action="store_true", help="capture the steps as CUDA graphs; needs a GPU")
    parser.add_argument("--workers", type=_count, default=0, help="processes that make the data; 0: this one")
    parser.add_argument("--every", type=_whole, default=50, help="steps between progress lines")
    parser.add_argument(
        "--evaluate",
        type=parse_evaluations,
        default=[],
        help="after the leg: length:questions:format[:topk[:facts]],...",
    )
    options = parser.parse_args(arguments)
    if options.graphs and torch.device(options.device).type != "cuda":
        parser.error(f"--graphs captures CUDA graphs, and --device is {options.device}; leave --graphs out")
    if options.state and not options.state.is_file():
        parser.error(f"--state {options.state}: there is no such file; a leg writes OUT/state.safetensors at its end")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is a file; name a folder")
    return options
