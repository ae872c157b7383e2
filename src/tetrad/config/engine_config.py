"""The engine's configuration once everything is decided: checked values, caches, sizes, and a hash of it all."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tetrad import bundled
from tetrad.cache.groups import CacheDemand, CacheGroups, CacheSizes, format_bytes
from tetrad.config.args import EngineArgs
from tetrad.config.cpu_threads import CpuThreads, choose_cpu_threads
from tetrad.errors import ConfigError
from tetrad.geometry import BLOCK_SIZE, IndexDtype, KVDtype, blocks_for, bucket_rows, check_block_size
from tetrad.models.caches import cache_groups
from tetrad.models.config import ModelConfig
from tetrad.models.indexer import IndexerOptions
from tetrad.models.linear import ActivationQuant
from tetrad.ops.backends import Problem, support
from tetrad.ops.indexer_logits import uses_plan
from tetrad.platforms import Platform, ResolvedIndexDtype, current_platform, resolve_index_dtype

LOGITS_BUDGET_VARIABLE = "ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB"
DEFAULT_LOGITS_BUDGET_MB = 2048
DEFAULT_CPU_CACHE_GB = 4.0
GIB = 1 << 30
_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32}
_SUFFIXES = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}


def parse_tokens(value: int | str, name: str) -> int:
    """A number of tokens: 131072, "131072", "128K" (times 1024) or "128k" (times 1000)."""
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"(\d+)([kKmM]?)", value.strip(), re.ASCII)
    if match is None:
        raise ConfigError(f"{name} {value!r} is not a number of tokens; write 131072, 128K (131072) or 128k (128000)")
    return int(match[1]) * _SUFFIXES[match[2]]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine is built from. Made by ``resolve``; every later decision reads it, none reads the options again.

    names_tokenizer: whether the tokenizer was named, and is not just looked for in the model's folder;
    generation_config: auto, none or a folder; kv_cache_bytes: None for what the device leaves; blocks_override: None
    for what fits.
    """

    model_path: str
    model: ModelConfig
    tokenizer_path: str
    names_tokenizer: bool
    generation_config: str
    load_format: str
    seed: int | None
    device: torch.device
    platform: Platform
    dtype: torch.dtype
    kv_cache_dtype: KVDtype
    index_cache_dtype: ResolvedIndexDtype
    index_hadamard: bool
    activation_quant: ActivationQuant
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    chunked_prefill: bool
    indexer: IndexerOptions
    kv_cache_bytes: int | None
    gpu_memory_utilization: float
    blocks_override: int | None
    cpu_threads: CpuThreads

    @classmethod
    def resolve(cls, args: EngineArgs, *, platform: Platform | None = None) -> EngineConfig:
        """Check every option and decide what was left open.

        Raises:
            ConfigError: names the option, its value and what to give instead.
        """
        if not args.model:
            raise ConfigError("no model was named; give the folder of a checkpoint")
        _check_types(args)
        args = dataclasses.replace(args, model=bundled.resolve(args.model))
        _check_ranges(args)
        check_block_size(args.block_size)
        _check_exists(args.model)
        model = ModelConfig.from_pretrained(args.model, args.hf_overrides)
        device = _device(args.device)
        platform = platform or current_platform(device)
        dtype = _DTYPES[model.torch_dtype if args.dtype == "auto" else _choice(args, "dtype")]
        max_model_len = _max_model_len(args, model)
        tokens = parse_tokens(args.max_num_batched_tokens, "max_num_batched_tokens")
        _at_least("max_num_batched_tokens", tokens, 1)
        if not args.enable_chunked_prefill and tokens < max_model_len:
            raise ConfigError(
                f"without chunked prefill a step must be able to hold a whole sequence, but max_num_batched_tokens "
                f"{tokens} is below max_model_len {max_model_len}; raise the first, lower the second, or enable "
                f"chunked prefill"
            )
        kv_choice = _choice(args, "kv_cache_dtype")
        if kv_choice == "auto":
            kv_choice = "fp8" if model.quantized else {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
        index_dtype = _index_dtype(args, model, platform)
        scorer = Problem(index_dtype.dtype, model.index_head_dim, model.index_n_heads)
        return cls(
            model_path=str(args.model),
            model=model,
            tokenizer_path=str(args.tokenizer or args.model),
            names_tokenizer=bool(args.tokenizer),
            generation_config=str(args.generation_config),
            load_format=args.load_format,
            seed=args.seed,
            device=device,
            platform=platform,
            dtype=dtype,
            kv_cache_dtype=KVDtype(kv_choice),
            index_cache_dtype=index_dtype,
            index_hadamard=args.index_hadamard,
            activation_quant=ActivationQuant(_choice(args, "linear_activation_quant")),
            max_model_len=max_model_len,
            max_num_batched_tokens=tokens,
            max_num_seqs=args.max_num_seqs,
            chunked_prefill=args.enable_chunked_prefill,
            indexer=IndexerOptions(_logits_budget_mb(args) << 20, plan=uses_plan(platform, scorer)),
            kv_cache_bytes=None if args.kv_cache_memory_gb is None else int(args.kv_cache_memory_gb * GIB),
            gpu_memory_utilization=args.gpu_memory_utilization,
            blocks_override=args.num_gpu_blocks_override,
            cpu_threads=choose_cpu_threads(args.cpu_threads, model, device),
        )

    @property
    def cache_groups(self) -> CacheGroups:
        """The caches of this model in these dtypes."""
        return self.cache_groups_with(IndexDtype(self.index_cache_dtype.dtype))

    def cache_groups_with(self, index_dtype: IndexDtype) -> CacheGroups:
        """The same with index keys in another dtype.

        Raises:
            ConfigError: the model's keys cannot be stored so.
        """
        return cache_groups(
            self.model,
            kv_dtype=self.kv_cache_dtype,
            index_dtype=index_dtype,
            compute_dtype=self.dtype,
            index_hadamard=self.index_hadamard,
        )

    @property
    def cache_demand(self) -> CacheDemand:
        """What the caches of this engine need, by number and by bytes."""
        return CacheDemand.of(
            self.cache_groups,
            requests=self.max_num_seqs,
            step_rows=bucket_rows(self.max_num_batched_tokens, self.device.type, chunks=True),
            blocks_per_request=blocks_for(self.max_model_len),
        )

    def cache_sizes(self, available_bytes: int) -> CacheSizes:
        """How many blocks fit into ``available_bytes`` beside the rings and the slots of a step's rows.

        Raises:
            ConfigError: with the arithmetic, where not even one sequence of max_model_len fits.
        """
        demand = self.cache_demand
        needed, useful = demand.blocks_per_request, demand.blocks_per_request * self.max_num_seqs
        if self.blocks_override is not None:
            blocks = self.blocks_override
            if blocks < needed:
                raise ConfigError(
                    f"num_gpu_blocks_override {blocks} is too low: one sequence of max_model_len {self.max_model_len} "
                    f"needs {needed} blocks; raise it to at least that, or lower --max-model-len"
                )
        elif demand.block_bytes:
            blocks = min(max(available_bytes - demand.fixed_bytes, 0) // demand.block_bytes, useful)
        else:
            blocks = useful if demand.fixed_bytes <= available_bytes else 0
        if blocks < needed:
            raise ConfigError(
                f"the caches do not fit: {demand.describe_fixed()}, and one sequence of max_model_len "
                f"{self.max_model_len} needs {needed} blocks x {format_bytes(demand.block_bytes)} = "
                f"{format_bytes(needed * demand.block_bytes)}: {format_bytes(demand.total_bytes(1))} in all, but there "
                f"are {format_bytes(available_bytes)}, which leave {blocks} blocks. Lower --max-model-len, "
                f"--max-num-seqs or --max-num-batched-tokens, or raise --kv-cache-memory-gb"
            )
        return demand.sizes(blocks)

    def compute_hash(self) -> str:
        """SHA-256 over everything that changes what is computed or how the caches lie, as hex digits."""
        factors = {
            "model": {key: str(value) for key, value in dataclasses.asdict(self.model).items()},
            "device": self.device.type,
            "platform": str(self.platform),
            "dtype": str(self.dtype),
            "kv_cache_dtype": str(self.kv_cache_dtype),
            "index_cache_dtype": self.index_cache_dtype.dtype,
            "index_hadamard": self.index_hadamard,
            "linear_activation_quant": str(self.activation_quant),
            "block_size": BLOCK_SIZE,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "torch": torch.__version__,
        }
        return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


def _check_types(args: EngineArgs) -> None:
    """Refuse what is not of the type that the option declares; ranges are checked where values are used."""
    hints = typing.get_type_hints(EngineArgs)
    for field in dataclasses.fields(args):
        value, hint = getattr(args, field.name), hints[field.name]
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not any(_is_of(value, kind) for kind in allowed):
            choices = field.metadata.get("choices")
            wanted = f"one of {', '.join(map(repr, choices))}" if choices else field.type
            raise ConfigError(f"{field.name} {value!r} is of type {type(value).__name__}; give {wanted}")


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float))
    return isinstance(value, typing.get_origin(kind) or kind)


def _check_ranges(args: EngineArgs) -> None:
    _choice(args, "load_format")
    _at_least("max_num_seqs", args.max_num_seqs, 1)
    if args.num_gpu_blocks_override is not None:
        _at_least("num_gpu_blocks_override", args.num_gpu_blocks_override, 1)
    if args.kv_cache_memory_gb is not None and not 0 < args.kv_cache_memory_gb < float("inf"):
        raise ConfigError(f"kv_cache_memory_gb must be a number of GiB above 0, not {args.kv_cache_memory_gb}")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {args.gpu_memory_utilization}")


def _check_exists(model: str | Path) -> None:
    """Refuse a model that is neither here nor in the package."""
    if Path(model).exists():
        return
    names = (bundled.NAME, *bundled.GEOMETRIES)
    near = difflib.get_close_matches(str(model).lower().rpartition("/")[2], names, n=1)
    hint = f", did you mean {near[0]}?" if near else "."
    raise ConfigError(
        f"cannot read the model configuration {model}: there is no such folder{hint} Give the folder of a checkpoint, "
        f"since nothing is downloaded; names of this package are {', '.join(names)}"
    )


def _choice(args: EngineArgs, name: str) -> str:
    """The value of an option that has a fixed set of them."""
    field = next(field for field in dataclasses.fields(args) if field.name == name)
    value, choices = getattr(args, name), field.metadata["choices"]
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is not known; choose one of {', '.join(choices)}")
    return value


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, not {value}")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {name!r} is not known; choose auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} is not available: torch sees {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return device


def _max_model_len(args: EngineArgs, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if args.max_model_len is None:
        return limit
    length = parse_tokens(args.max_model_len, "max_model_len")
    _at_least("max_model_len", length, 2)
    if length > limit:
        raise ConfigError(
            f"max_model_len {length} is above the model's max_position_embeddings {limit}; lower it, or raise the "
            f"model's with --hf-overrides"
        )
    return length


def _index_dtype(args: EngineArgs, model: ModelConfig, platform: Platform) -> ResolvedIndexDtype:
    requested = _choice(args, "index_cache_dtype")
    if args.enable_deepseek_v4_fp4_indexer:
        if requested not in ("auto", "fp4", "mxfp4"):
            raise ConfigError(
                f"enable_deepseek_v4_fp4_indexer asks for an fp4 index cache and index_cache_dtype for {requested}; "
                f"give only one of them"
            )
        requested = "fp4"
    return resolve_index_dtype(
        requested,
        index_head_dim=model.index_head_dim,
        platform=platform,
        support=support("indexer_logits", platform, Problem("fp4", model.index_head_dim, model.index_n_heads)),
        strict=args.strict_index_cache_dtype,
    )


def _logits_budget_mb(args: EngineArgs) -> int:
    """The option, else the environment variable, else 2048."""
    value: int | str | None = args.indexer_logits_budget_mb
    name = "indexer_logits_budget_mb"
    if value is None:
        value, name = os.environ.get(LOGITS_BUDGET_VARIABLE, DEFAULT_LOGITS_BUDGET_MB), LOGITS_BUDGET_VARIABLE
    try:
        number = int(value)
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(f"{name} must be a number of MiB, 0 (unlimited) or more, not {value!r}")
    return number
