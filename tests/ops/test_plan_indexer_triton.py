"""The portable plan: under Triton's interpreter against plain enumerations, compiled for every architecture, and on any
CUDA device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tests.ops.test_plan_indexer import enumerate_units
from tests.ops.triton_process import TARGETS, on_cuda, run

from tetrad.ops import IndexerPlan, backends, plan_indexer
from tetrad.ops.backends import Problem, support
from tetrad.platforms import Platform

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

GROUP_ROWS = 4
BLOCK = 256

INTERPRETED = """
import sys
import torch
from tetrad.ops.plan_indexer import triton as portable

plain = portable.launch_options
results = []
for request, ends, width, slots, step, kept in torch.load(sys.argv[1]):
    portable.launch_options = lambda rows, arch: plain(rows, arch) | {"STEP": step, "KEPT": kept}
    memory = torch.full((slots + 2, 4), -999, dtype=torch.int32)
    groups = torch.full((portable.new_schedule(len(request), "cpu").shape[0] + 2, 4), -999, dtype=torch.int32)
    portable.plan_indexer(request, ends, memory[1:-1], width=width, schedule=groups[1:-1])
    alone = torch.full_like(memory, -999)
    portable.plan_indexer(request, ends, alone[1:-1], width=width)
    results.append((memory, alone, groups))
torch.save(results, sys.argv[2])
"""


def rows_of(rows: int, requests: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(request, visible end) of adjacent rows of some requests, a few of them padding with an end that is stale."""
    generator = torch.Generator().manual_seed(rows + width)
    ends = torch.randint(0, width + 1, (rows,), generator=generator).int()
    request = (torch.arange(rows) // max(1, -(-rows // requests))).int()
    request[torch.rand(rows, generator=generator) < 0.05] = -1
    return request, ends


def runs_of(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal rows, some to a request; the last row of each sees ``width``."""
    request = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    ends = torch.cat([torch.arange(width - length + 1, width + 1) for length in lengths]).int()
    return request, ends


PROBLEMS = [
    # request and ends, width, slots, rows or slots at a time, rows that are kept
    (rows_of(1, 1, 131_072), 131_072, 512, 512, 512),
    (rows_of(64, 64, 32_768), 32_768, 512, 512, 512),
    (rows_of(9, 9, 2560), 2560, 9, 8, 16),
    (rows_of(70, 5, 4000), 4000, 71, 16, 128),
    (rows_of(71, 3, 0), 0, 80, 32, 128),
    (rows_of(0, 1, 10), 10, 3, 16, 16),
    (rows_of(0, 1, 10), 10, 0, 16, 16),
    (rows_of(300, 40, 4000), 4000, 400, 64, 0),
    (rows_of(203, 1, 3000), 3000, 203, 128, 0),
    (runs_of([3, 5, 1, 2, 8, 4, 7, 13], 300), 300, 512, 4, 64),
    (runs_of([1, 40, 1], 90_000), 90_000, 42, 16, 0),
]


def groups_of(request: list[int], ends: list[int]) -> list[tuple[int, int, int]]:
    """(first row, rows, end) of up to four adjacent rows of one request each, those that see anything."""
    groups, row = [], 0
    while row < len(request):
        stop = row
        while stop < len(request) and request[stop] == request[row]:
            stop += 1
        for first in range(row, stop, GROUP_ROWS):
            rows = min(GROUP_ROWS, stop - first)
            if request[row] >= 0 and max(ends[first : first + rows]) > 0:
                groups.append((first, rows, max(ends[first : first + rows])))
        row = stop
    return groups


def check_groups(schedule: torch.Tensor, request: torch.Tensor, ends: torch.Tensor) -> None:
    """Every block of every group is in one unit: one in none is a hole in the scores, one in two is time. No unit
    costs much more than an equal share."""
    used = schedule[schedule[:, 0] >= 0].tolist()
    assert schedule[: len(used)].tolist() == used
    assert (schedule[len(used) :] == torch.tensor([-1, 0, 0, 0])).all()
    wanted = groups_of(request.tolist(), ends.tolist())
    place = 0
    for first, rows, end in wanted:
        reached = 0
        while reached < -(-end // BLOCK):
            assert used[place][:3] == [first, rows, reached]
            assert used[place][3] >= 1
            reached += used[place][3]
            place += 1
        assert reached == -(-end // BLOCK)
    assert place == len(used)
    if used:
        cost = sum(-(-end // BLOCK) * (1 + rows) for _, rows, end in wanted)
        share = cost / (len(schedule) - len(wanted))
        assert all(blocks * (1 + rows) < share + 1 + 1 + rows for _, rows, _, blocks in used)


def is_right(buffer: torch.Tensor, request: torch.Tensor, ends: torch.Tensor, width: int) -> bool:
    return buffer.tolist() == enumerate_units(request.tolist(), ends.tolist(), buffer.shape[0], width)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    torch.save([(*rows, *rest) for rows, *rest in PROBLEMS], folder / "problems")
    run(INTERPRETED, str(folder / "problems"), str(folder / "plans"), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    return torch.load(folder / "plans")


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_plan_and_schedule(number, interpreted):
    """The plan is the reference's to the last integer, with a schedule and without; the memory around it stays."""
    (request, ends), width, *_ = PROBLEMS[number]
    memory, alone, groups = interpreted[number]
    assert is_right(memory[1:-1], request, ends, width)
    assert torch.equal(memory, alone)
    check_groups(groups[1:-1], request, ends)
    for guarded in (memory, groups):
        assert (guarded[0] == -999).all()
        assert (guarded[-1] == -999).all()


# ---- machine code -------------------------------------------------------------------------------------------------

COMPILED = """
import json, sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.ops.triton_process import resources
from tetrad.ops.plan_indexer import triton as portable

results = {}
for arch, *target, rows in json.loads(sys.argv[1]):
    constants = portable.launch_options(rows, arch)
    options = {"num_warps": constants.pop("num_warps")}
    signature = dict.fromkeys(("row_request", "visible_end", "buffer", "schedule"), "*i32")
    signature |= dict.fromkeys(("rows", "buffer_slots", "schedule_slots", "most_blocks"), "i32")
    if rows == 1:
        # a launch makes constants of ones
        constants |= {"rows": 1, "buffer_slots": 1, "most_blocks": 1}
    signature |= dict.fromkeys(constants, "constexpr")
    built = triton.compile(ASTSource(portable.plan_kernel, signature, constexprs=constants),
                           target=GPUTarget(*target), options=options)
    results[f"{arch}-{rows}"] = {"stack": resources(built)[1], "shared": built.metadata.shared, "target": target[1]}
print(json.dumps(results))
"""
BUILDS = [(arch, 4096) for arch in TARGETS]
BUILDS += [("sm_80", 1), ("sm_80", 16_384), ("sm_90", 64), ("gfx942", 64), ("gfx942", 16_384), ("sm_120", 32_768)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    builds = [(arch, *TARGETS[arch], rows) for arch, rows in BUILDS]
    return json.loads(run(COMPILED, json.dumps(builds), TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))))


@pytest.mark.parametrize(("arch", "rows"), BUILDS)
def test_machine_code(arch, rows, compiled):
    """One program has all rows: blocks that do not fit into its registers would cost more than to read them again."""
    built = compiled[f"{arch}-{rows}"]
    assert built["stack"] <= 16
    assert built["shared"] <= 4096


# ---- whose a schedule is ------------------------------------------------------------------------------------------


def test_a_schedule_is_for_its_own_back_end_alone():
    """Two back ends' schedules are integers of one shape: read as the other's, scores would have holes."""
    buffer, schedule = torch.empty((512, 4), dtype=torch.int32), torch.empty((515, 4), dtype=torch.int32)
    plan = IndexerPlan(buffer, 3, 100, schedule=schedule, schedule_of="triton")
    assert plan.schedule_for("triton") is schedule
    assert plan.schedule_for("sm90") is None
    assert replace(plan, schedule=None, schedule_of="").schedule_for("") is None


def test_a_plan_of_another_back_end_is_not_made_anew():
    """Its buffer would be of this step and its schedule of an earlier one."""
    requests, ends = torch.zeros(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    plan = plan_indexer(requests, ends, width=100)
    old = replace(plan, schedule=torch.empty((515, 4), dtype=torch.int32), schedule_of="triton")
    with pytest.raises(ValueError, match="a schedule of the back end 'triton', which is not the one that makes plans"):
        plan_indexer(requests, ends, width=100, out=old)


@pytest.mark.parametrize(("arch", "served"), [("sm_75", True), ("sm_120", True), ("gfx950", True), ("cpu", False)])
def test_offers(arch, served, all_proven):
    platform = Platform("cpu" if arch == "cpu" else "cuda", arch, "test")
    given = support("plan_indexer", platform, Problem())
    assert [answer.name for answer in given] == ["sm90", "triton", "reference"]
    assert given[1].supported is served


# ---- on the device ------------------------------------------------------------------------------------------------


@on_cuda
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_plan_and_schedule_on_the_device(number):
    (request, ends), width, slots, *_ = PROBLEMS[number]
    with backends.forced_backends({"plan_indexer": "triton"}):
        buffer = torch.full((slots, 4), -999, dtype=torch.int32, device="cuda")
        plan = plan_indexer(request.cuda(), ends.cuda(), width=width, out=buffer)
    assert is_right(plan.buffer.cpu(), request, ends, width)
    check_groups(plan.schedule_for("triton").cpu(), request, ends)


@on_cuda
@pytest.mark.parametrize("rows", [511, 513, 2049, 4096, 9000, 16_384, 16_385, 32_768, 40_000])
def test_many_rows_on_the_device(rows):
    """Each of the kernel's sizes, twenty times: rows are listed by one thread and looked up by another."""
    for requests, width in ((1, 9000), (rows // 4, 9000), (rows, 300_000)):
        request, ends = rows_of(rows, requests, width)
        given = request.cuda(), ends.cuda()
        with backends.forced_backends({"plan_indexer": "triton"}):
            plan = plan_indexer(*given, width=width)
            first = plan.buffer.clone(), plan.schedule.clone()
            for _ in range(20):
                plan_indexer(*given, width=width, out=plan)
                assert torch.equal(plan.buffer, first[0])
                assert torch.equal(plan.schedule, first[1])
        assert is_right(plan.buffer.cpu(), request, ends, width)
        check_groups(plan.schedule.cpu(), request, ends)


@on_cuda
def test_captured_on_the_device():
    """A replay must plan for the lengths of its own step."""
    request, ends = (x.cuda() for x in rows_of(260, 65, 20_000))
    with backends.forced_backends({"plan_indexer": "triton"}):
        plan = plan_indexer(request, ends, width=20_000)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan_indexer(request, ends, width=20_000, out=plan)
    for largest in (20_000, 1, 0, 700):
        ends.copy_(ends % (largest + 1))
        graph.replay()
        assert is_right(plan.buffer.cpu(), request.cpu(), ends.cpu(), 20_000)
        check_groups(plan.schedule.cpu(), request.cpu(), ends.cpu())
        ends.copy_(rows_of(260, 65, 20_000)[1])
