"""The portable scorer: under Triton's interpreter against fp64 on the stored values, its machine code for every
architecture, and the same cases on any CUDA device."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from tests.ops.indexer_cases import IndexerCase, bits, make_case, poisoned_output
from tests.ops.indexer_trials import GUARD, Trial, check, trials
from tests.ops.triton_process import TARGETS, on_cuda, run

from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops import plan_indexer
from tetrad.ops.backends import Problem, support
from tetrad.platforms import Platform

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

# ---- under the interpreter ----------------------------------------------------------------------------------------

INTERPRETED = '''
import sys

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tests.ops.indexer_cases import decode_vectors, poisoned_output
from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops import plan_indexer
from tetrad.ops.indexer_logits import triton as portable


def dot_scaled(a, a_scale, a_format, b, b_scale, b_format, acc):
    """What the operation is defined to be; the interpreter of this Triton has none."""
    assert (a_format, b_format) == ("e2m1", "e2m1")
    assert acc.handle.data.shape == (128, b.handle.data.shape[1])
    keys = decode_vectors(a.handle.data, a_scale.handle.data, "fp4")
    queries = decode_vectors(np.ascontiguousarray(b.handle.data.T), b_scale.handle.data, "fp4")
    assert np.isfinite(keys).all() and np.isfinite(queries).all()
    with np.errstate(over="ignore"):
        product = (keys @ queries.T).astype(np.float32)
    return acc + tl.core.tensor(TensorHandle(product, tl.float32), acc.type)


tl.dot_scaled = dot_scaled
none = portable.FP4_UNITS, portable.FP8_UNITS
results = {}
for name, (arguments, dtype, head_dim, width, slots, units) in torch.load(sys.argv[1]).items():
    portable.FP4_UNITS, portable.FP8_UNITS = ({"cpu"}, {"cpu"}) if units else none
    portable.launch_constants.cache_clear()
    rows = arguments[0].shape[0]
    out, memory = poisoned_output(rows, width, 64)
    buffer = torch.empty((slots or rows + 3, 4), dtype=torch.int32)
    plan = plan_indexer(*arguments[-2:], width=width, out=buffer)
    layout = IndexLayout(IndexDtype(dtype), head_dim)
    portable.indexer_logits(*arguments, out, layout=layout, plan=plan)
    results[name] = out, memory
torch.save(results, sys.argv[2])
'''


INVARIANCE = ["fp4-H64-D128", "fp8-H64-D128", "bf16-H64-D128", "fp32-H64-D128", "edges-of-scales", "fp8-spread-31"]


def regrouped() -> dict[str, Trial]:
    """The same rows backwards and with another plan, and some of them alone."""
    result: dict[str, Trial] = {}
    for name in INVARIANCE:
        case = trials()[name].case
        rows = list(range(case.q.shape[0]))
        result[f"{name}/backwards"] = Trial(case.rows(rows[::-1]), slots=3 * len(rows))
        for row in rows[:3]:
            result[f"{name}/{row}"] = Trial(case.rows([row]), slots=1)
    return result


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(out, the allocation around it) of every trial, from one process."""
    folder = tmp_path_factory.mktemp("interpreted")
    given = {
        name: (
            trial.case.arguments,
            trial.case.dtype,
            trial.case.head_dim,
            trial.case.width,
            trial.slots,
            trial.units,
        )
        for name, trial in (trials() | regrouped()).items()
    }
    torch.save(given, folder / "trials")
    run(INTERPRETED, str(folder / "trials"), str(folder / "results"), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    return torch.load(folder / "results")


@pytest.mark.parametrize("name", trials())
def test_equals_fp64(name, interpreted):
    """Every byte that no row sees is NaN, every table entry behind an end is out of range: reading one would show, or
    crash. The scores that fp32 holds must be those of the stored values, whatever the scales."""
    check(trials()[name].case, *interpreted[name])


@pytest.mark.parametrize("name", INVARIANCE)
def test_rows_do_not_depend_on_the_others(name, interpreted):
    """A score with other bits in another step flips a near-tie of the top-k, and a token with it."""
    expected, _ = interpreted[name]
    backwards, _ = interpreted[f"{name}/backwards"]
    assert torch.equal(bits(backwards.flip(0)), bits(expected))
    for row in range(3):
        assert torch.equal(bits(interpreted[f"{name}/{row}"][0][0]), bits(expected[row]))


def test_what_lies_behind_the_end_changes_no_bit(interpreted):
    assert torch.equal(bits(interpreted["poison-behind"][0]), bits(interpreted["stale-behind"][0]))


def test_shared_pages_score_alike(interpreted):
    out, _ = interpreted["shared-pages"]
    assert torch.equal(bits(out[0, :128]), bits(out[1, :128]))
    assert not torch.equal(out[0, 128:150], out[1, 128:150])


def test_scales_that_only_fit_together(interpreted):
    assert interpreted["only-fit-together"][0].item() == 64.0


def test_an_infinite_key_stays_infinite(interpreted):
    out, _ = interpreted["infinite-key"]
    assert out[0, 5] == float("inf")
    assert out[0, :5].isfinite().all()


# ---- machine code -------------------------------------------------------------------------------------------------

COMPILED = """
import json, re, sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tetrad.geometry import IndexDtype
from tests.ops.triton_process import resources
from tetrad.ops.indexer_logits import triton as portable

results = {}
for arch, *target, dtype, heads, head_dim, grouped in json.loads(sys.argv[1]):
    choose = portable.group_constants if grouped else portable.launch_constants
    constants = dict(choose(arch, IndexDtype(dtype), heads, head_dim))
    options = {name: constants.pop(name) for name in ("num_warps", "maxnreg") if name in constants}
    element = {"fp4": "*u8", "fp8": "*u8", "bf16": "*bf16", "fp32": "*fp32"}[dtype]
    signature = {"q": element, "q_scale": {"fp4": "*u8", "fp8": "*fp32"}.get(dtype, "constexpr"), "weights": "*fp32",
                 "cache": "*u8", "block_tables": "*i32", "row_request": "*i32", "visible_end": "*i32",
                 "units" if dtype != "fp32" else "plan": "*i32", "out": "*fp32",
                 "page_stride": "i32", "table_stride": "i32", "out_stride": "i32"}
    kernel, values = portable.indexer_logits_kernel, dict(constants)
    if dtype == "fp32":
        kernel = portable.indexer_logits_fp32_kernel
        del signature["q_scale"], signature["visible_end"]
    elif dtype == "bf16":
        values["q_scale"] = None
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, kind) in enumerate(signature.items())
               if kind.startswith("*") or name == "page_stride"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    built = triton.compile(source, target=GPUTarget(*target), options=options)
    registers, stack = resources(built)
    if "cubin" in built.asm:
        mma = re.findall(r"(?:tcgen05[.]mma|wgmma[.]mma_async|mma[.]sync)[^ ;]*", built.asm["ptx"])
    else:
        mma = re.findall(r"v_mfma\\w+", built.asm["amdgcn"])
    key = f"{arch}-{dtype}-H{heads}-D{head_dim}"
    results[key] = {"registers": registers, "stack": stack, "shared": built.metadata.shared, "mma": sorted(set(mma))}
print(json.dumps(results))
"""

MATRIX_UNITS = {
    "sm_80": {"fp4": r"mma\.sync.*m16n8k16.*bf16", "fp8": r"mma\.sync.*m16n8k16.*f32\.f16", "bf16": r"mma\.sync.*bf16"},
    "sm_90": {"fp4": r"wgmma.*bf16", "fp8": r"wgmma.*e4m3\.e4m3", "bf16": r"wgmma.*bf16"},
    "sm_100": {
        "fp4": r"tcgen05\.mma.*kind::mxf4\.block_scale",
        "fp8": r"tcgen05\.mma.*kind::f8f6f4",
        "bf16": r"tcgen05\.mma.*kind::f16",
    },
    "sm_120": {
        "fp4": r"mma\.sync.*kind::mxf4.*block_scale.*e2m1\.e2m1",
        "fp8": r"mma\.sync.*e4m3\.e4m3",
        "bf16": r"mma\.sync.*bf16",
    },
    "gfx942": {"fp4": r"v_mfma_f32\w*_bf16", "fp8": r"v_mfma_f32\w*_f16", "bf16": r"v_mfma_f32\w*_bf16"},
    "gfx950": {
        "fp4": r"v_mfma_scale_f32\w*f8f6f4",
        "fp8": r"v_mfma_f32\w*(f8f6f4|fp8_fp8)",
        "bf16": r"v_mfma_f32\w*_bf16",
    },
}
BUILDS = [(arch, dtype, 64, 128) for arch in TARGETS for dtype in ("fp4", "fp8", "bf16")]
BUILDS += [(arch, "fp32", 64, 128) for arch in ("sm_80", "sm_100", "gfx942")]
# the fewest heads and channels, and more heads than are multiplied at once
BUILDS += [(arch, "fp4", 3, 64) for arch in ("sm_100", "sm_120", "gfx950")]
BUILDS += [("sm_80", "fp4", 1, 32), ("sm_90", "fp8", 1, 32), ("gfx950", "fp8", 1, 32), ("sm_100", "bf16", 1, 16)]
BUILDS += [("sm_80", "fp4", 128, 128), ("sm_100", "fp4", 128, 128)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    builds = [(arch, *TARGETS[arch], *rest, False) for arch, *rest in BUILDS]
    return json.loads(run(COMPILED, json.dumps(builds), TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))))


@pytest.mark.parametrize(("arch", "dtype", "heads", "dim"), BUILDS)
def test_machine_code(arch, dtype, heads, dim, compiled):
    """The tensor cores that the architecture has for the format, and nothing that spills: a silent fall back to bf16,
    or scores that travel through memory, would cost more than the format saves."""
    built = compiled[f"{arch}-{dtype}-H{heads}-D{dim}"]
    assert built["stack"] <= 16
    assert built["registers"] <= (256 if arch.startswith("gfx") else 192)
    assert built["shared"] <= 64 * 1024
    if dtype != "fp32":
        wanted = MATRIX_UNITS[arch]["bf16" if dtype == "fp4" and (dim < 64 or heads > 64) else dtype]
        assert built["mma"]
        assert all(re.search(wanted, instruction) for instruction in built["mma"])


# ---- who serves what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "dtype", "heads", "dim", "served"),
    [
        ("sm_80", "fp4", 64, 128, True),
        ("sm_90", "bf16", 1, 16, True),
        ("sm_100", "fp4", 33, 32, True),
        ("gfx942", "fp8", 64, 256, True),
        ("gfx950", "fp32", 64, 64, True),
        ("sm_75", "fp4", 64, 128, False),
        ("sm_90", "fp8", 64, 16, False),
        ("sm_90", "fp4", 64, 96, False),
        ("sm_90", "bf16", 64, 512, False),
        ("cpu", "fp4", 64, 128, False),
    ],
)
def test_offers(arch, dtype, heads, dim, served, all_proven):
    platform = Platform("cpu" if arch == "cpu" else "cuda", arch, "test")
    given = support("indexer_logits", platform, Problem(dtype, dim, heads))
    assert [answer.name for answer in given] == ["sm90", "triton", "reference"]
    assert given[1].supported is served
    assert given[1].reason


# ---- on the device ------------------------------------------------------------------------------------------------


def to_device(case: IndexerCase) -> list:
    """The arguments on the device, pages as far apart as they were."""
    stride = case.cache.stride(0)
    pages = torch.as_strided(case.cache, (case.cache.shape[0], stride), (stride, 1)).cuda()
    q, q_scale, weights, _, *rest = (None if x is None else x.cuda() for x in case.arguments)
    return [q, q_scale, weights, pages[:, : case.cache.shape[1]], *rest]


def device_output(case: IndexerCase) -> tuple[torch.Tensor, torch.Tensor]:
    memory = poisoned_output(case.q.shape[0], case.width, GUARD)[1].cuda()
    return memory[GUARD:-GUARD].view(case.q.shape[0], case.width), memory


def device_scores(case: IndexerCase, slots: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, the allocation around it), both on the host."""
    from tetrad.ops.indexer_logits import triton as portable

    arguments, (out, memory) = to_device(case), device_output(case)
    plan = None
    if slots:
        buffer = torch.empty((slots, 4), dtype=torch.int32, device="cuda")
        plan = plan_indexer(*arguments[-2:], width=case.width, out=buffer)
    layout = IndexLayout(IndexDtype(case.dtype), case.head_dim)
    portable.indexer_logits(*arguments, out, layout=layout, plan=plan)
    return out.cpu(), memory.cpu()


@on_cuda
@pytest.mark.parametrize("name", [name for name, trial in trials().items() if not trial.units])
def test_equals_fp64_on_the_device(name):
    """FP8 tensor cores keep about 14 bits below the largest term."""
    case = trials()[name].case
    check(case, *device_scores(case), relative=1e-3 if case.dtype == "fp8" else 4e-6)


@on_cuda
@pytest.mark.parametrize("name", INVARIANCE)
def test_rows_do_not_depend_on_the_others_on_the_device(name):
    """Alone, together, in another order, with other plans, and twenty times: the same bits."""
    case = trials()[name].case
    rows = list(range(case.q.shape[0]))
    expected, _ = device_scores(case)
    for slots in (0, len(rows), 4 * len(rows), *[0] * 17):
        assert torch.equal(bits(device_scores(case, slots)[0]), bits(expected))
    assert torch.equal(bits(device_scores(case.rows(rows[::-1]))[0].flip(0)), bits(expected))
    for row in rows[::3]:
        assert torch.equal(bits(device_scores(case.rows([row]), 1)[0][0]), bits(expected[row]))


@on_cuda
@pytest.mark.parametrize("dtype", ["fp4", "fp8", "bf16", "fp32"])
def test_captured_on_the_device(dtype):
    """A graph that synchronised or allocated could not be captured, and one that kept the lengths of its capture would
    score too much or too little when it is replayed."""
    from tetrad.ops.indexer_logits import triton as portable

    case = make_case(dtype, 32, 128, [[600, 601], [513], [40]], padding=1, width=700)
    arguments, (out, memory) = to_device(case), device_output(case)
    layout, buffer = IndexLayout(IndexDtype(dtype), 128), torch.empty((64, 4), dtype=torch.int32, device="cuda")
    plan = plan_indexer(*arguments[-2:], width=case.width, out=buffer)
    portable.indexer_logits(*arguments, out, layout=layout, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan_indexer(*arguments[-2:], width=case.width, out=plan)
        portable.indexer_logits(*arguments, out, layout=layout, plan=plan)
    for ends in ([600, 601, 513, 40, 0], [1, 0, 65, 39, 0], [0, 0, 0, 0, 0], [257, 600, 2, 0, 0]):
        changed = replace(case, visible_end=torch.tensor(ends, dtype=torch.int32))
        arguments[-1].copy_(changed.visible_end)
        memory.copy_(poisoned_output(case.q.shape[0], case.width, GUARD)[1])
        graph.replay()
        check(changed, out.cpu(), memory.cpu(), relative=2e-4 if dtype == "fp8" else 4e-6)
