"""Training sequences: a document, then questions with their answers, as byte tokens with loss weights.

The documents are those of the evaluation (`src/tetrad/eval/documents.py`, loaded by path so that training needs torch
alone). A batch depends on the seed and the step only, whatever process makes it.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.data import Dataset

BOS, EOS, PAD = 0, 1, 2
FIRST_BYTE = 8
"""Ids 0 to 7 are special tokens; byte b is token FIRST_BYTE + b."""

GAP = 128


def _load_documents() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "src" / "tetrad" / "eval" / "documents.py"
    spec = importlib.util.spec_from_file_location("tetrad_documents", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"the document generator is missing: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


documents = _load_documents()


def encode(text: str) -> list[int]:
    """The tokens of ASCII text."""
    return [FIRST_BYTE + byte for byte in text.encode()]


@dataclass
class Batch:
    """tokens, positions int64 [B, S]; answer bool [B, S] (the next token belongs to an answer); rows int64 [B, M]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    answer: torch.Tensor
    rows: torch.Tensor

    def to(self, device: str) -> Batch:
        return Batch(*(part.to(device, non_blocking=True) for part in vars(self).values()))

    def pin_memory(self) -> Batch:
        """In page-locked memory, so that the copy to the GPU does not wait for the GPU (the loader calls this)."""
        return Batch(*(part.pin_memory() for part in vars(self).values()))


@dataclass(frozen=True)
class Stage:
    """Some steps of training. A step's sequences have one of `lengths`; their number follows from `tokens`."""

    steps: int
    lengths: tuple[int, ...]
    selection: bool = False
    quantised: bool = False
    gaps: float = 0.0
    """The share of sequences whose positions jump, which shows far distances for the price of near ones."""
    varied: float = 0.0
    """The share of names and words that are not plain consonant-vowel pairs."""
    density: float = 1.7
    """At most so many times the facts that a document of this length holds by default."""
    peak: float | None = None
    """Begins a new cycle of the learning rate, which rises to this share of the base rate; None: the cycle goes on."""
    tokens: int = 32768
    rows: int = 2048


def sequence(
    rng: random.Random, length: int, varied: float = 0.0, density: float = 1.7
) -> tuple[list[int], list[bool], int]:
    """One sequence of `length` tokens, the answer marks, and where the questions begin."""
    region = int(min(0.45 * length, 16 * length**0.5, 2048))
    questions = max(1, region // 42)
    begins = rng.random() < 0.2
    most = (length - region) // 34
    while True:
        wanted = min(most, int(documents.default_facts(length) * rng.uniform(0.3, density)))
        plan = documents.make_plan(rng, questions, wanted, similar=rng.choice((0.1, 0.25, 0.5)), varied=varied)
        document = length - begins - plan.question_bytes()
        if plan.question_bytes() <= region and sum(len(f.sentence()) + 1 for f in plan.facts) < document:
            break
        questions = max(1, questions - max(1, questions // 10))
        if varied:
            # Varied names can be longer than the average that `most` reckons with.
            most = max(0, most - 1 - most // 10)
    text, _ = documents.lay_out(rng, plan, document)
    tokens = [BOS] * begins + encode(text)
    start = len(tokens)
    answer = [False] * start
    for asked in rng.sample(plan.asked, len(plan.asked)):
        prompt, reply = encode(asked.prompt), encode(asked.answer + documents.STOP)
        tokens += prompt + reply
        answer += [False] * (len(prompt) - 1) + [True] * len(reply) + [False]
    return tokens, answer, start


def gap_positions(rng: random.Random, length: int, furthest: int) -> list[int]:
    """0 .. length-1 with up to three jumps by multiples of `GAP`, at multiples of `GAP`, to at most `furthest`."""
    jumps = [0] * (length // GAP + 1)
    extra = int((furthest - length) * rng.random() ** 2)
    for _ in range(rng.randint(1, 3)):
        jumps[int(rng.random() * len(jumps))] += extra // 3 // GAP * GAP
    positions, shift = [], 0
    for block in range(0, length, GAP):
        shift += jumps[block // GAP]
        positions += range(block + shift, min(block + GAP, length) + shift)
    return positions


class Batches(Dataset):
    """The batch of every step: `batches[step]`."""

    def __init__(self, stages: list[Stage], seed: int) -> None:
        self.seed = seed
        self.stage_of = [stage for stage in stages for _ in range(stage.steps)]

    def __len__(self) -> int:
        return len(self.stage_of)

    def __getitem__(self, step: int) -> Batch:
        stage = self.stage_of[step]
        rng = random.Random(f"{self.seed}/{step}")
        length = stage.lengths[step % len(stage.lengths)]
        count = max(1, stage.tokens // length)
        tokens, positions, answers, rows = [], [], [], []
        for _ in range(count):
            one, answer, start = sequence(rng, length, stage.varied, stage.density)
            tokens.append(one)
            answers.append(answer)
            apart = rng.random() < stage.gaps
            positions.append(gap_positions(rng, length, max(131072, length)) if apart else list(range(length)))
            marked = [place for place in range(start, length) if answer[place]]
            each = max(2, stage.rows // count)
            rows.append(rng.choices(marked, k=each // 2) + rng.choices(range(start, length), k=each - each // 2))
        return Batch(*(torch.tensor(part) for part in (tokens, positions, answers, rows)))
