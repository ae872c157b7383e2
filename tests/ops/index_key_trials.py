"""Cases for the fused index writers, what they must give, and how a back end is called with them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from tetrad.formats.hadamard import rotate
from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.index_keys import reference
from tetrad.ops.rotary import apply_rotary

BF16, FP32 = torch.bfloat16, torch.float32
GUARD = 64
EPS = 1e-6


# ---- cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Query:
    """A call of ``quantize_index_query``; ``gap`` is how many elements lie between heads."""

    rows: int
    heads: int
    dim: int
    rope: int
    dtype: torch.dtype
    kind: str
    hadamard: bool
    gap: int = 0

    @property
    def layout(self) -> IndexLayout:
        return IndexLayout(IndexDtype(self.kind), self.dim, hadamard=self.hadamard)

    @functools.cached_property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = hard_vectors(self.rows * self.heads, self.dim, self.dtype).view(self.rows, self.heads, self.dim)
        return spaced(q, self.gap), *angles(self.rows, self.rope, self.gap)


@dataclass(frozen=True)
class Keys:
    """A call of ``write_pooled_index_keys``, of ``index_key_vectors`` if there is no layout, or of ``write_index_keys``
    if there is no norm's weight. ``dtype`` is what is rounded to, ``weight`` the dtype of the norm's weight.
    """

    count: int
    dim: int
    rope: int
    dtype: torch.dtype
    kind: str
    hadamard: bool
    weight: torch.dtype | None = BF16
    gap: int = 0
    ordinary: bool = False

    @property
    def layout(self) -> IndexLayout | None:
        return IndexLayout(IndexDtype(self.kind), self.dim, hadamard=self.hadamard) if self.kind else None

    @functools.cached_property
    def inputs(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.count)
        source = FP32 if self.weight else self.dtype
        given: dict[str, Any] = {}
        if self.weight:
            given["norm_weight"] = (torch.randn(self.dim, generator=generator) * 2).to(self.weight)
            given["eps"] = EPS
            given["cos"], given["sin"] = angles(self.count, self.rope, self.gap)
            given["dtype"] = self.dtype
        vectors = hard_vectors(self.count, self.dim, source)
        if self.ordinary:
            vectors = torch.randn(self.count, self.dim, generator=generator)
        given["pooled" if self.weight else "keys"] = spaced(vectors, self.gap)
        if self.layout is not None:
            # the first of them is stored in the first slot of all, the last one in the last, which no other may have
            slots = torch.randperm(4 * 64 - 1, generator=generator)[: self.count] + 64
            slots[:1], slots[-1:] = 0, 5 * 64 - 1
            for index, slot in ((1, -1), (2, 5 * 64), (7, -(2**40)), (8, 2**40), (9, 5 * 64 + 63)):
                if index < self.count - 1:
                    slots[index] = slot
            given["slots"], given["layout"] = slots, self.layout
        return given


def hard_vectors(count: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Vectors of every size, and among them: zeros, subnormal and the largest numbers, NaN and infinities, one large
    channel, sparse ones, and multiples of a power of two, on which FP4 ties abound."""
    generator = torch.Generator().manual_seed(dim + count)
    x = torch.randn(count, dim, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (count, 1), generator=generator).float())
    # a lone vector is an ordinary one
    for index in range(1, count):
        vector, kind = x[index], index % 23
        if kind == 1:
            vector.zero_()
        elif kind == 2:
            vector.zero_().neg_()
        elif kind == 3:
            vector.mul_(1e-42 / vector.abs().max())
        elif kind == 4:
            vector.mul_(3e-38 / vector.abs().max())
        elif kind == 5:
            vector.mul_(3.3e38 / vector.abs().max())
        elif kind == 6:
            vector.mul_(3e37 / vector.abs().max())
        elif kind == 7:
            vector[index % dim] = torch.nan
        elif kind == 8:
            vector[dim // 2] = torch.inf
        elif kind == 9:
            vector[0], vector[-1] = -torch.inf, torch.inf
        elif kind == 10:
            vector[3] *= 1e4
        elif kind == 11:
            vector[::3] = 0.0
            vector[1::3] *= -0.0
        elif kind in (12, 13):
            vector.copy_(torch.randint(-12, 13, (dim,), generator=generator) / 2)
        elif kind == 14:
            vector.copy_(-torch.arange(dim).float() / 4)
        elif kind == 15:
            # the largest numbers of its groups lie on both sides of a scale's limit, and as near as can be
            limits = torch.tensor([6.0, 6.0 * (1 + 2.0**-7), 6.0, 448.0])
            limits[2::2] = torch.nextafter(limits[2::2], torch.tensor(torch.inf))
            vector.copy_(limits.roll(index // 23).repeat_interleave(32).repeat(4)[-dim:])
    return x.to(dtype)


def spaced(x: torch.Tensor, gap: int) -> torch.Tensor:
    """A copy with ``gap`` elements of NaN behind every run of the last dimension."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), torch.nan, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def angles(rows: int, rope: int, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin that lie unlike: their strides are two arguments."""
    angle = torch.rand(rows, rope // 2, generator=torch.Generator().manual_seed(rows)) * 6.28
    return spaced(angle.cos(), gap), spaced(angle.sin(), 2 * gap)


def queries() -> list[Query]:
    result = [
        Query(rows, heads, dim, rope, dtype, kind, hadamard)
        for rows, heads, dim, rope in ((1, 64, 128, 64), (3, 5, 64, 64))
        for dtype in (BF16, FP32)
        for kind in ("fp4", "fp8", "bf16", "fp32")
        for hadamard in (True, False)
    ]
    result += [Query(65, 1, 64, 16, dtype, kind, True, 3) for dtype in (BF16, FP32) for kind in ("fp4", "fp8")]
    result += [
        Query(65, 5, 128, 64, BF16, "fp4", True, 8),
        Query(65, 64, 64, 64, BF16, "fp4", True),
        Query(3, 64, 128, 0, BF16, "fp4", True),
        Query(65, 1, 32, 32, BF16, "fp4", True),
        Query(33, 3, 32, 2, FP32, "fp8", False),
        Query(7, 5, 256, 64, BF16, "fp8", True),
        Query(5, 9, 512, 64, BF16, "fp4", True),
        Query(3, 64, 64, 48, FP32, "fp4", True, 1),
        Query(0, 64, 128, 64, BF16, "fp4", True),
        Query(3, 0, 128, 64, BF16, "fp8", True),
    ]
    return result


def keys() -> list[Keys]:
    result = [
        Keys(count, dim, rope, dtype, kind, hadamard, weight)
        for count, dim, rope, weight in ((1, 128, 64, BF16), (65, 64, 64, FP32))
        for dtype in (BF16, FP32)
        for kind in ("fp4", "fp8", "bf16", "fp32")
        for hadamard in (True, False)
    ]
    result += [Keys(65, 128, 64, dtype, "fp4", True, gap=4) for dtype in (BF16, FP32)]
    result += [
        Keys(97, 128, 64, dtype, kind, bool(kind), ordinary=True) for dtype in (BF16, FP32) for kind in ("fp4", "")
    ]
    result += [
        Keys(3, 128, 0, BF16, "fp4", True),
        Keys(65, 32, 8, BF16, "fp4", True, gap=5),
        Keys(40, 256, 64, FP32, "fp8", True),
        Keys(17, 512, 64, FP32, "fp4", True),
        Keys(0, 128, 64, BF16, "fp4", True),
        Keys(0, 128, 64, BF16, "", False),
        Keys(65, 64, 16, BF16, "", False, gap=1),
    ]
    result += [
        Keys(count, dim, 0, dtype, kind, hadamard, None, 2)
        for count, dim, hadamard in ((3, 128, True), (65, 32, False))
        for dtype in (BF16, FP32)
        for kind in ("fp4", "fp8", "bf16", "fp32")
    ]
    result += [Keys(0, 128, 0, BF16, "fp4", False, None)]
    return result


def name_of(case: Query | Keys) -> str:
    parts = [str(getattr(case, field.name)).removeprefix("torch.") for field in fields(case)]
    return "-".join((type(case).__name__.lower(), *parts))


CASES = {name_of(case): case for case in [*queries(), *keys()]}


def page_memory(layout: IndexLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(five pages, the whole allocation): 0xEE on both sides, between the pages, and in them."""
    stride = layout.page_bytes + 80
    memory = torch.full((GUARD + 5 * stride + GUARD,), 0xEE, dtype=torch.uint8)
    return pages_in(memory, layout), memory


def pages_in(memory: torch.Tensor, layout: IndexLayout) -> torch.Tensor:
    stride = layout.page_bytes + 80
    return memory[GUARD:-GUARD].view(5, stride)[:, : layout.page_bytes]


# ---- the oracle ---------------------------------------------------------------------------------------------------


def norm_in_order(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The reference's norm, its sum spelled out as torch adds on x86: 4 accumulators of 8 numbers, then the
    accumulators, then their numbers."""
    value = x.float()
    squares = value.square().unflatten(1, (x.shape[1] // 32, 4, 8))
    sums = functools.reduce(torch.add, squares.unbind(1))
    total = functools.reduce(torch.add, functools.reduce(torch.add, sums.unbind(1)).unbind(1))
    # numpy's root is the correctly rounded one
    with np.errstate(all="ignore"):
        factor = np.float32(1.0) / np.sqrt((total / x.shape[1] + eps).numpy())
    return (value * torch.from_numpy(factor).unsqueeze(1) * weight).to(x.dtype)


def expected_keys(case: Keys) -> torch.Tensor:
    given = case.inputs
    if not case.weight:
        return given["keys"]
    vectors = norm_in_order(given["pooled"].to(case.dtype), given["norm_weight"], given["eps"])
    return apply_rotary(vectors, given["cos"], given["sin"])


def expected(case: Query | Keys) -> list[torch.Tensor]:
    """What the call gives, or the allocation around the pages after it."""
    if isinstance(case, Query):
        values, scales = reference.quantize_index_query(*case.inputs, case.layout)
        return [values] if scales is None else [values, scales]
    if case.layout is None:
        return [expected_keys(case)]
    pages, memory = page_memory(case.layout)
    slots = case.inputs["slots"]
    slots = slots.masked_fill(slots >= 5 * 64, -1)
    # rotated here, so that what is compared is not one function with itself
    keys = rotate(expected_keys(case)) if case.hadamard else expected_keys(case)
    reference.write_index_keys(keys, pages, slots, dataclasses.replace(case.layout, hadamard=False))
    return [memory]


def agree(case: Query | Keys, got: list[torch.Tensor]) -> None:
    """The same bytes. Only NaN are not compared by their bits, nor the signs of FP4 zeros that stand for one: which NaN
    an operation gives is the processor's choice."""
    wanted = expected(case)
    if isinstance(case, Query) or case.layout is None:
        kind = case.kind or ("bf16" if case.dtype == BF16 else "fp32")
        parts = [(one(kind, *wanted), one(kind, *got))]
        assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in wanted]
    else:
        parts, layout = [], case.layout
        for memory in (*wanted, *got):
            pages = pages_in(memory, layout)
            size = 64 * layout.data_row_bytes
            scales = pages[:, size:].reshape(5, 64, -1) if layout.scale_row_bytes else None
            parts.append(one(case.kind, pages[:, :size].reshape(5, 64, -1), scales))
            rest = memory.clone()
            pages_in(rest, layout).zero_()
            parts[-1] += (rest,)
        parts = [tuple(parts)]
    for reference_bytes, own_bytes in parts:
        for index, (a, b) in enumerate(zip(reference_bytes, own_bytes, strict=True)):
            different = (a != b).nonzero()
            assert a.shape == b.shape
            assert not len(different), f"part {index}: {len(different)} bytes, the first at {different[0].tolist()}"


def one(kind: str, values: torch.Tensor, scales: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Bytes to compare: one NaN for all."""
    data = values.contiguous().view(torch.uint8)
    if kind == "fp4":
        assert scales is not None
        broken = (scales == 255).repeat_interleave(16, -1)
        assert not (data[broken] & 0x77).any()
        return data.masked_fill(broken, 0), scales
    if kind == "fp8":
        assert scales is not None
        scales = scales.contiguous().view(FP32).clone()
        scales[scales.isnan()] = torch.nan
        return torch.where((data & 0x7F) == 0x7F, 0x7F, data), scales.view(torch.uint8)
    numbers = data.view(BF16 if kind == "bf16" else FP32).clone()
    numbers[numbers.isnan()] = torch.nan
    return (numbers.view(torch.uint8),)


def call(module: Any, case: Query | Keys, device: str = "cpu") -> list[torch.Tensor]:
    """What the case gives in a back end, on the host. Inputs keep their strides."""
    if isinstance(case, Query):
        q, cos, sin = (moved(x, device) for x in case.inputs)
        values, scales = module.quantize_index_query(q, cos, sin, case.layout)
        return [values.cpu()] if scales is None else [values.cpu(), scales.cpu()]
    given = {name: moved(value, device) for name, value in case.inputs.items()}
    if case.layout is None:
        return [module.index_key_vectors(**given).cpu()]
    memory = page_memory(case.layout)[1].to(device)
    write = module.write_pooled_index_keys if case.weight else module.write_index_keys
    write(pages=pages_in(memory, case.layout), **given)
    return [memory.cpu()]


def moved(x: Any, device: str) -> Any:
    if not isinstance(x, torch.Tensor) or device == "cpu":
        return x
    if not x.numel():
        return x.to(device)
    size = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((size,), (1,)).to(device).as_strided(x.shape, x.stride())
