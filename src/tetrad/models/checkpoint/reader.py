"""Reading a checkpoint into a model, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tetrad.formats import fp8, mxfp4
from tetrad.models.checkpoint.files import PACKED_FP4, CheckpointFiles, StoredTensor
from tetrad.models.checkpoint.names import Part, is_ignored, native_parts
from tetrad.models.checkpoint.report import Report, Trouble
from tetrad.models.checkpoint.tensors import TensorKind, TensorSpec, expected_tensors, parameter_name, scale_name
from tetrad.models.config import ModelConfig

_FLOAT_DTYPES = ("F32", "BF16", "F16")
_FP8_DTYPES = ("F8_E4M3",)
_FP4_DTYPES = ("I8", "U8", PACKED_FP4)  # two codes in a byte
_INTEGER_DTYPES = ("I64", "I32")
_SCALE_DTYPES = ("F8_E8M0", "F32", "BF16", "U8")  # U8 holds the bytes of F8_E8M0

_ALLOWED_DTYPES = {
    TensorKind.LINEAR: _FP8_DTYPES + _FLOAT_DTYPES,
    TensorKind.EXPERT: _FP4_DTYPES + _FP8_DTYPES + _FLOAT_DTYPES,
    TensorKind.BF16: _FLOAT_DTYPES,
    TensorKind.F32: _FLOAT_DTYPES,
    TensorKind.I64: _INTEGER_DTYPES,
}

_TILE_SIDES = (128, 64, 32, 16)
_E8M0_ONE = 127


class _Found(NamedTuple):
    """A native tensor in the files."""

    stored: StoredTensor
    part: Part

    @property
    def shape(self) -> tuple[int, ...]:
        if self.part.expert is None:
            return self.stored.shape
        return (self.part.stop - self.part.start, *self.stored.shape[2:])

    @property
    def label(self) -> str:
        """The name in the file, and the native one where it is another."""
        name = self.part.native
        return self.stored.name if self.stored.name == name else f"{self.stored.name} (= {name})"


class _Step(NamedTuple):
    """One tensor to read: where from, its scale, and where to."""

    found: _Found
    scale: _Found | None
    tile: tuple[int, int]  # rows and columns that share a scale
    parameter: str
    expert: int | None


def load_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    module: nn.Module,
    *,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> None:
    """Fills a model from a checkpoint folder.

    The folder holds ``model.safetensors``, or shards and ``model.safetensors.index.json``; of both, an index whose
    files are all there is read. Names may be native or those of transformers. FP8 (E4M3 with a scale per tile) and FP4
    (two E2M1 codes in a byte, stored as I8, U8 or F4, with a scale per 32 inputs) are dequantised to the dtype of the
    parameter they go to; the size of the tiles follows from the grid of scales. Tensors of the multi-token-prediction
    layers (``mtp.``) are skipped. Besides the model itself no more than one tensor and its scales are held at a time.
    Everything is checked before the first value is copied.

    Args:
        folder: the checkpoint.
        config: its configuration.
        module: any module whose parameters and buffers carry the native names, with the routed experts of a layer
            stacked as ``layers.L.ffn.experts.w1`` [experts, out, in]. Parameters on the meta device are allocated.
        device: where parameters that are on the meta device go; the others stay where they are.
        progress: show a bar.

    Raises:
        CheckpointError: one error with the names of everything missing, unexpected, mis-shaped, unreadable or out of
            range. The module is untouched then.
    """
    folder = Path(folder)
    report = Report(folder)
    with CheckpointFiles(folder, report) as files, torch.no_grad():
        report.raise_if_any()
        steps = _plan(files, config, module, report)
        _check_expert_tables(steps, files, config, report)
        report.raise_if_any()
        _allocate(module, {step.parameter for step in steps}, torch.device(device))
        targets = _tensors_of(module)
        steps.sort(key=lambda step: step.found.stored.file)
        for step in tqdm(steps, desc="weights", unit="tensor", disable=not progress):
            target = targets[step.parameter]
            _fill(target if step.expert is None else target[step.expert], step, files)


def infer_tile(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns of a weight [N, K] that share one scale of a grid, None if no tile size gives that grid.

    128 is tried first, as a grid alone does not always tell (200 rows and 2 scales are tiles of 128 and 72).
    """
    if len(shape) != 2 or len(grid) != 2:
        return None
    sides = []
    for size, count in zip(shape, grid, strict=True):
        side = next((side for side in _TILE_SIDES if -(-size // side) == count), None)
        if side is None and count > 0 and size % count == 0:
            side = size // count
        if side is None:
            return None
        sides.append(side)
    return sides[0], sides[1]


def _plan(files: CheckpointFiles, config: ModelConfig, module: nn.Module, report: Report) -> list[_Step]:
    expected = expected_tensors(config)
    found = _find(files, report)
    targets = _tensors_of(module)
    steps, used = [], set()
    for name, spec in expected.items():
        used.add(name)
        parameter, expert = parameter_name(name)
        if not _fits(targets.get(parameter), spec, expert, config):
            report.add(Trouble.MODULE, f"{parameter} (the module lacks it, or has it in another shape)")
            continue
        scale = found.get(scale_name(name)) if spec.has_scale else None
        if scale is not None and not (name in found and found[name].stored.dtype in _FLOAT_DTYPES):
            used.add(scale_name(name))
        if name not in found:
            report.add(Trouble.MISSING, name)
            continue
        tensor = found[name]
        tile = _check(tensor, scale, spec, report)
        steps.append(_Step(tensor, scale, tile, parameter, expert))
    for name in found.keys() - used:
        report.add(Trouble.UNEXPECTED, found[name].label)
    filled = {parameter_name(name)[0] for name in expected}
    for name, _ in module.named_parameters():
        if name not in filled:
            report.add(Trouble.MODULE, name)
    return steps


def _find(files: CheckpointFiles, report: Report) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for stored in files.tensors:
        if is_ignored(stored.name):
            continue
        for part in native_parts(stored.name, stored.shape):
            if part.native in found:
                report.add(Trouble.DUPLICATE, f"{part.native} (as {found[part.native].stored.name} and {stored.name})")
            found[part.native] = _Found(stored, part)
    return found


def _check(tensor: _Found, scale: _Found | None, spec: TensorSpec, report: Report) -> tuple[int, int]:
    """Reports what is wrong with a stored tensor; returns the tile of its scales."""
    nothing = (1, 1)
    dtype, allowed = tensor.stored.dtype, _ALLOWED_DTYPES[spec.kind]
    if dtype not in allowed:
        report.add(Trouble.DTYPE, f"{tensor.label} is {dtype}, must be one of {', '.join(allowed)}")
        return nothing
    packed = dtype in _FP4_DTYPES
    shape = (*spec.shape[:-1], spec.shape[-1] // 2) if packed else spec.shape
    if tensor.shape != shape:
        report.add(Trouble.SHAPE, f"{tensor.label} is {list(tensor.shape)}, must be {list(shape)}")
        return nothing
    if not packed and dtype not in _FP8_DTYPES:
        return nothing
    if scale is None:
        report.add(Trouble.SCALE, f"{tensor.label} is {dtype} and has no scale")
        return nothing
    if packed:
        fits = scale.shape == (spec.shape[0], spec.shape[1] // mxfp4.GROUP_SIZE)
        tile = (1, mxfp4.GROUP_SIZE) if fits else None
    else:
        tile = infer_tile(spec.shape, scale.shape)
    if tile is None:
        grid = "one scale per row and 32 inputs" if packed else "a grid of tiles, as 128x128"
        text = f"{scale.label} is {list(scale.shape)} for a weight of {list(spec.shape)}, must be {grid}"
        report.add(Trouble.SCALE, text)
    if scale.stored.dtype not in _SCALE_DTYPES:
        report.add(Trouble.DTYPE, f"{scale.label} is {scale.stored.dtype}, must be one of {', '.join(_SCALE_DTYPES)}")
    return tile or nothing


def _fill(target: Tensor, step: _Step, files: CheckpointFiles) -> None:
    values = files.read(*step.found)
    if step.scale is None:
        target.copy_(values)
        return
    values, scales = values.to(target.device), files.read(*step.scale).to(target.device)
    powers_of_two = scales.dtype in (torch.float8_e8m0fnu, torch.uint8)
    if powers_of_two and values.dtype == torch.float8_e4m3fn:
        target.copy_(fp8.dequantize_blocks(values, scales, step.tile, target.dtype))
    elif powers_of_two:
        target.copy_(mxfp4.dequantize(values, scales, target.dtype))
    else:
        if values.dtype == torch.float8_e4m3fn:
            values = values.float()
        else:  # the codes alone, which a scale of one leaves as they are
            ones = torch.full(scales.shape, _E8M0_ONE, dtype=torch.uint8, device=scales.device)
            values = mxfp4.dequantize(values, ones)
        for dim, side in enumerate(step.tile):
            scales = scales.float().repeat_interleave(side, dim).narrow(dim, 0, values.shape[dim])
        target.copy_(values.mul_(scales))


def _check_expert_tables(steps: list[_Step], files: CheckpointFiles, config: ModelConfig, report: Report) -> None:
    # the only values that are looked at: an index out of range would read another expert's memory, or none
    for step in steps:
        if step.found.stored.dtype in _INTEGER_DTYPES:
            table = files.read(*step.found)
            low, high = int(table.min()), int(table.max())
            if low < 0 or high >= config.n_routed_experts:
                allowed = f"must be 0 to {config.n_routed_experts - 1}"
                report.add(Trouble.VALUE, f"{step.found.label} holds {low} to {high}, {allowed}")


def _fits(target: Tensor | None, spec: TensorSpec, expert: int | None, config: ModelConfig) -> bool:
    shape = spec.shape if expert is None else (config.n_routed_experts, *spec.shape)
    return target is not None and tuple(target.shape) == shape


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
    }


def _allocate(module: nn.Module, names: set[str], device: torch.device) -> None:
    for name, tensor in _tensors_of(module).items():
        if not tensor.is_meta or name not in names:
            continue
        path, _, leaf = name.rpartition(".")
        fresh = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        setattr(module.get_submodule(path), leaf, fresh)
