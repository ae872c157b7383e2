"""Random weights of a sensible scale, for trying things out without a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tetrad.errors import CheckpointError
from tetrad.models.checkpoint.tensors import TensorSpec, expected_tensors, parameter_name
from tetrad.models.config import ModelConfig


def dummy_state(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random values for every tensor of a model, by native name: fp32, and int64 for the expert tables.

    Every tensor depends on the seed and its name alone. Linears keep the variance of their input; nothing that the
    model adds or multiplies is left at zero or one, so that a mistake in using it shows.
    """
    return dict(_values(config, seed, torch.device("cpu")))


def fill_dummy(module: nn.Module, config: ModelConfig, seed: int = 0) -> None:
    """Fills a model in place with random values, those of ``dummy_state`` if it is on the CPU.

    Args:
        module: carries the native names, as for ``load_checkpoint``; no parameter may be on the meta device.
        config: its configuration.
        seed: other seeds give other weights. The same seed gives other weights on another kind of device.

    Raises:
        CheckpointError: the module lacks a tensor, or has it in another shape.
    """
    targets = dict(module.named_buffers(remove_duplicate=False)) | dict(module.named_parameters(remove_duplicate=False))
    device = next(iter(targets.values())).device if targets else torch.device("cpu")
    with torch.no_grad():
        for name, values in _values(config, seed, device):
            parameter, expert = parameter_name(name)
            target = targets.get(parameter)
            if target is not None and expert is not None and len(target) == config.n_routed_experts:
                target = target[expert]
            if target is None or target.shape != values.shape:
                shape = None if target is None else list(target.shape)
                wanted = f"{list(values.shape)}{'' if expert is None else ' for each expert'}"
                raise CheckpointError(
                    f"the model's tensor {parameter} has the shape {shape}, its configuration wants {wanted}; "
                    "build the model from this configuration"
                )
            target.copy_(values)


def _values(config: ModelConfig, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, spec in expected_tensors(config).items():
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield name, _tensor(name, spec, config, generator)


def _tensor(name: str, spec: TensorSpec, config: ModelConfig, generator: torch.Generator) -> Tensor:
    device = generator.device

    def normal(deviation: float, mean: float = 0.0) -> Tensor:
        return torch.randn(spec.shape, dtype=torch.float32, device=device, generator=generator) * deviation + mean

    leaf = name.rsplit(".", 1)[-1]
    if leaf == "tid2eid":  # each token's experts are distinct
        draws = torch.rand(
            (spec.shape[0], config.n_routed_experts), dtype=torch.float32, device=device, generator=generator
        )
        return draws.argsort(dim=-1)[:, : spec.shape[1]].contiguous()
    if name == "embed.weight" or leaf == "attn_sink":
        return normal(1.0)
    if leaf.endswith("_scale") or (len(spec.shape) == 1 and leaf == "weight"):  # hyper-connections, norms
        return normal(0.2, 1.0)
    if leaf.endswith("_base") or leaf == "ape":
        return normal(0.5)
    if leaf == "bias":
        return normal(0.2)
    return normal(spec.shape[-1] ** -0.5)
