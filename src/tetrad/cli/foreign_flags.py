"""What users of vLLM, SGLang and ATOM type, and what takes its place here: the flags and commands of those engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Engine(StrEnum):
    """Where a name comes from."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    ATOM = "ATOM"


class Answer(StrEnum):
    """What there is instead."""

    OTHER_NAME = "has another name here"
    NOT_NEEDED = "is not needed"
    NOT_YET = "is not supported yet"


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """One need under the names that other engines give it.

    Args:
        names: flags as they are typed, kebab case.
        engines: who has at least one of them.
        answer: what kind of answer ``text`` is.
        text: half a sentence that names no flag, since it is shown whatever flags the command has.
        here: the flags of this project to use instead, the nearest first; shown where the command has them.
    """

    names: tuple[str, ...]
    engines: tuple[Engine, ...]
    answer: Answer
    text: str
    here: tuple[str, ...] = ()

    def hint(self, known: Iterable[str]) -> str | None:
        """What to say to a command that has the flags ``known``, or None where this says nothing about it."""
        present = [flag for flag in self.here if flag in set(known)]
        if self.here and not present:
            return None
        instead = f"use {' or '.join(present)} ({self.text})" if present else self.text
        return instead if self.answer is Answer.OTHER_NAME else f"it {self.answer}: {instead}"


_VLLM, _SGLANG, _ATOM = (Engine.VLLM,), (Engine.SGLANG,), (Engine.ATOM,)
_VLLM_ATOM = (Engine.VLLM, Engine.ATOM)
_VLLM_SGLANG = (Engine.VLLM, Engine.SGLANG)
_ALL = tuple(Engine)


def _other_name(names: str, engines: tuple[Engine, ...], here: str | tuple[str, ...], text: str) -> ForeignFlag:
    flags = (here,) if isinstance(here, str) else here
    return ForeignFlag(tuple(names.split()), engines, Answer.OTHER_NAME, text, flags)


def _not_needed(names: str, engines: tuple[Engine, ...], text: str) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), engines, Answer.NOT_NEEDED, text)


def _not_yet(names: str, engines: tuple[Engine, ...], text: str) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), engines, Answer.NOT_YET, text)


FOREIGN_FLAGS: tuple[ForeignFlag, ...] = (
    # the same need under another name; exact equivalents are aliases and do not stand here
    _other_name(
        "--mem-fraction-static",
        _SGLANG,
        ("--gpu-memory-utilization", "--kv-cache-memory-gb"),
        "a share of the GPU for weights and caches, or GiB for the caches alone",
    ),
    _other_name("--max-running-requests", _SGLANG, "--max-num-seqs", "sequences are counted, not requests"),
    _other_name(
        "--chunked-prefill-size --max-prefill-tokens",
        _SGLANG,
        "--max-num-batched-tokens",
        "tokens of one step, of prompts and of outputs together",
    ),
    _other_name("--max-total-tokens", _SGLANG, "--num-gpu-blocks-override", "blocks of 256 tokens"),
    _other_name("--kv-cache-memory-bytes", _VLLM, "--kv-cache-memory-gb", "GiB instead of bytes"),
    _other_name("--attention-config -ac", _VLLM, "--index-cache-dtype", "its indexer_kv_dtype; mxfp4 is accepted, too"),
    _other_name("--input-file -i", _VLLM, "--input-jsonl", "one prompt a line"),
    _other_name("--output-file -o", _VLLM, "--output", "the results"),
    _other_name("--log-level", _SGLANG, "--verbose", "what the engine decides"),
    # nothing to choose
    _not_needed(
        "--enforce-eager --disable-cuda-graph --cuda-graph-max-bs --cuda-graph-bs --cudagraph-mode "
        "--cudagraph-capture-sizes --max-cudagraph-capture-size --cuda-graph-max-bs-decode "
        "--cuda-graph-backend-decode --cuda-graph-backend-prefill",
        _ALL,
        "the engine captures no CUDA graphs, every step runs eagerly",
    ),
    _not_needed(
        "--compilation-config -cc -O --optimization-level --level --enable-torch-compile",
        _ALL,
        "the model is not compiled by torch.compile",
    ),
    _not_needed(
        "--quantization -q --quantization-param-path",
        _VLLM_SGLANG,
        "how the weights are stored stands in the checkpoint's config.json",
    ),
    _not_needed("--trust-remote-code", _ALL, "no code of a checkpoint is ever run"),
    _not_needed("--tokenizer-mode --skip-tokenizer-init", _VLLM_SGLANG, "a model without tokenizer.json takes ids"),
    _not_needed("--config-format --model-impl --runner --task --convert", _VLLM, "there is one architecture"),
    _not_needed(
        "--attention-backend --prefill-attention-backend --decode-attention-backend --moe-backend "
        "--moe-runner-backend --sampling-backend --nsa-prefill-backend --nsa-decode-backend",
        _VLLM_SGLANG,
        "each op takes the best back end of the device; tetrad inspect lists them",
    ),
    _not_needed(
        "--enable-deterministic-inference",
        _SGLANG,
        "a request's result never depends on the rest of the batch",
    ),
    _not_needed("--disable-log-stats --no-enable-log-requests", _VLLM, "requests and statistics are not logged"),
    # not there yet
    _not_yet(
        "-tp --tensor-parallel-size --tp --tp-size -pp --pipeline-parallel-size --pp-size -dp "
        "--data-parallel-size --dp --dp-size --attn-dp-size --enable-dp-attention --enable-expert-parallel --ep "
        "--ep-size --distributed-executor-backend --nnodes --node-rank --dist-init-addr",
        _ALL,
        "the engine runs on one device",
    ),
    _not_yet(
        "--enable-prefix-caching --no-enable-prefix-caching --disable-radix-cache --prefix-caching-hash-algo "
        "--state-checkpoint-interval-tokens",
        _ALL,
        "only a beginning that prompts of the same call share is computed once",
    ),
    _not_yet(
        "--speculative-config -sc --speculative-model --spec-method --spec-tokens --spec-model "
        "--speculative-algorithm --speculative-num-steps --speculative-eagle-topk --speculative-num-draft-tokens "
        "--speculative-draft-model-path --method --num-speculative-tokens --draft-model --dspark-config",
        _ALL,
        "there is no speculative decoding",
    ),
    _not_yet(
        "--host --port --server-port --api-key --served-model-name --root-path --allowed-origins "
        "--enable-metrics --enable-log-requests --log-requests --request-log --uvicorn-log-level",
        _ALL,
        "there is no server",
    ),
    _not_yet(
        "--chat-template --default-chat-template-kwargs --enable-auto-tool-choice --tool-call-parser "
        "--reasoning-parser --response-role",
        _ALL,
        "prompts are plain text or token ids, there is no chat encoding",
    ),
    _not_yet(
        "--structured-outputs-config --guided-decoding-backend --grammar-backend",
        _VLLM_SGLANG,
        "outputs cannot be bound to a grammar",
    ),
    _not_yet(
        "--enable-lora --lora-modules --max-loras --max-lora-rank --lora-paths", _VLLM_SGLANG, "there are no adapters"
    ),
    _not_yet("--swap-space --cpu-offload-gb", _VLLM_SGLANG, "weights and caches stay on the device"),
    _not_yet("--revision --download-dir --hf-token", _VLLM_SGLANG, "a model is a local folder, nothing is downloaded"),
    _not_yet("--long-prefill-token-threshold", _VLLM_ATOM, "a long prompt may take all tokens of a step"),
    _not_yet("--scheduling-policy --schedule-policy", _VLLM_SGLANG, "requests are served in the order they come"),
    _not_yet("--profiler-config --torch-profiler-dir", _VLLM_ATOM, "the engine starts no profiler"),
)

FOREIGN_COMMANDS: dict[str, str] = {
    "serve": "there is no server yet, but generate continues prompts, one or a file of them",
    "launch_server": "there is no server yet, but generate continues prompts, one or a file of them",
    "server": "there is no server yet, but generate continues prompts, one or a file of them",
    "chat": "there is no chat yet, but generate continues a prompt",
    "complete": "generate continues a prompt",
    "run": "generate continues a prompt",
    "run-batch": "generate continues a file of prompts",
    "collect-env": "inspect shows the device and what runs on it",
    "throughput": "only the indexer's ops are measured yet",
    "latency": "only the indexer's ops are measured yet",
}
"""Commands, and kinds of benchmark, of other engines."""


def foreign_hint(flag: str, known: Sequence[str]) -> str | None:
    """What to say to a flag of another engine where the command has the flags ``known``; None if no engine has it."""
    for foreign in FOREIGN_FLAGS:
        if flag in foreign.names:
            return foreign.hint(known)
    return None


def markdown_table() -> str:
    """The table of ``docs/flags.md``: other engines' names, whose they are, and what takes their place."""
    rows = ["| Flag | Of | Here |", "|---|---|---|"]
    for foreign in FOREIGN_FLAGS:
        names = ", ".join(f"`{name}`" for name in foreign.names)
        instead = " or ".join(f"`{flag}`" for flag in foreign.here)
        here = f"{instead}: {foreign.text}" if instead else f"{foreign.answer.removeprefix('is ')}: {foreign.text}"
        rows.append(f"| {names} | {', '.join(foreign.engines)} | {here} |")
    return "\n".join(rows)
