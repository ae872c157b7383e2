"""The registry of back ends: order of preference, reasons, and that calling an op only looks the choice up."""

from __future__ import annotations

import importlib
import textwrap

import pytest
import torch
from tests.ops.indexer_cases import make_case

import tetrad.ops
from tetrad.errors import ConfigError
from tetrad.ops import backends, indexer_logits
from tetrad.ops.backends import BACKENDS, Backend, Problem, choose_backend, support
from tetrad.platforms import Platform, current_platform

CPU = current_platform("cpu")
FP4 = Problem("fp4", 128, 64)


@pytest.fixture
def extra_backends(monkeypatch):
    """Two made-up back ends in front of the reference; the module of the second is the reference's."""
    reference = BACKENDS["indexer_logits"][-1]
    fast = Backend(
        "fast", "tetrad.ops.no_such_module", lambda platform, problem: (False, f"needs sm_90, not {platform.arch}")
    )
    wide = Backend("wide", reference.module, lambda platform, problem: (problem.head_dim >= 128, "needs 128 channels"))
    monkeypatch.setitem(BACKENDS, "indexer_logits", (fast, wide, reference))
    for function in (choose_backend, backends.backend_module):
        function.cache_clear()
    yield
    for function in (choose_backend, backends.backend_module):
        function.cache_clear()


@pytest.mark.parametrize("op", BACKENDS)
@pytest.mark.parametrize("platform", [CPU, Platform("cuda", "sm_90", "H200"), Platform("cuda", "gfx942", "MI300X")])
def test_every_op_is_served_everywhere(op, platform):
    """The reference is the last resort of every op, and its module really is there."""
    choice = choose_backend(op, platform, FP4)
    last = BACKENDS[op][-1]
    assert last.name == "reference"
    assert last.supports(platform, Problem("fp4", 96, 3))[0]
    assert importlib.import_module(last.module) is importlib.import_module(f"tetrad.ops.{op}.reference")
    given = support(op, platform, FP4)
    assert choice.name == next(answer.name for answer in given if answer.supported)
    assert choice.refusals == tuple((answer.name, answer.reason) for answer in given[: len(choice.refusals)])
    assert all(answer.op == op and answer.reason for answer in given)


def test_first_that_supports_the_problem(extra_backends):
    """Every refusal keeps its reason: a user asks why the fast path was not taken. A refused module is not imported."""
    choice = choose_backend("indexer_logits", CPU, FP4)
    assert choice.name == "wide"
    assert choice.refusals == (("fast", "needs sm_90, not cpu"),)
    choice = choose_backend("indexer_logits", CPU, Problem("fp4", 64, 64))
    assert choice.name == "reference"
    assert choice.refusals == (("fast", "needs sm_90, not cpu"), ("wide", "needs 128 channels"))
    assert [answer.supported for answer in support("indexer_logits", CPU, FP4)] == [False, True, True]


def test_nothing_is_chosen_twice(extra_backends, monkeypatch):
    """A decode loop calls an op thousands of times a second; asking every back end each time would cost
    more than some ops."""
    asked = []
    counting = Backend(
        "counting",
        "tetrad.ops.indexer_logits.reference",
        lambda platform, problem: (bool(asked.append(problem)) or True, ""),
    )
    monkeypatch.setitem(BACKENDS, "indexer_logits", (counting,))
    case = make_case("fp4", 4, 32, [[20]])
    for _ in range(3):
        indexer_logits(*case.arguments, width=20)
    assert asked == [Problem("fp4", 32, 4)]


def test_nobody_serves_it(monkeypatch):
    none = (Backend("fast", "nowhere", lambda platform, problem: (False, "needs sm_90")),)
    monkeypatch.setitem(BACKENDS, "topk_indices", none)
    choose_backend.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"no back end computes topk_indices .* on cpu \(fast: needs sm_90\)"):
            choose_backend("topk_indices", CPU, Problem())
    finally:
        choose_backend.cache_clear()


def test_unknown_op():
    for ask in (support, choose_backend):
        with pytest.raises(ConfigError, match="no op 'softmax'; there are indexer_logits, "):
            ask("softmax", CPU, Problem())


def test_the_example_of_the_documentation_runs():
    """The first thing that a user of the ops alone tries."""
    torch.manual_seed(0)
    example = tetrad.ops.__doc__.split("::\n", 1)[1].split("\nEach op is a folder", 1)[0]
    names: dict = {}
    exec(textwrap.dedent(example), names)
    best = names["best"]
    assert best.shape == (1, 8)
    assert len(set(best[0].tolist())) == 8
    assert ((best >= 0) & (best < 100)).all()


def test_what_no_device_has_run_is_not_chosen(monkeypatch):
    """A kernel that had only been emulated was once the default on a GPU: users would have been the first to run it."""
    monkeypatch.setattr("tetrad.ops.nvrtc.unavailable", lambda: None)
    monkeypatch.setattr("tetrad.ops.backends.UNPROVEN", {("indexer_logits", "sm90"): "no device has run it"})
    first, second, *_ = support("indexer_logits", Platform("cuda", "sm_90", "test"), FP4)
    assert (first.name, first.supported, first.reason) == ("sm90", False, "no device has run it")
    assert (second.name, second.supported) == ("triton", True)
