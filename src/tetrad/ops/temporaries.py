"""How much memory the reference back ends may use beside their arguments. It changes no result."""

from __future__ import annotations

import torch

_ACCELERATOR_BYTES = 1 << 30


def temporary_bytes(device: torch.device, on_cpu: int) -> int:
    """Bytes of temporaries to aim at: ``on_cpu`` keeps a CPU in its cache, an accelerator wants few large launches.

    The meta device, which computes nothing, counts as a CPU.
    """
    return on_cpu if device.type in ("cpu", "meta") else _ACCELERATOR_BYTES
