"""The state that carries a run from one leg to the next, in one safetensors file of at most 16 MiB."""

from __future__ import annotations

from pathlib import Path

import torch
from model import Model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

LIMIT = 16 * 2**20 - 2**16
_E4M3_MAX = 448.0


def save_state(path: Path, model: Model, optimisers: list[torch.optim.Optimizer], step: int) -> str:
    """Writes the exact state if it fits (returns "exact"), otherwise a compact one without moments ("compact")."""
    exact = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for optimiser in optimisers:
            for key, value in optimiser.state.get(parameter, {}).items():
                exact[f"moment.{key}.{name}"] = torch.as_tensor(value)
    kind = "exact"
    if sum(value.numel() * value.element_size() for value in exact.values()) > LIMIT:
        kind, exact = "compact", _compact(model)
    tensors = {name: value.detach().cpu().contiguous() for name, value in exact.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"step": str(step), "kind": kind})
    return kind


def _compact(model: Model) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if ".experts." in name:
            # FP8 with one scale per row: 1/16 relative at worst, a quarter of what FP4 storage costs in the end.
            scale = value.abs().amax(-1, keepdim=True).clamp_min(1e-12) / _E4M3_MAX
            tensors[f"model.{name}"] = (value / scale).to(torch.float8_e4m3fn)
            tensors[f"scale.{name}"] = scale
        else:
            tensors[f"model.{name}"] = value.to(torch.bfloat16) if value.is_floating_point() else value
    return tensors


def _check(path: Path, metadata: dict[str, str], shapes: dict[str, tuple[int, ...]], model: Model) -> None:
    if not {"step", "kind"} <= set(metadata):
        raise ValueError(f"--state {path} is no state of a leg; name the state.safetensors that train.py wrote")
    for name, value in model.state_dict().items():
        if shapes.get(f"model.{name}") != tuple(value.shape):
            raise ValueError(
                f"--state {path} is of another model: {name} is {shapes.get(f'model.{name}', 'missing')} there and "
                f"{tuple(value.shape)} here; continue with the --recipe of the leg that wrote it"
            )


@torch.no_grad()
def load_state(path: Path, model: Model, optimisers: list[torch.optim.Optimizer]) -> tuple[int, bool]:
    """Puts a saved state into the model and its optimisers; returns the step and whether the moments came along.

    Raises ValueError if the file is no state, or the state of a model of another shape.
    """
    try:
        opened = safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"--state {path} is no safetensors file: {error}") from error
    with opened as file:
        metadata = file.metadata() or {}
        names = set(file.keys())
        _check(path, metadata, {name: tuple(file.get_slice(name).get_shape()) for name in names}, model)
        for name, value in model.state_dict(keep_vars=True).items():
            stored = file.get_tensor(f"model.{name}")
            if f"scale.{name}" in names:
                stored = stored.float() * file.get_tensor(f"scale.{name}")
            value.copy_(stored)
        for name, parameter in model.named_parameters():
            for optimiser in optimisers:
                if not any(parameter is member for group in optimiser.param_groups for member in group["params"]):
                    continue
                for key in ("step", "exp_avg", "exp_avg_sq", "momentum"):
                    if f"moment.{key}.{name}" in names:
                        moment = file.get_tensor(f"moment.{key}.{name}")
                        optimiser.state[parameter][key] = moment.to(parameter.device)
    return int(metadata["step"]), metadata["kind"] == "exact"
