"""The smallest model with every kind of layer, engines over it, and logits written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from tests.tiny import tiny_config
from tetrad import EngineArgs, LLMEngine
from tetrad.core.sequence import Sequence as CoreSequence
from tetrad.frontend.outputs import RequestOutput
from tetrad.frontend.sampling_params import SamplingParams
from tetrad.models.config import ModelConfig

VOCABULARY = 320
BOS, EOS = 0, 1
FIRST_BYTE = 2
"""The tokenizer's id of byte 0; ids behind byte 255 are words, and those behind the words stand for nothing."""
WORDS = ("he", "ll", "hell", "wor", "ld")


def small_config(**overrides: Any) -> ModelConfig:
    """Three layers: window, CSA, HCA. A step of it takes milliseconds."""
    values: dict[str, Any] = {
        "num_hidden_layers": 3,
        "compress_ratios": (0, 4, 16),
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 1,
        "o_lora_rank": 16,
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
    }
    return tiny_config("flash", **(values | overrides))


def write_config(folder: Path, config: ModelConfig | None = None, **changes: Any) -> Path:
    """A folder that only ``load_format="dummy"`` can load; ``changes`` are values of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    document = (config or small_config()).to_native_dict() | changes
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def write_tokenizer(folder: Path, eos: str | None = "<eos>") -> None:
    """A byte-level tokenizer.json of ids 0 to 262."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    # the byte of each character of the alphabet, in the order of the bytes: those that print stand for themselves
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    assert set(character.values()) == set(alphabet)
    vocabulary = {"<bos>": BOS, "<eos>": EOS} | {character[byte]: FIRST_BYTE + byte for byte in range(256)}
    vocabulary |= {word: FIRST_BYTE + 256 + i for i, word in enumerate(WORDS)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("wo", "r"), ("l", "d")]
    merges = [pair for pair in merges if all(part in vocabulary for part in pair)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}), encoding="utf-8")


def small_engine(folder: Path, **options: Any) -> LLMEngine:
    """An engine with an FP4 index cache and an FP8 KV cache that nobody has written to: it reads as NaN."""
    engine = LLMEngine(EngineArgs(**small_options(folder) | options))
    engine.runner.pools.poison()
    return engine


def small_options(folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder),
        "load_format": "dummy",
        "device": "cpu",
        "kv_cache_dtype": "fp8",
        "index_cache_dtype": "fp4",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
    }


def random_ids(count: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_BYTE, vocabulary, (count,), generator=generator).tolist()


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until nothing is left; the finished outputs by request id."""
    outputs = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
    return outputs


def assert_idle(engine: LLMEngine) -> None:
    """Nothing is unfinished, and every block and row of the request table is free."""
    assert not engine.has_unfinished_requests
    assert not engine.requests
    assert not engine._choices
    scheduler = engine.core.scheduler
    assert not scheduler.sequences
    assert not scheduler.running
    assert not scheduler.waiting
    for pool in (scheduler.manager.blocks, scheduler.manager.requests):
        assert pool.free_count == pool.size


def bytes_of(text: str) -> list[int]:
    """One token for every byte of the text."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def drawing(engine: LLMEngine) -> list[CoreSequence]:
    """The sequences of the step that runs now whose next token is drawn, in the order of the logits."""
    return [sequence for sequence, segment in engine.core.scheduler._chosen if segment.wanted]


def request_id(engine: LLMEngine, sequence: CoreSequence) -> str:
    """Whose a sequence is."""
    return engine._choices[sequence.number].request.request_id


def replace_logits(engine: LLMEngine, row: Callable[[CoreSequence], torch.Tensor]) -> None:
    """Replace the model by logits made by hand: a row [V] for each sequence that draws.

    The sampler, the scheduler and everything behind the logits are the real ones.
    """

    def forward(_rows: Any) -> torch.Tensor:
        logits = [row(sequence) for sequence in drawing(engine)]
        return torch.stack(logits) if logits else torch.zeros(0, engine.config.model.vocab_size)

    engine.runner.forward = forward  # type: ignore[method-assign]


def script(engine: LLMEngine, tokens: Mapping[str, Sequence[int]], likely: float = 20.0) -> None:
    """Logits that are 0 but for the next token of each request's script."""

    def row(sequence: CoreSequence) -> torch.Tensor:
        logits = torch.zeros(engine.config.model.vocab_size)
        logits[tokens[request_id(engine, sequence)][len(sequence.output)]] = likely
        return logits

    replace_logits(engine, row)


def greedy(**changes) -> SamplingParams:
    """Greedy decoding of up to 8 tokens, changed as told."""
    return SamplingParams(**({"temperature": 0, "max_tokens": 8} | changes))


ABC = bytes_of("abcdefghij")
