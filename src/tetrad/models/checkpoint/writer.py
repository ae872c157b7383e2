"""Writing a small checkpoint in the native format."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tetrad.errors import CheckpointError
from tetrad.formats import fp8, mxfp4
from tetrad.models.checkpoint.files import INDEX_FILE, SINGLE_FILE
from tetrad.models.checkpoint.names import native_parts
from tetrad.models.checkpoint.report import Report, Trouble
from tetrad.models.checkpoint.sizes import is_fp4, plain_dtype, stored_bytes
from tetrad.models.checkpoint.tensors import TensorKind, expected_tensors, scale_name
from tetrad.models.config import ModelConfig

DEFAULT_SHARD_BYTES = 4 * 2**30


def write_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    *,
    quantized: bool = True,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> ModelConfig:
    """Writes a model folder: safetensors, their index if there are several, and config.json.

    Everything is written into a folder beside the target and renamed at the end: an error leaves nothing behind.

    Args:
        folder: the target. Its parent must exist; it must not exist itself, or be empty.
        config: the model's configuration.
        state: native name -> values, one for each of ``expected_tensors(config)``; the routed experts of a layer may
            also come stacked, as in a model's ``state_dict()``.
        quantized: True stores the linears in FP8 (tiles of 128x128) and the experts in FP4 where
            ``config.expert_dtype`` is "fp4", else in FP8, all with e8m0 scales; the rest in bf16, sinks, biases,
            position biases and hyper-connections in fp32. False stores the model's ``torch_dtype`` in place of bf16,
            FP8 and FP4.
        shard_bytes: a file gets no further tensor once it would exceed this.
        overwrite: replace the target even if it is not empty.

    Returns:
        the configuration as written, which says how the weights are stored.

    Raises:
        CheckpointError: tensors are missing, unexpected or mis-shaped, or the target is in the way.
    """
    target = Path(folder)
    if not target.parent.is_dir():
        raise CheckpointError(f"cannot write the checkpoint {target}: {target.parent} is not a folder; create it first")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"cannot write the checkpoint {target}: it is a file; name a folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise CheckpointError(
            f"cannot write the checkpoint {target}: it is not empty; name another or ask to overwrite"
        )
    expert_dtype = (config.expert_dtype or "fp8") if quantized else None
    written = dataclasses.replace(config, quantized=quantized, expert_dtype=expert_dtype)
    values = _by_native_name(written, state, target)

    unfinished = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
        _write_shards(unfinished, written, values, shard_bytes)
        text = json.dumps(written.to_native_dict(), indent=2) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")
        _move(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return written


def _by_native_name(config: ModelConfig, state: Mapping[str, Tensor], target: Path) -> dict[str, Tensor]:
    report = Report(target)
    values: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for part in native_parts(name, tensor.shape):
            values[part.native] = tensor if part.expert is None else tensor[part.expert, part.start : part.stop]
    expected = expected_tensors(config)
    for name, spec in expected.items():
        if name not in values:
            report.add(Trouble.MISSING, name)
        elif tuple(values[name].shape) != spec.shape:
            report.add(Trouble.SHAPE, f"{name} is {list(values[name].shape)}, must be {list(spec.shape)}")
        elif values[name].is_floating_point() == (spec.kind is TensorKind.I64):
            report.add(Trouble.DTYPE, f"{name} is {values[name].dtype}, kind {spec.kind.value}")
    for name in values.keys() - expected.keys():
        report.add(Trouble.UNEXPECTED, name)
    report.raise_if_any()
    return values


def _write_shards(folder: Path, config: ModelConfig, values: Mapping[str, Tensor], shard_bytes: int) -> None:
    specs = expected_tensors(config)
    shards: list[list[str]] = [[]]
    used = total = 0
    for name, spec in specs.items():
        size = stored_bytes(config, spec)
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
        total += size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stored: dict[str, Tensor] = {}
        for name in names:
            stored |= _encode(config, name, specs[name].kind, values[name])
        save_file(stored, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _encode(config: ModelConfig, name: str, kind: TensorKind, values: Tensor) -> dict[str, Tensor]:
    """The stored tensors of one native tensor: itself, or its codes and its scales."""
    values = values.detach().cpu()
    if kind is TensorKind.I64:
        return {name: values.to(torch.int64, copy=True, memory_format=torch.contiguous_format)}
    if not (config.quantized and kind in (TensorKind.LINEAR, TensorKind.EXPERT)):
        return {name: values.to(plain_dtype(config, kind), copy=True, memory_format=torch.contiguous_format)}
    if is_fp4(config, kind):
        codes, scales = mxfp4.quantize(values.float())
        codes = codes.view(torch.int8)
    else:
        codes, scales = fp8.quantize_blocks(values.float())
    return {name: codes, scale_name(name): scales.view(torch.float8_e8m0fnu)}


def _move(unfinished: Path, target: Path) -> None:
    if not target.exists():
        os.rename(unfinished, target)
        return
    # a full folder cannot be renamed over: step it aside, and back should the second rename fail
    aside = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    os.rename(target, aside)
    try:
        os.rename(unfinished, target)
    except OSError:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside)
