"""The portable index keys and queries: under Triton's interpreter byte for byte against the reference, their machine
code for every architecture, and the same cases on any CUDA device."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tetrad.formats.hadamard import rotate
from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.backends import Problem, offers
from tetrad.ops.index_keys import reference
from tetrad.ops.rotary import apply_rotary
from tetrad.ops.row_invariant import rms_norm
from tetrad.platforms import Platform

pytest.importorskip("triton")

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
        return IndexLayout(IndexDtype(self.kind), self.dim) if self.kind else None

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
            slots = torch.randperm(4 * 64, generator=generator)[: self.count] + 64
            # the first of them is stored in the first slot of all, the last one in the last
            slots[:1], slots[-1:] = 0, 5 * 64 - 1
            for index, slot in ((1, -1), (2, 5 * 64), (7, -(2**40)), (8, 2**40), (9, 5 * 64 + 63)):
                if index < self.count - 1:
                    slots[index] = slot
            given["slots"], given["layout"] = slots, self.layout
        if self.weight:
            given["hadamard"] = self.hadamard
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
    result += [Keys(97, 128, 64, dtype, kind, True, ordinary=True) for dtype in (BF16, FP32) for kind in ("fp4", "")]
    result += [
        Keys(3, 128, 0, BF16, "fp4", True),
        Keys(65, 32, 8, BF16, "fp4", True, gap=5),
        Keys(40, 256, 64, FP32, "fp8", True),
        Keys(17, 512, 64, FP32, "fp4", True),
        Keys(0, 128, 64, BF16, "fp4", True),
        Keys(0, 128, 64, BF16, "", True),
        Keys(65, 64, 16, BF16, "", False, gap=1),
    ]
    result += [
        Keys(count, dim, 0, dtype, kind, False, None, 2)
        for count, dim in ((3, 128), (65, 32))
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
    vectors = apply_rotary(vectors, given["cos"], given["sin"])
    return rotate(vectors) if case.hadamard else vectors


def expected(case: Query | Keys) -> list[torch.Tensor]:
    """What the call gives, or the allocation around the pages after it."""
    if isinstance(case, Query):
        values, scales = reference.quantize_index_query(*case.inputs, IndexDtype(case.kind), hadamard=case.hadamard)
        return [values] if scales is None else [values, scales]
    if case.layout is None:
        return [expected_keys(case)]
    pages, memory = page_memory(case.layout)
    slots = case.inputs["slots"]
    slots = slots.masked_fill(slots >= 5 * 64, -1)
    reference.write_index_keys(expected_keys(case), pages, slots, case.layout)
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
        values, scales = module.quantize_index_query(q, cos, sin, IndexDtype(case.kind), hadamard=case.hadamard)
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


def test_the_order_of_the_sum():
    """That torch adds the squares of a norm in the order that the oracle spells out, as the kernel does."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("torch adds in another order on processors with other vectors")
    for case in keys():
        if case.weight:
            given = case.inputs
            x = given["pooled"].to(case.dtype)
            wanted = rms_norm(x, given["norm_weight"], given["eps"])
            got = norm_in_order(x, given["norm_weight"], given["eps"])
            assert torch.equal(got.isnan(), wanted.isnan())
            assert torch.equal(got.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0)), name_of(case)


# ---- under the interpreter ----------------------------------------------------------------------------------------

INTERPRETED = """
import sys

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.ops.test_index_keys_triton import CASES, call
from tetrad.ops.index_keys import triton as portable

convert_float = interpreter._convert_float
apply_reduction = interpreter.ReduceOps.apply_impl


def convert(data, source, target, rounding):
    # as the devices do; the interpreter's own cuts digits off, and takes subnormal numbers for others
    if (source, target) == (tl.float32, tl.bfloat16):
        return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()
    if (source, target) == (tl.bfloat16, tl.float32):
        return (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32)
    return convert_float(data, source, target, rounding)


def reduce(self, values):
    # one element at a time otherwise
    if self.combine_fn == tl.standard._xor_combine:
        x = values[0]
        result = np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(result, x.dtype)
    return apply_reduction(self, values)


interpreter._convert_float = convert
interpreter.ReduceOps.apply_impl = reduce
np.seterr(all="ignore")
results = {name: call(portable, case) for name, case in CASES.items()}

# two pages more than 2^31 bytes apart
case = CASES[sys.argv[2]]
memory = torch.empty(2**31 + 2**20, dtype=torch.uint8)
pages = memory.as_strided((2, case.layout.page_bytes), (2**31 + 16, 1))
pages[:] = 0xEE
given = case.inputs | {"slots": torch.arange(64, 64 + case.count)}
portable.write_pooled_index_keys(pages=pages, **given)
results["far"] = [pages.clone()]
torch.save(results, sys.argv[1])
"""


def run(program: str, *arguments: str, **environment: str) -> str:
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


FAR = next(case for case in keys() if case.kind == "fp4" and case.count == 3)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, list[torch.Tensor]]:
    """The results of every case, from one process."""
    path = str(tmp_path_factory.mktemp("interpreted") / "results")
    run(INTERPRETED, path, name_of(FAR), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    return torch.load(path)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, interpreted):
    """Queries of a decode step and keys of a prefill must have the bytes that they have on every other device: one bit
    of a 4-bit key is half its value. Gaps between rows, heads and pages hold NaN and 0xEE."""
    agree(CASES[name], interpreted[name])


def test_pages_far_apart(interpreted):
    """A cache is larger than 2^31 bytes, where 32-bit addresses would turn back."""
    layout = FAR.layout
    assert layout is not None
    wanted = torch.full((2, layout.page_bytes), 0xEE, dtype=torch.uint8)
    reference.write_index_keys(expected_keys(FAR), wanted, torch.arange(64, 64 + FAR.count), layout)
    assert torch.equal(interpreted["far"][0], wanted)


# ---- machine code -------------------------------------------------------------------------------------------------

COMPILED = """
import json, re, subprocess, sys, tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.index_keys import triton as portable

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ELEMENTS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
results = {}
for arch, *target, op, dtype, kind, dim in json.loads(sys.argv[1]):
    key, dtype, kind = f"{arch}-{op}-{dtype}-{kind}-D{dim}", getattr(torch, dtype), IndexDtype(kind)
    layout, none = IndexLayout(kind, dim), {}
    if op == "query":
        kernel = portable.index_query_kernel
        constants = portable.query_constants(arch, dtype, kind, 64, dim, 64, hadamard=True)
        signature = {"q": ELEMENTS[dtype], "cos": "*fp32", "sin": "*fp32", "values": "*u8", "scales": "*u8",
                     "vectors": "i32", "row_stride": "i32", "head_stride": "i32"}
        if not layout.scale_row_bytes:
            signature["scales"], none["scales"] = "constexpr", None
    else:
        kernel = portable.index_key_kernel
        constants = portable.key_constants(arch, torch.float32, dtype, layout, 64, hadamard=True)
        signature = {"source": "*fp32", "weight": ELEMENTS[dtype], "cos": "*fp32", "sin": "*fp32", "slots": "*i64",
                     "target": "*u8", "eps": "fp32", "count": "i32", "end": "i32", "source_stride": "i32",
                     "target_stride": "i32"}
    signature |= {"cos_stride": "i32", "sin_stride": "i32"}
    options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, kind) in enumerate(signature.items())
               if kind.startswith("*") or name.endswith("stride")}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=none | constants, attrs=aligned)
    built = triton.compile(source, target=GPUTarget(*target), options=options)
    if "cubin" in built.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            done = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True)
        usage = dict(re.findall(r"(REG|STACK):([0-9]+)", done.stdout + done.stderr))
        registers, stack = int(usage["REG"]), int(usage["STACK"])
        text = built.asm["ptx"]
        fused = len(re.findall(r"fma[.]rn[.]f32", text))
        approximate = re.findall(r"[a-z]+[.](?:approx|full|ftz)[^ ]*", text)
    else:
        text = built.asm["amdgcn"]
        counts = dict(re.findall(r"[.](vgpr_count|vgpr_spill_count|private_segment_fixed_size):\\s+([0-9]+)", text))
        registers = int(counts["vgpr_count"])
        stack = int(counts["vgpr_spill_count"]) + int(counts["private_segment_fixed_size"])
        fused = len(re.findall(r"v_(?:fma|fmac|mad|mac)_f32", text)) + 2 * len(re.findall(r"v_pk_fma_f32", text))
        approximate = [] if re.search(r"denorm_mode_32 3", text) else ["flushes"]
    threads = options["num_warps"] * target[2]
    results[key] = {"registers": registers, "stack": stack, "shared": built.metadata.shared, "fused": fused,
                    "approximate": approximate, "channels": dim * constants["VECTORS"] // threads}
print(json.dumps(results))
"""

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
BUILDS = [(arch, op, "bfloat16", "fp4", 128) for arch in TARGETS for op in ("query", "key")]
BUILDS += [(arch, op, "bfloat16", "fp8", 128) for arch, op in (("sm_80", "query"), ("gfx942", "key"))]
BUILDS += [("sm_90", "query", "float32", "fp4", 128), ("sm_120", "query", "bfloat16", "bf16", 64)]
BUILDS += [("gfx950", "key", "float32", "fp32", 32), ("sm_90", "query", "bfloat16", "fp4", 256)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    builds = [(arch, *TARGETS[arch], *rest) for arch, *rest in BUILDS]
    return json.loads(run(COMPILED, json.dumps(builds), TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))))


@pytest.mark.parametrize(("arch", "op", "dtype", "kind", "dim"), BUILDS)
def test_machine_code(arch, op, dtype, kind, dim, compiled):
    """A vector stays in registers all the way. No division or root is approximate, no subnormal number is flushed, and
    no product and sum are fused but those that are written so: the others would round once where the reference rounds
    twice."""
    built = compiled[f"{arch}-{op}-{dtype}-{kind}-D{dim}"]
    assert built["stack"] == 0
    assert built["registers"] <= (128 if dim <= 128 else 208)
    assert built["shared"] <= 2048
    assert built["approximate"] == []
    # three for every FP4 code, one in every Hadamard pass between threads
    passes = 2 if (op, dtype) == ("query", "bfloat16") else 3
    written = built["channels"] * (passes + (3 if kind == "fp4" else 0))
    if not (arch.startswith("gfx") and op == "key"):
        # the root and the division of a key are made of fused operations on AMD's
        assert built["fused"] <= written


# ---- who serves what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "dim", "served"),
    [
        ("sm_80", 128, True),
        ("sm_120", 32, True),
        ("gfx942", 512, True),
        ("gfx950", 64, True),
        ("sm_75", 128, False),
        ("sm_90", 16, False),
        ("sm_90", 96, False),
        ("sm_90", 1024, False),
        ("cpu", 128, False),
    ],
)
def test_offers(arch, dim, served, all_proven):
    device = Platform("cpu" if arch == "cpu" else "cuda", arch, "test")
    given = offers("index_keys", device, Problem("fp4", dim, 64))
    assert [offer.name for offer in given] == ["triton", "reference"]
    assert given[0].supported is served
    assert given[0].reason


# ---- on the device ------------------------------------------------------------------------------------------------


def on_cuda(test):
    """Its twin under the interpreter runs everywhere."""
    test = pytest.mark.usefixtures("all_proven")(test)
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@on_cuda
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_on_the_device(name):
    from tetrad.ops.index_keys import triton as portable

    agree(CASES[name], call(portable, CASES[name], "cuda"))


@on_cuda
def test_prefill_on_the_device():
    """Many programs at once, twenty times: the same bytes."""
    from tetrad.ops.index_keys import triton as portable

    case = Query(4099, 64, 128, 64, BF16, "fp4", True)
    first = call(portable, case, "cuda")
    agree(case, first)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(call(portable, case, "cuda"), first, strict=True))


@on_cuda
@pytest.mark.parametrize("kind", ["fp4", "fp8", "bf16", "fp32"])
def test_captured_on_the_device(kind):
    """A graph that synchronised could not be captured, and one that kept the slots of its capture would write the keys
    of one step over those of another."""
    from tetrad.ops import index_keys

    case, other = (Keys(count, 128, 64, BF16, kind, True) for count in (65, 66))
    query = Query(7, 64, 128, 64, BF16, kind, True)
    assert case.layout is not None
    given = {name: moved(value, "cuda") for name, value in case.inputs.items()}
    memory = page_memory(case.layout)[1].cuda()
    q = [moved(x, "cuda") for x in query.inputs]

    def step() -> tuple[torch.Tensor, torch.Tensor | None]:
        index_keys.write_pooled_index_keys(pages=pages_in(memory, case.layout), **given)
        return index_keys.quantize_index_query(*q, kind)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scales = step()
    for inputs in (case.inputs, {name: x[:65] if name == "slots" else x for name, x in other.inputs.items()}):
        given["slots"].copy_(inputs["slots"])
        memory.fill_(0xEE)
        values.view(torch.uint8).zero_()
        graph.replay()
        changed = Keys(65, 128, 64, BF16, kind, True)
        changed.inputs["slots"] = inputs["slots"]
        agree(changed, [memory.cpu()])
        agree(query, [x.cpu() for x in (values, scales) if x is not None])
