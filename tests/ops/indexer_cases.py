"""Inputs of the indexer's ops with everything hostile around them, and an oracle in fp64 that reads the pages by hand.

The oracle shares no code with the package: byte offsets, nibbles and scales are worked out here from the formats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
PAGE = 64
POISON = 0xFF
"""Filled with this byte, anything is NaN: e8m0, E4M3, bf16 and fp32 alike."""
POISON_FP32 = torch.tensor([0x7FC0BEEF], dtype=torch.int32).view(torch.float32).item()


@dataclass(frozen=True)
class IndexerCase:
    q: Tensor
    q_scale: Tensor | None
    weights: Tensor
    cache: Tensor
    block_tables: Tensor
    row_request: Tensor
    visible_end: Tensor
    width: int
    dtype: str
    head_dim: int

    @property
    def arguments(self) -> tuple:
        return (
            self.q,
            self.q_scale,
            self.weights,
            self.cache,
            self.block_tables,
            self.row_request,
            self.visible_end,
        )

    def rows(self, rows: list[int]) -> IndexerCase:
        """The same call for some of the rows only."""
        index = torch.tensor(rows, dtype=torch.int64)
        return replace(
            self,
            q=self.q[index],
            q_scale=None if self.q_scale is None else self.q_scale[index],
            weights=self.weights[index],
            row_request=self.row_request[index],
            visible_end=self.visible_end[index],
        )


def page_bytes(dtype: str, head_dim: int) -> int:
    key = {"fp4": head_dim // 2 + head_dim // 32, "fp8": head_dim + 4, "bf16": 2 * head_dim, "fp32": 4 * head_dim}
    return PAGE * key[dtype]


def random_vectors(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: str, spread: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """(value bytes [..., B], scale bytes [..., S]) of random stored vectors; scales 2^-spread to 2^spread."""
    *lead, dim = shape
    if dtype == "fp4":
        low, high = max(0, 127 - spread), min(254, 127 + spread)
        scales = generator.integers(low, high + 1, (*lead, dim // 32), dtype=np.uint8)
        return generator.integers(0, 256, (*lead, dim // 2), dtype=np.uint8), scales
    if dtype == "fp8":
        values = generator.integers(0, 256, (*lead, dim), dtype=np.uint8)
        values[(values & 0x7F) == 0x7F] = 0x30
        exponent = generator.integers(-spread, spread + 1, (*lead, 1))
        return values, np.exp2(exponent).astype(np.float32).view(np.uint8)
    numbers = generator.standard_normal((*lead, dim)).astype(np.float32)
    if dtype == "bf16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8), None
    return numbers.view(np.uint8), None


def decode_vectors(values: np.ndarray, scales: np.ndarray | None, dtype: str) -> np.ndarray:
    """fp64 [..., D] of stored vectors' bytes."""
    if dtype == "fp4":
        assert scales is not None
        codes = np.stack((values & 15, values >> 4), -1).reshape(*values.shape[:-1], 2 * values.shape[-1])
        powers = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
        return E2M1[codes] * np.repeat(powers, 32, -1)
    if dtype == "fp8":
        assert scales is not None
        return decode_e4m3(values) * np.ascontiguousarray(scales).view(np.float32).astype(np.float64)
    if dtype == "bf16":
        halves = np.ascontiguousarray(values).view(np.uint16)
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.ascontiguousarray(values).view(np.float32).astype(np.float64)


def decode_e4m3(values: np.ndarray) -> np.ndarray:
    """sign, 4 exponent bits with bias 7, 3 mantissa bits; exponent 0 is subnormal, 0x7F is NaN."""
    exponent, mantissa = ((values >> 3) & 15).astype(int), (values & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * np.exp2(exponent - 7.0))
    return np.where((values & 0x7F) == 0x7F, np.nan, size) * np.where(values >= 128, -1.0, 1.0)


def make_case(
    dtype: str,
    heads: int,
    head_dim: int,
    ends: list[list[int]],
    *,
    seed: int = 0,
    spread: int = 4,
    padding: int = 0,
    extra_stride: int = 48,
    width: int | None = None,
) -> IndexerCase:
    """One list of visible ends (a row each) per request; ``padding`` rows of request -1 behind them.

    Pages lie in shuffled order, ``extra_stride`` bytes apart. Every byte that no row sees is poison, between the
    pages too, and the block tables hold nonsense behind the visible end.
    """
    generator = np.random.default_rng(seed)
    lengths = [max(row_ends, default=0) for row_ends in ends]
    pages_of = [math.ceil(length / PAGE) for length in lengths]
    pages = sum(pages_of) + 3
    size = page_bytes(dtype, head_dim)
    memory = np.full((pages, size + extra_stride), POISON, dtype=np.uint8)
    order = generator.permutation(pages).astype(np.int32)
    blocks = max(pages_of, default=0) + 2
    tables = generator.choice(np.array([-1, 2**31 - 1, pages, -77], dtype=np.int32), (len(ends), blocks))
    used = 0
    for request, length in enumerate(lengths):
        values, scales = random_vectors(generator, (length, head_dim), dtype, spread)
        tables[request, : pages_of[request]] = order[used : used + pages_of[request]]
        used += pages_of[request]
        for entry in range(length):
            _store(memory[tables[request, entry // PAGE]], entry % PAGE, values[entry], scales, entry)
    requests = [request for request, row_ends in enumerate(ends) for _ in row_ends] + [-1] * padding
    rows = len(requests)
    q_values, q_scales = random_vectors(generator, (rows, heads, head_dim), dtype, spread)
    flat = [end for row_ends in ends for end in row_ends] + [0] * padding
    return IndexerCase(
        q=_query_tensor(q_values, dtype),
        q_scale=None if q_scales is None else _scale_tensor(q_scales, dtype),
        weights=torch.from_numpy(generator.standard_normal((rows, heads)).astype(np.float32)),
        cache=torch.from_numpy(memory)[:, :size],
        block_tables=torch.from_numpy(tables),
        row_request=torch.tensor(requests, dtype=torch.int32),
        visible_end=torch.tensor(flat, dtype=torch.int32),
        width=max([*lengths, 0]) if width is None else width,
        dtype=dtype,
        head_dim=head_dim,
    )


def _store(page: np.ndarray, entry: int, values: np.ndarray, scales: np.ndarray | None, index: int) -> None:
    page[entry * values.size : (entry + 1) * values.size] = values
    if scales is not None:
        start, count = PAGE * values.size, scales.shape[1]
        page[start + entry * count : start + (entry + 1) * count] = scales[index]


def _query_tensor(values: np.ndarray, dtype: str) -> Tensor:
    torch_dtype = {"fp4": torch.uint8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}
    return torch.from_numpy(values.copy()).view(torch_dtype[dtype])


def _scale_tensor(scales: np.ndarray, dtype: str) -> Tensor:
    tensor = torch.from_numpy(scales.copy())
    return tensor if dtype == "fp4" else tensor.view(torch.float32).squeeze(-1)


def query_fp64(case: IndexerCase) -> np.ndarray:
    scales = None
    if case.q_scale is not None:
        scales = case.q_scale.unsqueeze(-1) if case.dtype == "fp8" else case.q_scale
        scales = scales.contiguous().view(torch.uint8).numpy()
    return decode_vectors(case.q.view(torch.uint8).numpy(), scales, case.dtype)


def keys_fp64(case: IndexerCase, request: int, count: int) -> np.ndarray:
    """[count, D]: the first ``count`` keys of a request, each from its own bytes."""
    scale_size = {"fp4": case.head_dim // 32, "fp8": 4}.get(case.dtype, 0)
    size = page_bytes(case.dtype, case.head_dim) // PAGE - scale_size
    values, scales = np.empty((count, size), np.uint8), np.empty((count, scale_size), np.uint8)
    memory = case.cache.numpy()
    for entry in range(count):
        page, place = memory[int(case.block_tables[request, entry // PAGE])], entry % PAGE
        values[entry] = page[place * size : (place + 1) * size]
        start = PAGE * size + place * scale_size
        scales[entry] = page[start : start + scale_size]
    return decode_vectors(values, scales if scale_size else None, case.dtype)


def logits_fp64(case: IndexerCase) -> list[np.ndarray]:
    """The scores of every row, one array of its visible length each."""
    queries, weights = query_fp64(case), case.weights.numpy().astype(np.float64)
    known: dict[int, np.ndarray] = {}
    result = []
    for row, (request, end) in enumerate(zip(case.row_request.tolist(), case.visible_end.tolist(), strict=True)):
        if request not in known:
            longest = int(case.visible_end[case.row_request == request].max())
            known[request] = keys_fp64(case, request, longest)
        with np.errstate(invalid="ignore"):
            dots = queries[row] @ known[request][:end].T
            relu = np.where(np.isnan(dots), dots, np.maximum(dots, 0.0))
            result.append((weights[row][:, None] * relu).sum(0))
    return result


def calc_diff(x: np.ndarray, y: np.ndarray) -> float:
    """1 - 2<x, y> / (<x, x> + <y, y>); 0 where both are all zero."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    scale = max(np.abs(x).max(initial=0.0), np.abs(y).max(initial=0.0))
    if scale == 0:
        return 0.0
    x, y = x / scale, y / scale
    return float(1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum()))


def poisoned_output(rows: int, width: int, guard: int = 37) -> tuple[Tensor, Tensor]:
    """(out [rows, width], the whole allocation) with ``guard`` elements on both sides, all of them poison."""
    memory = torch.full((rows * width + 2 * guard,), POISON_FP32)
    return memory[guard : guard + rows * width].view(rows, width), memory


def bits(x: Tensor) -> Tensor:
    """fp32 as integers, so that equality means the same bits, NaN included."""
    return x.contiguous().view(torch.int32)


def is_poison(x: Tensor) -> Tensor:
    return bits(x) == bits(torch.full((1,), POISON_FP32))
