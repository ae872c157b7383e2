"""A module that has the names and shapes of the model and nothing else, and an independent reader of stored bytes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from tetrad.models.checkpoint import TensorKind, expected_tensors
from tetrad.models.config import ModelConfig

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


class StandIn(nn.Module):
    """Parameters by native names, the experts of a layer stacked; poisoned with NaN, the expert tables with -1."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__()
        for name, spec in expected_tensors(config).items():
            shape = spec.shape
            if ".experts." in name:
                head, expert, weight, _ = name.rsplit(".", 3)
                if expert != "0":
                    continue
                name, shape = f"{head}.{weight}", (config.n_routed_experts, *shape)
            owner: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            if spec.kind is TensorKind.I64:
                owner.register_buffer(leaf, torch.full(shape, -1, dtype=torch.int64, device=device))
            else:
                kept = spec.kind is TensorKind.F32 or len(shape) == 1
                values = torch.full(shape, torch.nan, dtype=torch.float32 if kept else dtype, device=device)
                owner.register_parameter(leaf, nn.Parameter(values, requires_grad=False))

    def values(self) -> dict[str, torch.Tensor]:
        """Native name of a single tensor -> its values."""
        result = {}
        for name, tensor in self.state_dict().items():
            head, _, leaf = name.rpartition(".")
            if head.endswith(".experts"):
                result |= {f"{head}.{expert}.{leaf}.weight": values for expert, values in enumerate(tensor)}
            else:
                result[name] = tensor
        return result


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names and, bit by bit, the same values; dtypes may differ where the values do not."""
    assert actual.keys() == expected.keys()
    for name, values in actual.items():
        assert values.shape == expected[name].shape, name
        assert torch.equal(values.double(), expected[name].double()), f"{name} differs"


def decode_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight of a native checkpoint, dequantised in numpy straight from the definition of the formats."""
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    result = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(name.removesuffix("weight") + "scale")
        result[name] = tensor if scale is None else torch.from_numpy(_decode(tensor, scale))
    return result


def _decode(tensor: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    scales = np.ldexp(np.float32(1), scale.view(torch.uint8).numpy().astype(np.int32) - 127)
    if tensor.dtype == torch.int8:
        data = tensor.view(torch.uint8).numpy()
        values = np.empty((data.shape[0], data.shape[1] * 2), dtype=np.float32)
        values[:, 0::2], values[:, 1::2] = E2M1[data & 15], E2M1[data >> 4]
        row, column = np.indices(values.shape)
        return values * scales[row, column // 32]
    values = tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    row, column = np.indices(values.shape)
    return values * scales[row // 128, column // 128]
