"""What a user may set. Flags of the command line are made from these fields, one by one."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _option(default: Any, text: str, **details: Any) -> Any:
    """A field with the help text, group, metavar, choices and aliases of its command-line flag."""
    metadata = {"help": text, **details}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


_FORMATS = "number formats"
_CAPACITY = "lengths, batches and memory"


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The engine's options, as given; ``EngineConfig.resolve`` checks them and fills in what is left open."""

    model: str | Path = field(
        default="",
        kw_only=False,
        metadata={
            "help": "folder of the checkpoint; bundled is the small model of this package; deepseek-v4-flash and "
            "deepseek-v4-pro are the configurations of the released models, without weights",
            "aliases": ("--model-path",),
        },
    )
    tokenizer: str | Path | None = _option(
        None,
        "folder of tokenizer.json (default: the model's folder)",
        metavar="FOLDER",
        aliases=("--tokenizer-path",),
    )
    generation_config: str | Path = _option(
        "auto",
        "where generation_config.json gives further end tokens and sampling defaults: auto is the model's folder, none "
        "reads no such file",
        metavar="FOLDER",
    )
    device: str = _option("auto", "auto (cuda where there is one), cpu, cuda or cuda:N", metavar="NAME")
    cpu_threads: int | str = _option(
        "auto",
        "torch's threads while a step runs on a CPU; auto leaves a number that OMP_NUM_THREADS or "
        "torch.set_num_threads gave, else takes 1 for a small model and all cores for a large one",
        metavar="N",
    )
    dtype: str = _option(
        "auto",
        "numbers to compute with; auto is the checkpoint's own dtype",
        choices=("auto", "bfloat16", "bf16", "float32", "fp32"),
        group=_FORMATS,
    )
    kv_cache_dtype: str = _option(
        "auto",
        "main KV cache; auto is fp8 for a quantised checkpoint, else the dtype of the computation",
        choices=("auto", "bf16", "fp8", "fp32"),
        group=_FORMATS,
    )
    index_cache_dtype: str = _option(
        "auto",
        "keys of the lightning indexer; auto is fp4 where a back end for the device has it, else fp8; mxfp4 is fp4",
        choices=("auto", "fp4", "mxfp4", "fp8", "bf16", "fp32"),
        group=_FORMATS,
    )
    enable_deepseek_v4_fp4_indexer: bool = _option(False, "the same as --index-cache-dtype fp4", group=_FORMATS)
    strict_index_cache_dtype: bool = _option(
        False, "end with an error where the device has no fp4 index cache, instead of using fp8", group=_FORMATS
    )
    index_hadamard: bool = _option(
        True,
        "rotate the indexer's queries and keys before they are quantised; off only to measure what that is worth",
        group=_FORMATS,
    )
    linear_activation_quant: str = _option(
        "none",
        "fp8 rounds the inputs of linear layers with FP8 weights to FP8, as DeepSeek's own code does",
        choices=("none", "fp8"),
        group=_FORMATS,
    )
    load_format: str = _option(
        "auto",
        "auto reads the weights of the checkpoint; dummy makes random ones and reads only config.json",
        choices=("auto", "dummy"),
        const_alias="--load-dummy",
    )
    hf_overrides: dict[str, Any] = _option(
        {},
        'values in place of those in config.json, by its own names; an object may hold a part: {"index_topk": 64} '
        "(default: none)",
        metavar="JSON",
        aliases=("--json-model-override-args",),
    )
    block_size: int = _option(
        256,
        "tokens in a block of the caches; only 256 is possible",
        metavar="N",
        group=_CAPACITY,
        aliases=("--page-size",),
    )
    max_model_len: int | str | None = _option(
        None,
        "the most tokens of a prompt with its output; 128K is 131072, 128k is 128000 (default: what the model allows)",
        metavar="TOKENS",
        group=_CAPACITY,
        aliases=("--context-length",),
    )
    max_num_batched_tokens: int | str = _option(
        8192, "the most tokens to compute in one step", metavar="TOKENS", group=_CAPACITY
    )
    max_num_seqs: int = _option(256, "the most sequences to run at once", metavar="N", group=_CAPACITY)
    enable_chunked_prefill: bool = _option(True, "compute a long prompt in several steps", group=_CAPACITY)
    kv_cache_memory_gb: float | None = _option(
        None,
        "GiB for all caches together (default: 4 on a CPU, on a GPU what --gpu-memory-utilization leaves)",
        metavar="GIB",
        group=_CAPACITY,
    )
    gpu_memory_utilization: float = _option(
        0.9,
        "share of a GPU's memory for weights and caches together",
        metavar="SHARE",
        group=_CAPACITY,
    )
    num_gpu_blocks_override: int | None = _option(
        None,
        "make exactly this many blocks (default: as many as the memory holds)",
        metavar="N",
        group=_CAPACITY,
    )
    indexer_logits_budget_mb: int | None = _option(
        None,
        "the most MiB of the indexer's scores at one time, 0 for no limit (default: the environment variable "
        "ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB, or 2048)",
        metavar="MIB",
        group=_CAPACITY,
    )
    seed: int | None = _option(
        None,
        "makes a run repeatable: dummy weights, and requests without a seed of their own in the order they come "
        "(default: every run draws anew)",
        metavar="N",
        aliases=("--random-seed",),
    )

    def __post_init__(self) -> None:
        if isinstance(self.hf_overrides, dict):  # the caller goes on using its own
            object.__setattr__(self, "hf_overrides", copy.deepcopy(self.hf_overrides))
