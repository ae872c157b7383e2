"""``tetrad demo``: the bundled model reads a long document of notes and answers questions about it."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tetrad import bundled
from tetrad.cache.groups import Lifetime, format_bytes
from tetrad.cli.flags import refuse_engine_flags
from tetrad.cli.progress import Progress
from tetrad.cli.streams import say
from tetrad.config.args import EngineArgs
from tetrad.config.engine_config import EngineConfig, parse_tokens
from tetrad.errors import ConfigError, RequestError
from tetrad.eval.documents import STOP, Document, Question, make_document
from tetrad.frontend.llm_engine import LLMEngine
from tetrad.frontend.outputs import RequestOutput
from tetrad.frontend.sampling_params import SamplingParams
from tetrad.frontend.selection_recorder import SelectionRecorder
from tetrad.frontend.token_meter import TokenMeter
from tetrad.geometry import CSA_RATIO, IndexDtype
from tetrad.models.config import ModelConfig

_ROOM = 512
"""Tokens for a question and its answer."""
_SPANS = 6
_FACT_BYTES = 28
"""About the length of a fact's sentence."""
_EXAMPLES = ("tetrad demo", "tetrad demo --tokens 32K --seed 7", "tetrad demo --index-cache-dtype bf16")


def add_command(commands: Any) -> None:
    """Add the subcommand."""
    text = "the bundled model reads a long document and answers questions about it"
    parser = commands.add_parser("demo", help=text, description=text, examples=_EXAMPLES)
    parser.add_argument("--tokens", default="8K", metavar="TOKENS", help="length of the document; 8K is 8192")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another number makes another document")
    parser.add_argument(
        "--question",
        metavar="TEXT",
        help='ask this: "What is the code of NAME?" (default: four questions about the document)',
    )
    parser.add_argument(
        "--index-cache-dtype", default="fp4", choices=[d.value for d in IndexDtype], help="format of the index cache"
    )
    parser.add_argument("--device", default="cpu", help="auto (cuda where there is one), cpu, cuda or cuda:N")
    refuse_engine_flags(parser, "its model and settings are fixed; tetrad generate bundled takes it")
    parser.set_defaults(run=run, parser=parser)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, what came of it, and what the indexer chose as the answer began: entries by layer."""

    question: Question
    output: RequestOutput
    chosen: dict[int, Tensor]


def run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Read, ask, show, and prove; 1 if the proof fails."""
    tokens = parse_tokens(parsed.tokens, "--tokens")
    longest = ModelConfig.from_pretrained(bundled.resolve(bundled.NAME)).max_position_embeddings - _ROOM
    if not 1024 <= tokens <= longest:
        raise ConfigError(f"--tokens {parsed.tokens} is not possible; give at least 1K and at most {longest}")
    document = make_document(parsed.seed, tokens, questions=4)
    if parsed.question is not None:
        if not parsed.question.strip():
            raise ConfigError("--question has no text; leave it out for four questions about the document")
        own = Question(f"Q: {parsed.question.strip()}\nA:", "", "yours", -1, ())
        document = Document(document.text, (own,))
    engine = LLMEngine(
        EngineArgs(
            model=bundled.NAME,
            device=parsed.device,
            dtype="float32",
            index_cache_dtype=parsed.index_cache_dtype,
            max_model_len=tokens + _ROOM,
            max_num_seqs=8,
        )
    )
    # at once, also into a pipe: the rest takes a while
    print(f"a document of {tokens} tokens (bytes), which begins:\n  {document.text[:150]}...\n", flush=True)
    start = time.monotonic()
    meter = TokenMeter(engine)
    with Progress(lambda: f"reading and answering: {meter.tokens:,} tokens, the document has {tokens:,}"):
        asked, logits = _ask(engine, document)
    seconds = time.monotonic() - start
    for item in asked:
        _show_answer(document, item)
    written = sum(len(item.output.outputs[0].token_ids) for item in asked)
    read = tokens + sum(len(item.question.prompt) for item in asked)
    print(f"{read} tokens read and {written} written in {seconds:.1f} s: {(read + written) / seconds:.0f} tokens/s")
    _show_caches(engine.config, tokens)
    sys.stdout.flush()
    return _prove(engine, meter, asked[0], logits)


def _ask(engine: LLMEngine, document: Document) -> tuple[list[Asked], Tensor]:
    """All questions at once. Also the logits of the last token of the first answer."""
    params = SamplingParams(max_tokens=64, temperature=0.0, stop=STOP)
    ids = engine.add_requests([document.text + question.prompt for question in document.questions], params)
    finished: dict[str, RequestOutput] = {}
    chosen: dict[str, dict[int, Tensor]] = {}
    logits = torch.empty(0, dtype=torch.float32, device="cpu")

    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        nonlocal step
        step = output

    step = torch.empty(0, dtype=torch.float32, device="cpu")
    handle = engine.runner.model.register_forward_hook(keep)
    with SelectionRecorder(engine) as recorder:
        while engine.has_unfinished_requests:
            for row, output in enumerate(engine.step()):
                if output.error is not None:
                    raise RequestError(output.error)
                name = output.request_id
                chosen.setdefault(name, {layer: entries[row] for layer, entries in recorder.chosen.items()})
                if name == ids[0]:
                    logits = step[row].clone()
                if output.finished:
                    finished[name] = output
    handle.remove()
    asked = [
        Asked(question, finished[name], chosen[name]) for name, question in zip(ids, document.questions, strict=True)
    ]
    return asked, logits


def _show_answer(document: Document, item: Asked) -> None:
    question, answer = item.question, item.output.outputs[0].text.strip()
    print(f"{question.prompt} {answer}".replace("\n", "  "))
    if question.answer:
        right = answer == question.answer.strip()
        print(f"  {'right' if right else 'WRONG, it is' + question.answer}; the facts stand at " + _places(question))
    for layer, entries in item.chosen.items():
        spans = _spans(entries[entries >= 0].tolist())
        # what stands in the facts' own sentences first, then the longest runs
        spans.sort(key=lambda span: (not _in_fact(span, question), span[0] - span[1]))
        total, picked = len(document.text) // CSA_RATIO, int((entries >= 0).sum())
        print(f"  layer {layer}: the indexer chose {picked} of {total} entries, e.g.")
        for first, last in sorted(spans[:_SPANS]):
            text = (document.text + question.prompt)[first * CSA_RATIO : (last + 1) * CSA_RATIO]
            mark = "  <- a fact asked for" if _in_fact((first, last), question) else ""
            print(f"    byte {first * CSA_RATIO:6d}  {text!r}{mark}")
    print()


def _places(question: Question) -> str:
    return ", ".join(f"byte {position}" for position in question.positions)


def _in_fact(span: tuple[int, int], question: Question) -> bool:
    """Whether a run of entries begins inside the sentence of a fact that the answer needs."""
    return any(0 <= span[0] * CSA_RATIO - position < _FACT_BYTES for position in question.positions)


def _spans(entries: list[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring entries, (first, last)."""
    if not entries:
        return []
    breaks = [place for place, (a, b) in enumerate(pairwise(entries), start=1) if b != a + 1]
    return [(entries[a], entries[b - 1]) for a, b in pairwise([0, *breaks, len(entries)])]


def _show_caches(config: EngineConfig, tokens: int) -> None:
    """Bytes of every cache for this document."""
    print(f"\nbytes of the caches for {tokens} tokens")
    for dtype in (IndexDtype.FP4, IndexDtype.FP8, IndexDtype.BF16):
        groups = config.cache_groups_with(dtype)
        size, row = groups.bytes_per_token["index"] * tokens, groups.bytes_per_entry["index"]
        mark = "  <- this run" if dtype == config.index_cache_dtype.dtype else ""
        print(f"  index keys in {dtype:5} {row:4} B each {format_bytes(size):>10}{mark}")
    groups = config.cache_groups
    for name, what in (("csa", "compressed sparse attention (CSA)"), ("hca", "heavily compressed attention (HCA)")):
        print(f"  {what} in {config.kv_cache_dtype:5}{format_bytes(groups.bytes_per_token[name] * tokens):>12}")
    rings = groups.request_bytes(Lifetime.WINDOW) + groups.request_bytes(Lifetime.COMPRESSOR)
    print(f"  rings of window and compressors, whatever the length  {format_bytes(rings)}")


def _prove(engine: LLMEngine, meter: TokenMeter, item: Asked, decoded: Tensor) -> int:
    """Compute the last token of the first answer again, from nothing, as one prefill; the logits must be equal."""
    result = item.output
    ids = result.prompt_token_ids + result.outputs[0].token_ids[:-1]
    again = torch.empty(0, dtype=torch.float32, device="cpu")

    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        nonlocal again
        if len(output):
            again = output[0].clone()

    handle = engine.runner.model.register_forward_hook(keep)
    engine.add_request(ids, SamplingParams(max_tokens=1, temperature=0.0))
    before = meter.tokens
    with Progress(lambda: f"computing it again: {meter.tokens - before:,} of {len(ids):,} tokens"):
        while engine.has_unfinished_requests:
            engine.step()
    handle.remove()
    if torch.equal(again, decoded):
        print(f"\nthe last decode step again, as one prefill of {len(ids)} tokens: logits equal bit by bit")
        return 0
    say(f"\nthe last decode step again, as one prefill of {len(ids)} tokens: logits DIFFER")
    return 1
