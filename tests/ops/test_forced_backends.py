"""Calls of the public ops can be sent to a back end by name, for comparisons."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.ops.indexer_cases import make_case

from tetrad.errors import ConfigError
from tetrad.ops import backends, indexer_logits, topk_indices
from tetrad.ops.backends import BACKENDS, Backend, Problem, choose_backend, forced_backends, named_backend
from tetrad.platforms import Platform, current_platform

CPU = current_platform("cpu")


@pytest.fixture
def other(monkeypatch):
    """A back end of the top-k that chooses nothing, unproven and never preferred. Yields the number of its calls."""
    made = []
    module = ModuleType("other_topk")
    module.__dict__["topk_indices"] = lambda logits, ends, k, out: (made.append(k), out.fill_(-1))
    monkeypatch.setitem(sys.modules, "other_topk", module)
    backend = Backend("other", "other_topk", lambda platform, problem: (True, "for tests"))
    monkeypatch.setitem(BACKENDS, "topk_indices", (backend, *BACKENDS["topk_indices"]))
    monkeypatch.setattr(backends, "UNPROVEN", {("topk_indices", "other"): "for a reason"})
    for cached in (choose_backend, backends.backend_module):
        cached.cache_clear()
    yield SimpleNamespace(made=made)
    for cached in (choose_backend, backends.backend_module):
        cached.cache_clear()


def choose() -> list[int]:
    return topk_indices(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([3], dtype=torch.int32), 2)[0].tolist()


def test_only_inside(other):
    """Before and after, and where an op is not named, calls go where they always go, remembered or not."""
    assert choose() == [1, 2]
    with forced_backends({"topk_indices": "other"}):
        assert choose() == [-1, -1]
        with forced_backends({"indexer_logits": "reference"}):
            assert choose() == [1, 2]
        assert choose() == [-1, -1]
    assert choose() == [1, 2]
    with pytest.raises(RuntimeError), forced_backends({"topk_indices": "other"}):
        raise RuntimeError
    assert choose() == [1, 2]
    assert len(other.made) == 2


def test_other_threads_are_left_alone(other):
    """A server beside a comparison must not be moved to an unproven kernel."""
    got = []
    with forced_backends({"topk_indices": "other"}):
        thread = threading.Thread(target=lambda: got.append(choose()))
        thread.start()
        thread.join()
    assert got == [[1, 2]]


def test_what_is_chosen_does_not_change(other):
    with forced_backends({"topk_indices": "other"}):
        assert choose_backend("topk_indices", CPU, Problem()).name == "reference"


def test_support_is_asked():
    """Only the proof of a device is waived: a kernel for another architecture would not even compile."""
    case = make_case("fp4", 4, 32, [[20]])
    with (
        forced_backends({"indexer_logits": "sm90"}),
        pytest.raises(ConfigError, match="sm90 does not compute indexer_logits here: written for sm_90, not for cpu"),
    ):
        indexer_logits(*case.arguments, width=20)


@pytest.mark.parametrize(("op", "name"), [("topk_indices", "fast"), ("softmax", "reference")])
def test_unknown_names(op, name):
    with pytest.raises(ConfigError, match=r"no back end 'fast'; it has|no op 'softmax'"), forced_backends({op: name}):
        pass
    with pytest.raises(ConfigError, match=r"no back end 'fast'; it has|no op 'softmax'"):
        named_backend(op, name, CPU, Problem())


def test_an_unproven_one_by_name(other):
    choice = named_backend("topk_indices", "other", Platform("cuda", "sm_90", "test"), Problem())
    assert (choice.op, choice.name, choice.reason) == ("topk_indices", "other", "for tests")
    assert choice.module.__name__ == "other_topk"
