"""Recall of a model by document length and index format: many questions in parallel behind one prefilled document.

A greedy answer is right exactly if, fed with the right answer, the model's most likely token is the right one at every
place up to the stop; so one pass per document tells what greedy decoding of each question would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from data import PAD, documents, encode
from model import Model, Pass
from shape import Shape


@dataclass(frozen=True)
class Outcome:
    """One question: its kind, where its fact stands (0 to 1), and whether the whole answer was right."""

    kind: str
    depth: float
    right: bool


def document_tokens(length: int, largest: int) -> int:
    """Tokens of the document such that it and a question have about `length`: a multiple of the `largest` ratio."""
    return max(largest, (length - largest) // largest * largest)


def _document_seed(seed: int, number: int) -> int:
    return seed * 1_000_003 + number


def check_room(
    shape: Shape, length: int, count: int, *, facts: int | None = None, per_document: int = 32, seed: int = 7
) -> None:
    """Raises ValueError if a document of `recall` with these arguments cannot hold its facts."""
    tokens = document_tokens(length, max(shape.compress_ratios))
    for number in range(-(-count // per_document)):
        asked = min(per_document, count - number * per_document)
        documents.make_document(_document_seed(seed, number), tokens, asked, facts=facts)


@torch.no_grad()
def recall(
    model: Model,
    length: int,
    count: int,
    *,
    index_format: str = "fp4",
    topk: int | None = None,
    quantised: bool = True,
    selection: bool = True,
    facts: int | None = None,
    per_document: int = 32,
    seed: int = 7,
) -> list[Outcome]:
    """Asks `count` questions about documents such that document and question together have about `length` tokens."""
    device = model.head.weight.device
    largest = max(model.shape.compress_ratios)
    tokens = document_tokens(length, largest)
    common = {
        "selection": selection,
        "topk": topk or model.shape.index_topk,
        "index_format": index_format,
        "weights_quantised": quantised,
        "cache_quantised": quantised,
    }
    outcomes: list[Outcome] = []
    for number in range(-(-count // per_document)):
        asked = min(per_document, count - number * per_document)
        document = documents.make_document(_document_seed(seed, number), tokens, asked, facts=facts)
        run = Pass(**common, keep=[])
        model(torch.tensor([encode(document.text)], device=device), run)
        prompts = [encode(question.prompt) for question in document.questions]
        answers = [encode(question.answer + documents.STOP) for question in document.questions]
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        if width >= largest > 4:
            raise ValueError(f"a question of {width} tokens would complete an entry of {largest}")
        width = -(-width // 4) * 4
        batch = torch.full((asked, width), PAD)
        wanted = torch.zeros((asked, width), dtype=torch.bool)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            batch[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            wanted[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
        logits = model(batch.to(device), Pass(**common, prefix=run.keep, prefix_length=tokens))
        same = logits.argmax(-1).cpu()[:, :-1] == batch[:, 1:]
        right = (same | ~wanted[:, :-1]).all(-1).tolist()
        for question, good in zip(document.questions, right, strict=True):
            outcomes.append(Outcome(question.kind, question.position / tokens, good))
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """Recall in per cent: all questions, then by kind, then by fifth of the document."""
    kinds = sorted({outcome.kind for outcome in outcomes})
    groups = [("all", outcomes)]
    groups += [(kind, [o for o in outcomes if o.kind == kind]) for kind in kinds]
    groups += [
        (f"d{part}", [o for o in outcomes if part / 5 <= o.depth < (part + 1) / 5 + (part == 4)]) for part in range(5)
    ]
    return "  ".join(f"{name} {100 * sum(o.right for o in some) / len(some):.1f}" for name, some in groups if some)
