"""What the ops are timed on: as many independent sets of buffers as it takes to leave a cache cold.

Keys lie in pages at random places of one pool; every set reads pages of its own as long as the pool has others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.bench.cases import Case, Kind, Op
from tetrad.bench.costs import cost_of, vector_bytes
from tetrad.geometry import IndexDtype, IndexLayout, ceil_div, data_rows, page_stride, scale_rows

_POOL_BYTES = 1 << 30
_ALIGNMENT = 256
"""Every buffer starts at a multiple of this many bytes, as an engine's would."""
_COLD_FACTOR = 4
"""The sets of a case together exceed the cache by this factor, so that a set is cold when its turn comes again."""
_MOST_SETS = 2048
_PLAN_SETS = 64
"""A plan's inputs are too small to leave any cache; in an engine the step before has just written them."""
_SETS_WITHOUT_CACHE = 4
_FILL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class InputSet:
    """The arguments and outputs of one call. What the case's op does not take is an empty tensor."""

    case: Case
    q: Tensor
    q_scale: Tensor | None
    weights: Tensor
    cache: Tensor
    block_tables: Tensor
    row_request: Tensor
    visible_end: Tensor
    logits: Tensor
    chosen: Tensor

    @property
    def width(self) -> int:
        """Columns of the scores."""
        return self.case.shape.entries

    @property
    def scorer_arguments(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The positional arguments of ``indexer_logits``."""
        return (
            self.q,
            self.q_scale,
            self.weights,
            self.cache,
            self.block_tables,
            self.row_request,
            self.visible_end,
        )


@dataclass(frozen=True, slots=True)
class Footprint:
    """How many sets a case is measured with, whether that leaves the cache cold, and the bytes of all of them."""

    sets: int
    cold: bool
    bytes: int


def footprint_of(case: Case, cache_bytes: int) -> Footprint:
    """Sets and memory for a device whose last-level cache has ``cache_bytes``, 0 if that is unknown."""
    per_set = _set_bytes(case)
    touched = cost_of(case).bytes
    if cache_bytes:
        wanted = max(2, _COLD_FACTOR * cache_bytes // touched + 1)
        sets = min(wanted, _PLAN_SETS if case.op is Op.PLAN else _MOST_SETS)
        cold = sets * touched > _COLD_FACTOR * cache_bytes
    else:
        sets, cold = _SETS_WITHOUT_CACHE, False
    pool = _pool_pages(case, sets) * page_stride(case.layout) if case.op.reads_keys else 0
    return Footprint(sets, cold, pool + sets * per_set)


def _pages_of_request(case: Case) -> int:
    return ceil_div(case.shape.entries, case.layout.entries)


def _pool_pages(case: Case, sets: int) -> int:
    """Pages for all sets, but no more than 1 GiB of them, unless one set alone needs more."""
    one = case.shape.requests * _pages_of_request(case)
    return max(one, min(sets * one, _POOL_BYTES // page_stride(case.layout)))


def _shapes(case: Case) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the tensors that a set of the case has for itself; the pool comes beside them."""
    shape, rows, heads = case.shape, case.shape.total_rows, case.heads
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "row_request": ((rows,), torch.int32),
        "visible_end": ((rows,), torch.int32),
    }
    if case.op.reads_keys:
        layout = case.layout
        value_dtype = {IndexDtype.FP4: torch.uint8, IndexDtype.FP8: torch.float8_e4m3fn}
        plain = torch.bfloat16 if layout.dtype is IndexDtype.BF16 else torch.float32
        values = value_dtype.get(layout.dtype, plain)
        tensors["q"] = ((rows, heads, layout.data_row_bytes // values.itemsize), values)
        if layout.dtype is IndexDtype.FP4:
            tensors["q_scale"] = ((rows, heads, layout.scale_row_bytes), torch.uint8)
        elif layout.dtype is IndexDtype.FP8:
            tensors["q_scale"] = ((rows, heads), torch.float32)
        tensors["weights"] = ((rows, heads), torch.float32)
        tensors["block_tables"] = ((shape.requests, _pages_of_request(case)), torch.int32)
    if case.op is not Op.PLAN:
        tensors["logits"] = ((rows, shape.entries), torch.float32)
    if case.op in (Op.TOPK, Op.TOTAL):
        tensors["chosen"] = ((rows, case.k), torch.int32)
    return tensors


def _set_bytes(case: Case) -> int:
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in _shapes(case).values())


def _padded(size: int) -> int:
    return ceil_div(size, _ALIGNMENT) * _ALIGNMENT


def make_inputs(case: Case, sets: int, device: torch.device, seed: int = 0) -> list[InputSet]:
    """``sets`` sets of random inputs; the same on every run on one device.

    fp4: all codes, scales 2^-7 to 2^3. fp8: all finite codes, scales 2^-6 to 2^3. bf16 and fp32: normal numbers. Head
    weights are normal numbers, and so are the scores of a top-k of its own.
    """
    generator = torch.Generator(device).manual_seed(seed)
    # not touched by an op, so that nobody can mistake it for a key
    pool = torch.empty((0, 0), dtype=torch.uint8, device=device)
    tables: Callable[[], Tensor] | None = None
    if case.op.reads_keys:
        pool = _make_pool(case.layout, _pool_pages(case, sets), device, generator)
        tables = _Tables(case, pool.shape[0], device, generator)
    return [_make_set(case, pool, tables, device, generator) for _ in range(sets)]


def _make_set(
    case: Case, pool: Tensor, tables: Callable[[], Tensor] | None, device: torch.device, generator: torch.Generator
) -> InputSet:
    shape, shapes = case.shape, _shapes(case)
    made = _allocate(shapes, device)
    requests = torch.arange(shape.requests, dtype=torch.int32, device=device)
    made["row_request"].copy_(requests.repeat_interleave(shape.rows))
    made["visible_end"].fill_(shape.entries)
    if shape.kind is Kind.PREFILL:
        made["visible_end"] += torch.arange(1 - shape.rows, 1, dtype=torch.int32, device=device)
    if case.op.reads_keys and tables is not None:
        _fill_vectors(made["q"].view(torch.uint8), _scale_bytes(made, case.layout), case.layout, generator)
        made["weights"].normal_(generator=generator)
        made["block_tables"].copy_(tables())
    if case.op is Op.TOPK:
        made["logits"].normal_(generator=generator)
    missing = torch.empty(0, dtype=torch.float32, device=device)
    return InputSet(
        case=case,
        q=made.get("q", missing),
        q_scale=made.get("q_scale"),
        weights=made.get("weights", missing),
        cache=pool[:, : case.layout.page_bytes] if case.op.reads_keys else pool,
        block_tables=made.get("block_tables", missing),
        row_request=made["row_request"],
        visible_end=made["visible_end"],
        logits=made.get("logits", missing),
        chosen=made.get("chosen", missing),
    )


def _allocate(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> dict[str, Tensor]:
    """All tensors of a set in one allocation, each aligned."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    memory = torch.empty(sum(map(_padded, sizes.values())), dtype=torch.uint8, device=device)
    made, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        made[name] = memory[start : start + sizes[name]].view(dtype).view(shape)
        start += _padded(sizes[name])
    return made


class _Tables:
    """Block tables for one set after another: pages in random order, none twice before all were used."""

    def __init__(self, case: Case, pages: int, device: torch.device, generator: torch.Generator) -> None:
        self._order = torch.randperm(pages, dtype=torch.int64, device=device, generator=generator)
        self._shape = (case.shape.requests, _pages_of_request(case))
        self._next = 0

    def __call__(self) -> Tensor:
        count = math.prod(self._shape)
        places = (
            torch.arange(self._next, self._next + count, dtype=torch.int64, device=self._order.device)
            % self._order.shape[0]
        )
        self._next += count
        return self._order[places].view(self._shape)


def _make_pool(layout: IndexLayout, pages: int, device: torch.device, generator: torch.Generator) -> Tensor:
    pool = torch.empty((pages, page_stride(layout)), dtype=torch.uint8, device=device)
    at_once = max(1, _FILL_BYTES // (layout.entries * vector_bytes(layout)))
    for start in range(0, pages, at_once):
        part = pool[start : start + at_once]
        _fill_vectors(data_rows(part, layout), scale_rows(part, layout), layout, generator)
    return pool


def _scale_bytes(made: dict[str, Tensor], layout: IndexLayout) -> Tensor:
    if layout.dtype is IndexDtype.FP8:
        return made["q_scale"].unsqueeze(-1).view(torch.uint8)
    return made.get("q_scale", made["q"].new_empty(0, dtype=torch.uint8))


def _fill_vectors(data: Tensor, scales: Tensor, layout: IndexLayout, generator: torch.Generator) -> None:
    """Random vectors, as bytes: ``data`` uint8 [..., B] and ``scales`` uint8 [..., S]; both may be strided views."""
    device = data.device
    if layout.dtype is IndexDtype.FP4:
        data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, device=device, generator=generator))
        scales.copy_(torch.randint(120, 131, scales.shape, dtype=torch.uint8, device=device, generator=generator))
    elif layout.dtype is IndexDtype.FP8:
        codes = torch.randint(0, 254, data.shape, dtype=torch.uint8, device=device, generator=generator)
        # 0x7F and 0xFF are NaN; stepping over the first leaves out the second
        data.copy_(codes.add_(codes >= 0x7F))
        exponents = torch.randint(-6, 4, scales.shape[:-1], dtype=torch.int64, device=device, generator=generator)
        scales.copy_(torch.exp2(exponents.float()).unsqueeze(-1).view(torch.uint8))
    else:
        dtype = torch.bfloat16 if layout.dtype is IndexDtype.BF16 else torch.float32
        size = (*data.shape[:-1], data.shape[-1] // dtype.itemsize)
        data.copy_(
            torch.randn(size, dtype=torch.float32, device=device, generator=generator).to(dtype).view(torch.uint8)
        )
