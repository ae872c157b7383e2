"""The portable scorer with several rows of one request at once: every score must have the bits that it has alone."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tests.ops.indexer_cases import IndexerCase, bits, make_case
from tests.ops.indexer_trials import MIXED, PREFILL, Trial, check, trials
from tests.ops.test_indexer_logits_triton import COMPILED, MATRIX_UNITS, device_output, to_device
from tests.ops.triton_process import TARGETS, on_cuda, run

from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops import backends, indexer_logits, plan_indexer

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

# ---- under the interpreter ----------------------------------------------------------------------------------------

INTERPRETED = '''
import sys

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.ops.indexer_cases import decode_vectors, poisoned_output
from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.indexer_logits import triton as portable
from tetrad.ops.plan_indexer import IndexerPlan, reference
from tetrad.ops.plan_indexer import triton as planner


def by_pairs(a, b):
    """fp32 [M, N], each of its own row and column alone, as tensor cores have it. A library's product in fp32 is not
    so; in fp64 next to no sum of these numbers is rounded."""
    with np.errstate(invalid="ignore", over="ignore"):
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


def create_dot(self, a, b, d, *rest):
    product = by_pairs(a.data, b.data)
    products.append(product.shape)
    return TensorHandle(product + d.data, d.dtype.scalar)


def dot_scaled(a, a_scale, a_format, b, b_scale, b_format, acc):
    """What the operation is defined to be; the interpreter of this Triton has none."""
    keys = decode_vectors(a.handle.data, a_scale.handle.data, "fp4")
    queries = decode_vectors(np.ascontiguousarray(b.handle.data.T), b_scale.handle.data, "fp4")
    products.append((len(keys), len(queries)))
    return acc + tl.core.tensor(TensorHandle(by_pairs(keys, queries.T), tl.float32), acc.type)


InterpreterBuilder.create_dot = create_dot
tl.dot_scaled = dot_scaled
none = portable.FP4_UNITS, portable.FP8_UNITS
plain, plain_groups = portable.launch_constants, portable.group_constants
results = {}
for name, (arguments, dtype, head_dim, width, units, changes) in torch.load(sys.argv[1]).items():
    portable.FP4_UNITS, portable.FP8_UNITS = ({"cpu"}, {"cpu"}) if units else none
    plain.cache_clear()
    plain_groups.cache_clear()
    for_one = {name: value for name, value in changes.items() if name in ("LOW", "HEAD_TILE")}
    portable.launch_constants = lambda *problem: plain(*problem) | for_one
    portable.group_constants = lambda *problem: plain_groups(*problem) | changes
    layout = IndexLayout(IndexDtype(dtype), head_dim)
    rows = arguments[0].shape[0]
    # few slots, so that a unit has several blocks
    buffer, schedule = (torch.empty((rows + spare, 4), dtype=torch.int32) for spare in (3, 7))
    planner.plan_indexer(*arguments[-2:], buffer, width=width, schedule=schedule)
    plan = IndexerPlan(buffer, rows, width, schedule=schedule, schedule_of=planner.SCHEDULE_OF)
    foreign = IndexerPlan(buffer, rows, width, schedule=torch.full_like(schedule, 2**30), schedule_of="sm90")
    outs = []
    for given in (plan, foreign):
        products = []
        out, memory = poisoned_output(rows, width, 64)
        portable.indexer_logits(*arguments, out, layout=layout, plan=given)
        outs += [out, memory, max((vectors for _, vectors in products), default=0)]
    results[name] = outs
torch.save(results, sys.argv[2])
'''

WAYS = {"": {}, "/four": {"ROWS": 4, "INNER": 1}, "/wide": {"ROWS": 4, "INNER": 2, "LOW": 32, "HEAD_TILE": 64}}
"""Rows that go together and how they lie in a product: as on most GPUs of NVIDIA, on Hopper, and as on those of AMD."""


def decode(rows: int) -> list[list[int]]:
    """Requests with as many rows each, of which every one sees one entry more than the row before."""
    return [[length + row for row in range(rows)] for length in (62, 1, 254)]


HOSTILE = ["edges-of-scales", "zero-groups", "broken-query", "fp4-broken-keys", "fp8-broken-keys", "odd-fp8-scales",
           "poison-behind", "nothing-1-3", "nothing-0-5", "units-edges-of-scales", "units-fp8-spread-31"]  # fmt: skip


def grouped() -> dict[str, tuple[Trial, dict]]:
    """Trials in which some rows share their pages, and ways to score them."""
    result: dict[str, tuple[Trial, dict]] = {name: (trials()[name], {}) for name in HOSTILE}
    for rows in (1, 2, 3, 5):
        result[f"decode-{rows}"] = (Trial(make_case("fp4", 3, 32, decode(rows), seed=rows, padding=rows // 2)), {})
    for dtype, heads, way in (("fp4", 64, ""), ("fp4", 64, "/four"), ("fp4", 64, "/wide"), ("fp8", 33, "/four"),
                              ("bf16", 16, ""), ("bf16", 16, "/wide")):  # fmt: skip
        ends = [list(range(252, 263)), *MIXED[3:6]]
        result[f"{dtype}-H{heads}{way}"] = (Trial(make_case(dtype, heads, 64, ends, padding=2)), WAYS[way])
    return result


GROUPED = grouped()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Of every trial (out, the allocation around it, the most query vectors of a product), in groups and row by row."""
    folder = tmp_path_factory.mktemp("interpreted")
    given = {}
    for name, (trial, changes) in GROUPED.items():
        case = trial.case
        given[name] = (case.arguments, case.dtype, case.head_dim, case.width, trial.units, changes)
    torch.save(given, folder / "trials")
    run(INTERPRETED, str(folder / "trials"), str(folder / "results"), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    return torch.load(folder / "results")


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_scores_as_its_rows_do(name, interpreted):
    """The same bits as row by row, from a plan whose schedule is another back end's, and right ones. Rows of a group
    see different ends: behind each stands what no row may read, and what no row may write over."""
    out, memory, together, out_alone, memory_alone, alone = interpreted[name]
    check(GROUPED[name][0].case, out, memory)
    assert torch.equal(bits(out), bits(out_alone))
    assert torch.equal(bits(memory), bits(memory_alone))
    if "decode" in name:
        # where every request has one row, the kernel for one row is the faster one
        assert together == (1 if name == "decode-1" else 2) * alone


# ---- machine code -------------------------------------------------------------------------------------------------

BUILDS = [(arch, "fp4", 64, 128) for arch in TARGETS]
BUILDS += [(arch, "fp8", 64, 128) for arch in ("sm_90", "sm_100", "gfx942")]
BUILDS += [(arch, "bf16", 64, 128) for arch in ("sm_80", "sm_90", "gfx950")]
BUILDS += [("sm_80", "fp4", 1, 32), ("sm_90", "bf16", 3, 16)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    builds = [(arch, *TARGETS[arch], *rest, True) for arch, *rest in BUILDS]
    return json.loads(run(COMPILED, json.dumps(builds), TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))))


@pytest.mark.parametrize(("arch", "dtype", "heads", "dim"), BUILDS)
def test_machine_code(arch, dtype, heads, dim, compiled):
    """The same tensor cores as for one row, and nothing that spills. Registers are no bound of their own with eight
    warps: from 129 to 255 one program fits on a multiprocessor."""
    built = compiled[f"{arch}-{dtype}-H{heads}-D{dim}"]
    assert built["stack"] <= 16
    assert built["shared"] <= (100 if arch in ("sm_90", "sm_100") else 64) * 1024
    wanted = MATRIX_UNITS[arch]["bf16" if dtype == "fp4" and dim < 64 else dtype]
    assert built["mma"]
    assert all(re.search(wanted, instruction) for instruction in built["mma"])


# ---- on the device ------------------------------------------------------------------------------------------------


def device_scores(case: IndexerCase, planner: str, slots: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, the allocation around it) of the Triton scorer with a plan of ``planner``, on the host."""
    from tetrad.ops.indexer_logits import triton as portable

    arguments, (out, memory) = to_device(case), device_output(case)
    buffer = torch.empty((slots or max(512, len(out)), 4), dtype=torch.int32, device="cuda")
    with backends.forced_backends({"plan_indexer": planner}):
        plan = plan_indexer(*arguments[-2:], width=case.width, out=buffer)
    layout = IndexLayout(IndexDtype(case.dtype), case.head_dim)
    portable.indexer_logits(*arguments, out, layout=layout, plan=plan)
    return out.cpu(), memory.cpu()


@on_cuda
@pytest.mark.parametrize("name", [name for name, (trial, _) in GROUPED.items() if not trial.units])
def test_a_group_scores_as_its_rows_do_on_the_device(name):
    """Products of another size and sums in another layout: the same bits all the same."""
    case = GROUPED[name][0].case
    out, memory = device_scores(case, "triton")
    check(case, out, memory, relative=1e-3 if case.dtype == "fp8" else 4e-6)
    out_alone, memory_alone = device_scores(case, "reference")
    assert torch.equal(bits(out), bits(out_alone))
    assert torch.equal(bits(memory), bits(memory_alone))


@on_cuda
@pytest.mark.parametrize("dtype", ["fp4", "fp8", "bf16"])
@pytest.mark.parametrize("heads", [8, 32, 64])
def test_real_sizes_on_the_device(dtype, heads):
    """A prefill beside decodes, alone and together, twenty times."""
    ends = [list(range(1200, 1337)), *decode(1), *decode(2), *decode(4), *PREFILL, [0, 0], [5]]
    case = make_case(dtype, heads, 128, ends, padding=3)
    expected, _ = device_scores(case, "reference")
    for _ in range(20):
        assert torch.equal(bits(device_scores(case, "triton")[0]), bits(expected))
    for row in (0, 1, 100, 137, 141, 150):
        alone = device_scores(case.rows([row]), "reference", 1)[0][0]
        assert torch.equal(bits(alone), bits(expected[row]))
    some = list(range(30, 61)) + list(range(139, 160))
    assert torch.equal(bits(device_scores(case.rows(some), "triton")[0]), bits(expected[some]))


@on_cuda
@pytest.mark.parametrize("planner", ["triton", "reference"])
def test_the_ops_work_together_on_the_device(planner):
    """Whichever back end plans, whichever scores."""
    case = make_case("fp4", 64, 128, [[600, 601], [513, 514, 515], [40]], padding=1)
    arguments = to_device(case)
    scorers = ["triton", *(["sm90"] if torch.cuda.get_device_capability() == (9, 0) else [])]
    for scorer in scorers:
        with backends.forced_backends({"plan_indexer": planner, "indexer_logits": scorer}):
            plan = plan_indexer(*arguments[-2:], width=case.width)
            out, memory = device_output(case)
            indexer_logits(*arguments, width=case.width, plan=plan, out=out)
            check(case, out.cpu(), memory.cpu(), relative=1e-3 if scorer == "sm90" else 4e-6)
