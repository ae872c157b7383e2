"""What a device does at its best, measured where and when the ops are."""

from __future__ import annotations

import torch

from tetrad.bench.costs import Ceilings, Rate
from tetrad.bench.device import free_bytes
from tetrad.bench.timing import Call, time_calls

_GPU_READ_BYTES = 1 << 30
_CPU_READ_BYTES = 1 << 28
_GPU_SIZE = 8192
_CPU_SIZE = 1024
_REPEATS = 5


def measure_ceilings(device: torch.device) -> Ceilings:
    """Read: an fp32 sum. Matrix: an FP8 and a bf16 product of 8192 x 8192, on a CPU an fp32 one of 1024 x 1024."""
    read = _read_rate(device)
    if device.type == "cpu":
        x = torch.randn((_CPU_SIZE, _CPU_SIZE), dtype=torch.float32, device=device)
        matrix = _matrix_rate(lambda: x @ x, _CPU_SIZE, device, "fp32 product")
        return Ceilings(read, fp8=matrix, bf16=matrix)
    x = torch.randn((_GPU_SIZE, _GPU_SIZE), dtype=torch.bfloat16, device=device)
    bf16 = _matrix_rate(lambda: x @ x, _GPU_SIZE, device, "bf16 product")
    try:
        fp8 = _matrix_rate(_fp8_product(x), _GPU_SIZE, device, "FP8 product (torch._scaled_mm)")
    except (RuntimeError, ValueError, NotImplementedError):
        # the device has no FP8 tensor cores, or this torch has no product for them
        fp8 = bf16
    return Ceilings(read, fp8=fp8, bf16=bf16)


def _read_rate(device: torch.device) -> Rate:
    size = _CPU_READ_BYTES if device.type == "cpu" else _GPU_READ_BYTES
    size = min(size, free_bytes(device) // 4)
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    timing = time_calls([x.sum] * 2, device, _REPEATS)
    return Rate(1e6 * x.numel() * 4 / timing.microseconds, f"fp32 sum of {x.numel() * 4 >> 20} MiB")


def _fp8_product(x: torch.Tensor) -> Call:
    a, one = x.to(torch.float8_e4m3fn), torch.ones((), dtype=torch.float32, device=x.device)
    b = a.t()
    return lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _matrix_rate(product: Call, size: int, device: torch.device, what: str) -> Rate:
    timing = time_calls([product] * 3, device, _REPEATS)
    return Rate(1e6 * 2 * size**3 / timing.microseconds, f"{what} of {size} x {size} x {size}")
