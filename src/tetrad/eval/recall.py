"""Recall of facts from long documents, by length, depth and index format, through the engine as users run it.

Every question about a document is a request of its own: paged caches, greedy decoding, the document computed once for
all of them. An answer counts only if the whole text is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from tetrad.engine.args import EngineArgs
from tetrad.engine.llm_engine import LLMEngine
from tetrad.engine.sampling_params import SamplingParams
from tetrad.engine.selection_recorder import SelectionRecorder
from tetrad.errors import ConfigError
from tetrad.eval.documents import KINDS, STOP, Document, Question, make_document

BASELINE = "bf16"
"""The index format that the others are compared with: its keys are not quantised."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to keep and use the index: a name for the table, and what it changes."""

    name: str
    index_cache_dtype: str
    hadamard: bool = True
    topk_divisor: int = 1

    @classmethod
    def parse(cls, name: str) -> Variant:
        """``fp4``, ``fp8``, ``bf16`` or ``fp32``, then ``-plain`` for no Hadamard rotation, ``/2`` for half the top-k.

        Raises:
            ConfigError: the name is none of these.
        """
        base, slash, divisor = name.partition("/")
        dtype, dash, plain = base.partition("-")
        if dtype not in ("fp4", "fp8", "bf16", "fp32") or (dash and plain != "plain"):
            raise ConfigError(f"index variant {name!r} is not known; write fp4, fp8, bf16 or fp32, fp4-plain, fp4/2")
        if slash and not (divisor.isdecimal() and int(divisor) > 0):
            raise ConfigError(f"index variant {name!r}: the top-k is divided by a whole number, as in fp4/2")
        return cls(name, dtype, not dash, int(divisor) if slash else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallSettings:
    """What to ask. Documents per cell: of one length and one depth; questions: per document."""

    lengths: tuple[int, ...] = (8192, 32768)
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    variants: tuple[Variant, ...] = tuple(Variant.parse(name) for name in ("bf16", "fp8", "fp4", "fp4-plain"))
    documents: int = 1
    questions: int = 20
    kinds: tuple[str, ...] = KINDS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.documents < 1 or self.questions < 1:
            raise ConfigError("there must be at least one document and one question")
        if not self.lengths or min(self.lengths) < 256:
            raise ConfigError(f"lengths must be at least 256 tokens, got {self.lengths}")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ConfigError(f"depths must be from 0 (start) to 1 (end), got {self.depths}")


@dataclass(frozen=True, slots=True)
class Answer:
    """One question under one variant. ``found``: the share of the baseline's chosen entries that were chosen here."""

    variant: str
    length: int
    depth: float
    document: int
    question: int
    kind: str
    wanted: str
    got: str
    found: float | None

    @property
    def right(self) -> bool:
        """Whether the whole answer is right."""
        return self.got == self.wanted


@dataclass(slots=True)
class RecallResult:
    """All answers, and what they were measured on. An interrupted measurement keeps the answers that it has."""

    settings: RecallSettings
    index_topk: int = 0
    device: str = ""
    answers: list[Answer] = field(default_factory=list)
    interrupted: bool = False
    model: str = ""
    dtype: str = ""


def run_recall(args: EngineArgs, settings: RecallSettings, *, progress: bool = False) -> RecallResult:
    """Ask every question under every variant: the same documents and questions for all.

    An interrupt (Ctrl-C) ends the measurement with the answers so far, if there are any.

    args: the engine's options; index dtype, rotation, top-k and lengths are set here. The baseline runs first where it
    is among the variants, so that the others can be compared with what it chose.

    Raises:
        ConfigError: the model cannot be served so, or a document is too short for its facts.
    """
    variants = sorted(settings.variants, key=lambda variant: variant.name != BASELINE)
    cells = [
        (length, depth, number)
        for length in settings.lengths
        for depth in settings.depths
        for number in range(settings.documents)
    ]
    exact: dict[tuple[int, float, int, int], dict[int, Tensor]] = {}
    result = RecallResult(settings)
    with tqdm(total=len(variants) * len(cells) * settings.questions, unit="question", disable=not progress) as bar:
        try:
            for variant in variants:
                engine = _engine(args, settings, variant)
                result.index_topk = result.index_topk or engine.config.model.index_topk
                result.device = _device_name(engine.config.device)
                result.model, result.dtype = str(args.model), str(engine.config.dtype).removeprefix("torch.")
                for batch in _batches(cells, settings.questions, engine.config.max_num_seqs):
                    bar.set_description(f"{variant.name} at {batch[0][0]}")
                    for answer in _ask(engine, variant, batch, settings, exact):
                        result.answers.append(answer)
                        bar.update()
                del engine
        except KeyboardInterrupt:
            if not result.answers:
                raise
            result.interrupted = True
    return result


def _engine(args: EngineArgs, settings: RecallSettings, variant: Variant) -> LLMEngine:
    engine_args = dataclasses.replace(
        args,
        index_cache_dtype=variant.index_cache_dtype,
        index_hadamard=variant.hadamard,
        max_model_len=max(settings.lengths) + 512,
        max_num_seqs=max(settings.questions + 1, args.max_num_seqs),
    )
    engine = LLMEngine(engine_args)
    if variant.topk_divisor > 1:
        topk = max(1, engine.config.model.index_topk // variant.topk_divisor)
        overrides = args.hf_overrides | {"index_topk": topk}
        engine = LLMEngine(dataclasses.replace(engine_args, hf_overrides=overrides))
    if engine.tokenizer is None:
        raise ConfigError("recall needs a model with a tokenizer.json")
    return engine


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _batches(
    cells: list[tuple[int, float, int]], questions: int, max_num_seqs: int
) -> Iterator[list[tuple[int, float, int]]]:
    """As many documents of one length at once as there is room for, each with its questions and its stem."""
    size = max(1, max_num_seqs // (questions + 1))
    for length in dict.fromkeys(length for length, _, _ in cells):
        same = [cell for cell in cells if cell[0] == length]
        for start in range(0, len(same), size):
            yield same[start : start + size]


def document_of(settings: RecallSettings, length: int, depth: float, number: int) -> Document:
    """The document of a cell: with its longest question and answer it has at most ``length`` tokens."""
    seed = ((settings.seed * 1_000_003 + length) * 1009 + round(depth * 1000)) * 1009 + number
    try:
        return make_document(seed, length - 256, settings.questions, kinds=settings.kinds, depth=depth)
    except ValueError as error:
        raise ConfigError(f"a document of {length} tokens is too short: {error}; ask fewer questions") from error


def _ask(
    engine: LLMEngine,
    variant: Variant,
    cells: list[tuple[int, float, int]],
    settings: RecallSettings,
    exact: dict[tuple[int, float, int, int], dict[int, Tensor]],
) -> Iterator[Answer]:
    asked: dict[str, tuple[tuple[int, float, int, int], Question]] = {}
    for cell in cells:
        document = document_of(settings, *cell)
        params = [
            SamplingParams(max_tokens=len(question.answer) + 8, temperature=0.0, stop=STOP)
            for question in document.questions
        ]
        ids = engine.add_requests([document.text + question.prompt for question in document.questions], params)
        for number, (name, question) in enumerate(zip(ids, document.questions, strict=True)):
            asked[name] = ((*cell, number), question)
    found: dict[str, float] = {}
    with SelectionRecorder(engine) as recorder:
        while engine.has_unfinished_requests:
            for row, output in enumerate(engine.step()):
                place, question = asked[output.request_id]
                if len(output.outputs[0].token_ids) == 1:
                    chosen = {layer: entries[row] for layer, entries in recorder.chosen.items()}
                    if variant.name == BASELINE:
                        exact[place] = chosen
                    elif place in exact:
                        found[output.request_id] = _share(chosen, exact[place])
                if output.finished:
                    length, depth, document_number, number = place
                    yield Answer(
                        variant.name,
                        length,
                        depth,
                        document_number,
                        number,
                        question.kind,
                        question.answer,
                        output.outputs[0].text,
                        found.get(output.request_id),
                    )


def _share(chosen: dict[int, Tensor], exact: dict[int, Tensor]) -> float:
    """The share of the exact choice that was found, the mean over the layers."""
    shares = []
    for layer, entries in exact.items():
        wanted = set(entries[entries >= 0].tolist())
        got = set(chosen[layer].tolist())
        shares.append(len(wanted & got) / max(1, len(wanted)))
    return sum(shares) / max(1, len(shares))
