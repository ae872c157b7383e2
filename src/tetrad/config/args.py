"""What a user may set. Flags of the command line are made from these fields, one by one."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _option(default: Any, text: str, **details: Any) -> Any:
    """A field with the help text, metavar, choices and aliases of its command-line flag."""
    metadata = {"help": text, **details}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


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
        None, "folder of tokenizer.json, where it is not the model's", metavar="FOLDER"
    )
    generation_config: str | Path = _option(
        "auto",
        "where generation_config.json gives further end tokens and sampling defaults: auto is the model's folder, none "
        "reads no such file",
        metavar="FOLDER",
    )
    device: str = _option("auto", "auto (cuda where there is one), cpu, cuda or cuda:N")
    cpu_threads: int | str = _option(
        "auto",
        "threads of a step on a CPU; auto is OMP_NUM_THREADS where it is set, else 1 for a small model, all cores for "
        "a large one",
        metavar="N",
    )
    dtype: str = _option(
        "auto", "compute dtype; auto is the checkpoint's own", choices=("auto", "bfloat16", "bf16", "float32", "fp32")
    )
    kv_cache_dtype: str = _option(
        "auto",
        "main KV cache; auto is fp8 for a quantised checkpoint, else the compute dtype",
        choices=("auto", "bf16", "fp8", "fp32"),
    )
    index_cache_dtype: str = _option(
        "auto",
        "index cache; auto is fp4 where a back end serves it, else fp8",
        choices=("auto", "fp4", "mxfp4", "fp8", "bf16", "fp32"),
    )
    enable_deepseek_v4_fp4_indexer: bool = _option(False, "the same as --index-cache-dtype fp4")
    strict_index_cache_dtype: bool = _option(
        False, "fail where the device cannot serve the fp4 index cache, instead of using fp8"
    )
    index_hadamard: bool = _option(
        True, "rotate index queries and keys before they are quantised; off only to measure what that is worth"
    )
    linear_activation_quant: str = _option(
        "none", "round the inputs of DeepSeek's FP8 linears to FP8, as its own code does", choices=("none", "fp8")
    )
    load_format: str = _option(
        "auto", "dummy: random weights, only config.json is read", choices=("auto", "dummy"), const_alias="--load-dummy"
    )
    hf_overrides: dict[str, Any] = _option(
        {}, "values that replace those of config.json, by its own names; an object may hold a part", metavar="JSON"
    )
    block_size: int = _option(256, "tokens in a block; only 256 is possible")
    max_model_len: int | str | None = _option(
        None, "most tokens of a prompt and its output; 128K is 131072, 128k is 128000", metavar="TOKENS"
    )
    max_num_batched_tokens: int | str = _option(8192, "most tokens in one step", metavar="TOKENS")
    max_num_seqs: int = _option(256, "most sequences in one step")
    enable_chunked_prefill: bool = _option(True, "compute long prompts in several steps")
    kv_cache_memory_gb: float | None = _option(
        None, "GiB for all caches; default 4 on a CPU, what --gpu-memory-utilization leaves on a GPU", metavar="GIB"
    )
    gpu_memory_utilization: float = _option(0.9, "share of a GPU's memory for weights and caches together")
    num_gpu_blocks_override: int | None = _option(None, "exactly this many blocks, whatever the memory", metavar="N")
    indexer_logits_budget_mb: int | None = _option(
        None,
        "most MiB of index scores at once, 0 is unlimited; default 2048, or the environment variable "
        "ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB",
        metavar="MIB",
    )
    seed: int | None = _option(
        None, "makes requests without a seed of their own repeatable (in the order they come), and dummy weights"
    )

    def __post_init__(self) -> None:
        if isinstance(self.hf_overrides, dict):  # the caller goes on using its own
            object.__setattr__(self, "hf_overrides", copy.deepcopy(self.hf_overrides))
