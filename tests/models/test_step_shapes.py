"""Two steps of one bucket have the same shapes everywhere, whatever the lengths of their requests.

Recorded are arguments and results of every op that the model calls and of every module, for two steps that differ in
all that a bucket leaves open: lengths, positions, how many rows are real, which of them complete an entry. A graph that
was captured from one of them must fit the other. Inside an op a reference may do what it likes; the routed experts are
one, although they are a module still.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.session import Session, dummy_model
from tests.tiny import tiny_config
from torch import Tensor, nn

import tetrad.models
from tetrad.geometry import DRAFT_ROWS
from tetrad.models.deepseek_v4 import DeepseekV4
from tetrad.models.moe import Experts

OPS = {
    "compress",
    "copy_kv_entries",
    "index_topk",
    "plan_indexer",
    "quantize_index_query",
    "sparse_attention",
    "update_state",
    "write_kv_entries",
    "write_pooled_index_keys",
    "write_pooled_kv_entries",
}
Record = list[tuple[str, Any]]


def describe(value: Any) -> Any:
    """All of a value but a tensor's numbers: its dtype, shape and strides, or the names and parts of a record."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value).__name__, {name: describe(getattr(value, name)) for name in names}
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    if isinstance(value, dict):
        return {name: describe(item) for name, item in value.items()}
    return value


class Recorder:
    """What a model's ops and modules are called with, and what they give, in the order of the calls."""

    def __init__(self, model: DeepseekV4, monkeypatch: pytest.MonkeyPatch) -> None:
        self.record: Record = []
        self._inside = 0
        for module, name, function in bound_ops():
            monkeypatch.setattr(module, name, self._wrapped(f"{module.__name__}.{name}", function))
        for name, module in model.named_modules():
            self._hook(name, module)

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            before = describe((arguments, named))
            result = function(*arguments, **named)
            if not self._inside:
                self.record.append((name, (before, describe(result))))
            return result

        return call

    def _hook(self, name: str, module: nn.Module) -> None:
        reference = isinstance(module, Experts)

        def enter(module: nn.Module, arguments: Any) -> None:
            self._inside += reference

        def leave(module: nn.Module, arguments: Any, named: Any, result: Any) -> None:
            self._inside -= reference
            self.record.append((name, (describe((arguments, named)), describe(result))))

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, with_kwargs=True)

    def take(self) -> Record:
        """What was recorded since the last call."""
        record, self.record = self.record, []
        return record


def bound_ops() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(module, name, function) of every function of ``tetrad.ops`` that a module of the model has bound."""
    for info in pkgutil.walk_packages(tetrad.models.__path__, "tetrad.models."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__.startswith("tetrad.ops."):
                yield module, name, value


def random_tokens(count: int) -> list[int]:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(count)).tolist()


# (tokens before the step, tokens of the step) of every request, of two steps
CASES: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    "decode": ([(5, 1), (130, 1), (300, 1)], [(400, 1), (17, 1), (259, 1), (63, 1), (127, 1)]),
    "decode of short ones": ([(1, 1)], [(255, 1), (7, 1), (3, 1)]),
    "drafts": (
        [(3, 4), (260, 4), (130, 2)],
        [(400, 1 + DRAFT_ROWS), (15, 3), (100, 1)],
    ),
    "first chunks": ([(0, 33), (0, 1), (0, 5)], [(0, 10), (0, 24)]),
    "later chunks": ([(4, 20), (300, 1)], [(383, 10), (17, 12), (64, 2)]),
    "chunk beside drafts": ([(127, 129), (60, 1)], [(0, 100), (250, 3), (1, 31), (9, 1)]),
}


def sessions_of(model: DeepseekV4, cases: list[list[tuple[int, int]]]) -> list[Session]:
    """Every step in a session of its own, in which its requests have been computed so far."""
    sessions = []
    for requests in cases:
        session = Session(model, kv_dtype="fp8", index_dtype="fp4", max_len=512, max_seqs=5)
        done = {str(number): random_tokens(before) for number, (before, _) in enumerate(requests) if before}
        if done:
            session.feed(done)
        sessions.append(session)
    return sessions


@pytest.mark.parametrize("case", CASES)
def test_shapes_are_the_buckets(case, monkeypatch):
    """Equal ops in equal order, with equal shapes, dtypes, strides and plain arguments."""
    model = dummy_model(tiny_config("flash", num_hidden_layers=3, compress_ratios=(0, 4, 16)))
    sessions = sessions_of(model, list(CASES[case]))
    recorder, records, buckets = Recorder(model, monkeypatch), [], []
    for session, requests in zip(sessions, CASES[case], strict=True):
        session.feed({str(number): random_tokens(count) for number, (_, count) in enumerate(requests)})
        records.append(recorder.take())
        buckets.append(session.shapes[-1])
    assert buckets[0] == buckets[1], "the case is not one bucket"
    names = [[name for name, _ in record] for record in records]
    assert names[0] == names[1]
    assert {name.rpartition(".")[2] for name in names[0]} >= OPS - (
        {"copy_kv_entries"} if "chunk" not in case else set()
    )
    for (name, first), (_, second) in zip(*records, strict=True):
        assert first == second, name


def test_the_record_tells_buckets_apart(monkeypatch):
    """The comparison would mean nothing if a row more, or a wider table, were not seen by every op."""
    model = dummy_model(tiny_config("flash"))
    cases = [[(5, 1)], [(5, 9)], [(300, 1)]]
    sessions = sessions_of(model, cases)
    recorder, records = Recorder(model, monkeypatch), []
    for session, ((_, count),) in zip(sessions, cases, strict=True):
        session.feed({"0": random_tokens(count)})
        records.append(recorder.take())
    rows, wide = ([a != b for a, b in zip(records[0], other, strict=True)] for other in records[1:])
    assert all(rows)
    assert 0.02 < sum(wide) / len(wide) < 0.9
