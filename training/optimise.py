"""The optimiser: Muon for the matrices inside the layers (if asked for), AdamW for everything else."""

from __future__ import annotations

import torch
from model import Model


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz: the nearest matrices with all singular values about 1; [count, rows, columns]."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in ((3.4445, -4.7750, 2.0315),) * 5:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if wide else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised per matrix, scaled to the size of an AdamW step so that both share a learning rate."""

    def __init__(self, parameters: list[torch.nn.Parameter], rate: float, momentum: float = 0.95, decay: float = 0.0):
        super().__init__(parameters, {"lr": rate, "momentum": momentum, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape[-2:], []).append(parameter)
            for shape, parameters in shapes.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(parameter)
                    buffer = state["momentum"]
                    buffer.lerp_(parameter.grad, 1 - group["momentum"])  # pyright: ignore[reportArgumentType]
                    updates.append(parameter.grad.lerp(buffer, group["momentum"]).reshape(-1, *shape))  # pyright: ignore
                steps = orthogonalise(torch.cat(updates)) * (0.2 * max(shape) ** 0.5)
                for parameter, step in zip(parameters, steps.split([len(u) for u in updates]), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(step.view_as(parameter) * group["lr"])


def make_optimisers(model: Model, rate: float, decay: float, muon: bool) -> list[torch.optim.Optimizer]:
    """One optimiser, or two with `muon`; each group's "base" is the rate that the schedule multiplies."""
    matrices, plain, decayed = [], [], []
    for name, parameter in model.named_parameters():
        inner = name.startswith("layers.") and name.endswith(".weight") and parameter.ndim >= 2
        if muon and inner and "gate.weight" not in name and "weights_proj" not in name:
            matrices.append(parameter)
        elif inner:
            decayed.append(parameter)
        else:
            plain.append(parameter)
    groups = [{"params": part, "weight_decay": wd} for part, wd in ((plain, 0.0), (decayed, decay)) if part]
    fused = next(model.parameters()).is_cuda
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused, capturable=fused)
    ]
    if matrices:
        optimisers.append(Muon(matrices, rate, decay=decay))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["base"] = group["lr"]
            if fused:
                # A captured graph reads the rate from this tensor.
                group["lr"] = torch.tensor(rate, device=group["params"][0].device)
    return optimisers


def set_rates(optimisers: list[torch.optim.Optimizer], factor: float) -> None:
    """Multiplies every group's base rate by `factor`."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(group["base"] * factor)
            else:
                group["lr"] = group["base"] * factor
