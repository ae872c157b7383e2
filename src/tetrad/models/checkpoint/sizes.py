"""The bytes of a model's weights, by arithmetic: as a checkpoint stores them and as the engine holds them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from tetrad.formats import fp8, mxfp4
from tetrad.models.checkpoint.tensors import TensorKind, TensorSpec, expected_tensors
from tetrad.models.config import ModelConfig

_I64_BYTES = 8


class WeightBytes(NamedTuple):
    """Bytes of all weights of a model.

    ``held`` is in memory, every weight dequantised to the compute dtype (norms, gates, compressors, hyper-connections
    and the head in fp32); ``held_experts`` is the part of it that the routed experts take; ``stored`` is on disk, in
    the formats that the configuration names, without the multi-token-prediction layers.
    """

    held: int
    held_experts: int
    stored: int


@functools.lru_cache(maxsize=8)  # the names of Pro are 70,000
def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> WeightBytes:
    """The bytes of a model's weights.

    Args:
        config: the model's configuration.
        dtype: the compute dtype.
    """
    held = experts = stored = 0
    for name, spec in expected_tensors(config).items():
        size = held_dtype(name, spec, dtype).itemsize * math.prod(spec.shape)
        held += size
        experts += size if spec.kind is TensorKind.EXPERT else 0
        stored += stored_bytes(config, spec)
    return WeightBytes(held, experts, stored)


def held_dtype(name: str, spec: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the model holds a tensor, given its compute dtype."""
    if spec.kind is TensorKind.I64:
        return torch.int64
    return dtype if spec.has_scale or name == "embed.weight" else torch.float32


def stored_bytes(config: ModelConfig, spec: TensorSpec) -> int:
    """The bytes of one tensor and its scales in a checkpoint; experts are FP8 where no dtype is named."""
    count = math.prod(spec.shape)
    if spec.kind is TensorKind.I64:
        return _I64_BYTES * count
    if not (config.quantized and spec.has_scale):
        return plain_dtype(config, spec.kind).itemsize * count
    if is_fp4(config, spec.kind):
        return count // 2 + count // mxfp4.GROUP_SIZE
    rows, columns = (-(-size // side) for size, side in zip(spec.shape, fp8.WEIGHT_BLOCK, strict=True))
    return count + rows * columns


def is_fp4(config: ModelConfig, kind: TensorKind) -> bool:
    """Whether a quantised checkpoint of this configuration stores such a tensor in FP4, not FP8."""
    return kind is TensorKind.EXPERT and config.expert_dtype == "fp4"


def plain_dtype(config: ModelConfig, kind: TensorKind) -> torch.dtype:
    """The dtype in which a tensor is stored that is not quantised."""
    if kind is TensorKind.F32 or (not config.quantized and config.torch_dtype == "float32"):
        return torch.float32
    return torch.bfloat16
