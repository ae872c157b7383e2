"""The portable index keys and queries: under Triton's interpreter byte for byte against the reference, their machine
code for every architecture, and the same cases on any CUDA device."""

from __future__ import annotations

import json
import platform

import pytest
import torch
from tests.ops.index_key_trials import (
    BF16,
    CASES,
    Keys,
    Query,
    agree,
    call,
    expected_keys,
    keys,
    moved,
    name_of,
    norm_in_order,
    page_memory,
    pages_in,
)
from tests.ops.triton_process import TARGETS, on_cuda, run

from tetrad.ops.backends import Problem, support
from tetrad.ops.index_keys import reference
from tetrad.ops.row_invariant import rms_norm
from tetrad.platforms import Platform

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")


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

from tests.ops.index_key_trials import CASES, call
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
import json, re, sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tetrad.geometry import IndexDtype, IndexLayout
from tests.ops.triton_process import resources
from tetrad.ops.index_keys import triton as portable

ELEMENTS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
results = {}
for arch, *target, op, dtype, kind, dim in json.loads(sys.argv[1]):
    key, dtype, kind = f"{arch}-{op}-{dtype}-{kind}-D{dim}", getattr(torch, dtype), IndexDtype(kind)
    layout, none = IndexLayout(kind, dim), {}
    if op == "query":
        kernel = portable.index_query_kernel
        constants = portable.query_constants(arch, dtype, layout, 64, 64)
        signature = {"q": ELEMENTS[dtype], "cos": "*fp32", "sin": "*fp32", "values": "*u8", "scales": "*u8",
                     "vectors": "i32", "row_stride": "i32", "head_stride": "i32"}
        if not layout.scale_row_bytes:
            signature["scales"], none["scales"] = "constexpr", None
    else:
        kernel = portable.index_key_kernel
        constants = portable.key_constants(arch, torch.float32, dtype, layout, 64)
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
    registers, stack = resources(built)
    if "cubin" in built.asm:
        text = built.asm["ptx"]
        fused = len(re.findall(r"fma[.]rn[.]f32", text))
        approximate = re.findall(r"[a-z]+[.](?:approx|full|ftz)[^ ]*", text)
    else:
        text = built.asm["amdgcn"]
        fused = len(re.findall(r"v_(?:fma|fmac|mad|mac)_f32", text)) + 2 * len(re.findall(r"v_pk_fma_f32", text))
        approximate = [] if re.search(r"denorm_mode_32 3", text) else ["flushes"]
    threads = options["num_warps"] * target[2]
    results[key] = {"registers": registers, "stack": stack, "shared": built.metadata.shared, "fused": fused,
                    "approximate": approximate, "channels": dim * constants["VECTORS"] // threads}
print(json.dumps(results))
"""

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
    given = support("index_keys", device, Problem("fp4", dim, 64))
    assert [answer.name for answer in given] == ["triton", "reference"]
    assert given[0].supported is served
    assert given[0].reason


# ---- on the device ------------------------------------------------------------------------------------------------


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
        return index_keys.quantize_index_query(*q, query.layout)

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
