"""The gate, and what one bad case or contender does to the others: nothing."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch

import tetrad.ops
from tetrad.bench import measurement
from tetrad.bench.cases import BenchSettings, Kind, Op, Shape
from tetrad.bench.costs import Ceilings, Rate
from tetrad.bench.inputs import footprint_of
from tetrad.bench.measurement import BenchResult, Status, run_bench
from tetrad.bench.peers import Own, Peer
from tetrad.bench.report import table
from tetrad.bench.timing import Timing
from tetrad.geometry import IndexDtype

CPU = torch.device("cpu")
SHAPES = (Shape(Kind.DECODE, 2, 150, 2), Shape(Kind.PREFILL, 1, 70, 9))
SETTINGS = BenchSettings(shapes=SHAPES, dtypes=(IndexDtype.FP4,), heads=3, head_dim=32, k=20)


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Every call takes 2 us and is made once; what the machine does at its best is not asked."""
    rate = Rate(1e12, "made up")
    monkeypatch.setattr(measurement, "measure_ceilings", lambda device: Ceilings(rate, rate, rate))

    def timed(calls, device, repeats) -> Timing:
        for call in calls:
            call()
        return Timing(2.0, 1.0, 3.0, "host", len(calls))

    monkeypatch.setattr(measurement, "time_calls", timed)


def module(**functions: Any) -> ModuleType:
    made = ModuleType("made")
    made.__dict__.update(functions)
    return made


def run(*more: Peer, **options: Any) -> BenchResult:
    return run_bench(SETTINGS, CPU, [Own(CPU), *more], **options)


def test_everything_is_measured():
    result = run()
    assert [(each.case.shape, each.case.op) for each in result.results] == [
        (shape, op) for shape in SHAPES for op in (Op.PLAN, Op.TOPK, Op.SCORE, Op.TOTAL)
    ]
    assert {each.status for each in result.results} == {Status.OK}
    assert result.clean
    assert not result.interrupted


def wrong_in_the_last_row(*arguments: Any, **options: Any) -> torch.Tensor:
    scores = tetrad.ops.indexer_logits(*arguments, **options)
    scores[-1, 3] += scores[-1].abs().max()
    return scores


def descending(logits: torch.Tensor, visible_end: torch.Tensor, k: int, *, out: torch.Tensor) -> torch.Tensor:
    return tetrad.ops.topk_indices(logits, visible_end, k, out=out).flip(1)


def hole(row_request: torch.Tensor, visible_end: torch.Tensor, *, width: int, out: Any = None) -> Any:
    plan = tetrad.ops.plan_indexer(row_request, visible_end, width=width, out=out)
    plan.buffer[0, 0] = -1
    return plan


def test_what_is_wrong_is_not_timed(monkeypatch):
    """A fast kernel with a wrong result is not fast. Only its own rows say WRONG; the others are measured."""
    timed = []
    clock = measurement.time_calls
    monkeypatch.setattr(measurement, "time_calls", lambda *given: timed.append(given) or clock(*given))
    wrong = Peer("wrong", module(plan_indexer=hole, indexer_logits=wrong_in_the_last_row, topk_indices=descending))
    result = run(wrong)
    assert not result.clean
    by_contender = {name: [each for each in result.results if each.contender == name] for name in ("tetrad", "wrong")}
    assert {each.status for each in by_contender["tetrad"]} == {Status.OK}
    assert {each.status for each in by_contender["wrong"]} == {Status.WRONG}
    assert all(each.timing is None for each in by_contender["wrong"])
    assert len(timed) == len(by_contender["tetrad"])
    text = table(result)
    assert "WRONG  scores of row 3 differ from fp64" in text
    assert "WRONG  row 0: the places are not ascending" in text
    assert "WRONG  2 visible blocks" not in text
    assert "WRONG  1 visible blocks are in no work item" in text


def test_what_raises_fails_alone():
    def broken(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError("not on Tuesdays\nsecond line")

    result = run(Peer("broken", module(indexer_logits=broken, topk_indices=tetrad.ops.topk_indices)))
    broken_results = {(each.case.op, each.status, each.note) for each in result.results if each.contender == "broken"}
    assert broken_results == {
        (Op.PLAN, Status.REFUSED, "it has no plan_indexer"),
        (Op.TOPK, Status.OK, ""),
        (Op.SCORE, Status.FAILED, "NotImplementedError: not on Tuesdays"),
        (Op.TOTAL, Status.FAILED, "NotImplementedError: not on Tuesdays"),
    }
    assert not result.clean
    assert "not timed: broken plan: it has no plan_indexer" in table(result)


def test_an_opaque_plan_says_so():
    made = module(plan_indexer=lambda *given, width, out=None: object())
    plans = [each for each in run(Peer("opaque", made)).results if each.contender == "opaque"]
    assert {each.note for each in plans if each.case.op is Op.PLAN} == {"checked only through its scores"}


def test_too_little_memory(monkeypatch):
    """The case says how many bytes it needs and is skipped before anything is allocated; smaller ones are measured."""
    cases = list(SETTINGS.cases())
    needs = {case: footprint_of(case, 0).bytes for case in cases}
    limit = sorted(needs.values())[len(cases) // 2]
    make = measurement.make_inputs

    def made(case, sets, device):
        assert needs[case] <= limit
        return make(case, sets, device)

    monkeypatch.setattr(measurement, "make_inputs", made)
    result = run(memory=lambda device: limit)
    for each in result.results:
        if needs[each.case] <= limit:
            assert each.status is Status.OK
        else:
            assert each.status is Status.SKIPPED
            assert each.note == f"needs {needs[each.case]} bytes of memory, {limit} are free"
    assert {each.status for each in result.results} == {Status.OK, Status.SKIPPED}
    assert result.clean


def test_memory_that_runs_out_all_the_same():
    """Peers may need more than their arguments."""

    def hungry(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    result = run(Peer("hungry", module(indexer_logits=hungry)))
    hungry_scores = [each for each in result.results if (each.contender, each.case.op) == ("hungry", Op.SCORE)]
    assert {each.status for each in hungry_scores} == {Status.SKIPPED}
    assert result.clean


def test_buffers_of_a_case_are_gone_before_the_next(monkeypatch):
    """Two cases' buffers at once would be twice the memory that was asked for."""
    alive: list[Any] = []
    make = measurement.make_inputs

    def made(case, sets, device):
        gc.collect()
        assert not any(reference() is not None for reference in alive)
        inputs = make(case, sets, device)
        alive.append(weakref.ref(inputs[0].row_request.untyped_storage()))
        alive.append(weakref.ref(inputs[0].row_request))
        return inputs

    monkeypatch.setattr(measurement, "make_inputs", made)
    assert run().clean
    assert len(alive) == 2 * 8


def test_an_interrupt_keeps_what_there_is():
    made = 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made > 3:
            raise KeyboardInterrupt
        return tetrad.ops.topk_indices(*arguments, **options)

    result = run(Peer("slow", module(topk_indices=interrupted)))
    assert result.interrupted
    assert [each.case.op for each in result.results if each.contender == "tetrad"] == [Op.PLAN]


def test_an_interrupt_before_the_first_result(monkeypatch):
    def interrupted(device):
        raise KeyboardInterrupt

    monkeypatch.setattr(measurement, "measure_ceilings", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()


def test_a_dead_device_keeps_what_there_is():
    """A kernel's illegal memory access ended the command with a traceback of the next case, and no table: the one that
    had done it was not to be seen."""
    asked = 0

    def memory(device: torch.device) -> int:
        nonlocal asked
        asked += 1
        if asked > 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nsecond line")
        return 1 << 40

    result = run(memory=memory)
    assert result.died == "CUDA error: an illegal memory access was encountered"
    assert len(result.results) == 2
    assert not result.clean
