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

from tetrad.config.args import EngineArgs
from tetrad.config.engine_config import EngineConfig
from tetrad.errors import ConfigError, RequestError
from tetrad.eval.documents import KINDS, STOP, Document, Question, make_document
from tetrad.frontend.llm_engine import LLMEngine
from tetrad.frontend.sampling_params import SamplingParams
from tetrad.frontend.selection_recorder import SelectionRecorder
from tetrad.frontend.token_meter import TokenMeter

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
    """All answers, and what they were measured on. A measurement that ends early keeps the answers that it has.

    ``died``: the error that ended it, None where none did.
    """

    settings: RecallSettings
    index_topk: int = 0
    device: str = ""
    answers: list[Answer] = field(default_factory=list)
    interrupted: bool = False
    died: str | None = None
    model: str = ""
    dtype: str = ""


@dataclass(slots=True)
class RecallProgress:
    """How far a measurement is; another thread may read it at any time.

    Attributes:
        questions: how many there are under all variants; ``done`` of them are answered.
        doing: the variant and the length that are measured.
    """

    questions: int = 0
    done: int = 0
    doing: str = "nothing yet"
    _meter: TokenMeter | None = None
    _earlier_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that all engines have computed."""
        meter = self._meter
        return self._earlier_tokens + (meter.tokens if meter is not None else 0)

    def begin(self, engine: LLMEngine) -> None:
        """Count the tokens of this engine, in the place of the one before it."""
        self._earlier_tokens, self._meter = self.tokens, TokenMeter(engine)

    def end(self) -> None:
        """Let go of the engine, so that its memory is free for the next one."""
        self._earlier_tokens, self._meter = self.tokens, None


def run_recall(args: EngineArgs, settings: RecallSettings, *, progress: RecallProgress | None = None) -> RecallResult:
    """Ask every question under every variant: the same documents and questions for all.

    An interrupt (Ctrl-C) or an error ends the measurement with the answers so far, if there are any.

    args: the engine's options; index dtype, rotation, top-k and lengths are set here. The baseline runs first where it
    is among the variants, so that the others can be compared with what it chose. progress: kept up to date, for who
    shows it.

    Raises:
        ConfigError: the model cannot be served so, or a document is too short for its facts.
        RequestError: the engine could not answer the very first question.
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
    progress = progress or RecallProgress()
    progress.questions = len(variants) * len(cells) * settings.questions
    try:
        for variant in variants:
            progress.doing = f"loading the model for {variant.name}"
            engine = _engine(args, settings, variant)
            progress.begin(engine)
            result.index_topk = result.index_topk or engine.config.model.index_topk
            result.device = _device_name(engine.config.device)
            result.model, result.dtype = str(args.model), str(engine.config.dtype).removeprefix("torch.")
            for batch in _batches(cells, settings.questions, engine.config.max_num_seqs):
                progress.doing = f"{variant.name} at {batch[0][0]} tokens"
                for answer in _ask(engine, variant, batch, settings, exact):
                    result.answers.append(answer)
                    progress.done += 1
            progress.end()
            del engine
    except KeyboardInterrupt:
        if not result.answers:
            raise
        result.interrupted = True
    except Exception as error:  # whatever it is, an hour of answers is worth more
        if not result.answers:
            raise
        result.died = f"{type(error).__name__}: {error}"
    return result


def _engine(args: EngineArgs, settings: RecallSettings, variant: Variant) -> LLMEngine:
    engine_args = dataclasses.replace(
        args,
        index_cache_dtype=variant.index_cache_dtype,
        index_hadamard=variant.hadamard,
        max_model_len=max(settings.lengths) + 512,
        max_num_seqs=max(settings.questions + 1, args.max_num_seqs),
    )
    config = EngineConfig.resolve(engine_args)
    if variant.topk_divisor > 1:
        overrides = args.hf_overrides | {"index_topk": max(1, config.model.index_topk // variant.topk_divisor)}
        config = EngineConfig.resolve(dataclasses.replace(engine_args, hf_overrides=overrides))
    engine = LLMEngine(config)
    if engine.tokenizer is None:
        raise ConfigError("recall needs a model with a tokenizer.json")
    return engine


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _batches(
    cells: list[tuple[int, float, int]], questions: int, max_num_seqs: int
) -> Iterator[list[tuple[int, float, int]]]:
    """As many documents of one length at once as there is room for, each with its questions and their common prefix."""
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
                if output.error is not None:
                    raise RequestError(output.error)  # it is no wrong answer
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
