"""Where an exception can come from in a step: every call of an op, and of what stages and ends a step."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import tetrad.models
from tests.engine.small import assert_idle, random_ids
from tetrad import LLMEngine, SamplingParams
from tetrad.cache.pools import CachePools
from tetrad.core.plan import NEXT, StepPlan
from tetrad.core.scheduler import Scheduler
from tetrad.frontend.detokenizer import Detokenizer
from tetrad.frontend.outputs import RequestOutput
from tetrad.frontend.request import Choice
from tetrad.models.deepseek_v4 import DeepseekV4
from tetrad.runner.request_table import RequestTable
from tetrad.runner.sampler import Sampler

STAGES: tuple[tuple[type, str], ...] = (
    (Scheduler, "schedule"),
    (CachePools, "copy"),
    (RequestTable, "apply"),
    (DeepseekV4, "metadata"),
    (RequestTable, "advance"),
    (Sampler, "sample"),
    (RequestTable, "draw"),
    (Scheduler, "commit"),
    (Choice, "take"),
    (Detokenizer, "append"),
)
"""What a step calls beside the model, in order."""

KINDS = ("first chunk", "later chunk", "decode", "fork", "preemption")


@dataclass(frozen=True)
class Site:
    """A call: of a function, in a layer of a kind ("" outside of the layers), in a step of a kind; ``number`` counts
    the calls of a run."""

    function: str
    layer: str
    step: str
    number: int


class FaultError(Exception):
    """What the tests raise."""


def bound_ops() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(module, name, function) of every function of ``tetrad.ops`` that a module of the model has bound."""
    for info in pkgutil.walk_packages(tetrad.models.__path__, "tetrad.models."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__.startswith("tetrad.ops."):
                yield module, name, value


def kind_of(plan: StepPlan) -> str:
    """The rarest thing that a step does."""
    if any(admission.output_token_ids for admission in plan.admissions):
        return "preemption"
    if plan.request_copies:
        return "fork"
    if any(segment.start == 0 for segment in plan.segments):
        return "first chunk"
    return "decode" if all(segment.start == NEXT for segment in plan.segments) else "later chunk"


class Probe:
    """Wraps every site. Notes the calls, and raises at those that ``strikes`` picks: behind the call or before it."""

    def __init__(self, engine: LLMEngine, patch: pytest.MonkeyPatch) -> None:
        self.sites: list[Site] = []
        self.strikes: Callable[[Site], bool] = lambda site: False
        self.before = False
        self._layer = self._step = ""
        for module, name, function in bound_ops():
            patch.setattr(module, name, self._wrapped(f"{module.__name__.rpartition('.')[2]}.{name}", function))
        for owner, name in STAGES:
            patch.setattr(owner, name, self._wrapped(f"{owner.__name__}.{name}", getattr(owner, name)))
        for layer in engine.runner.model.layers:
            patch.setattr(layer, "forward", self._in_layer(type(layer.attn).__name__, layer.forward))

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if self.before:
                self._pass(name)
            result = function(*arguments, **named)
            if isinstance(result, StepPlan):
                self._step = kind_of(result)
            if not self.before:
                self._pass(name)
            return result

        return call

    def _pass(self, name: str) -> None:
        site = Site(name, self._layer, self._step, len(self.sites))
        self.sites.append(site)
        if self.strikes(site):
            raise FaultError(f"at {name}")

    def _in_layer(self, kind: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._layer = kind
            try:
                return forward(*arguments)
            finally:
                self._layer = ""

        return call

    @contextlib.contextmanager
    def striking(self, picks: Callable[[Site], bool]) -> Iterator[None]:
        """Raise at these sites; calls are counted from here."""
        self.sites, self.strikes = [], picks
        try:
            yield
        finally:
            self.strikes = lambda site: False


def once(number: int) -> Callable[[Site], bool]:
    """Picks one call."""
    return lambda site: site.number == number


def add_scenario(engine: LLMEngine) -> None:
    """Chunks of a prompt, decode rows, a prefix with two forks, and a growth that preempts who came last."""
    options: dict[str, Any] = {"logprobs": 2, "ignore_eos": True}
    engine.add_request(random_ids(253, 1), SamplingParams(max_tokens=5, seed=5, **options), "long")
    engine.add_request(random_ids(70, 2), SamplingParams(n=2, max_tokens=3, seed=6, **options), "forks")
    engine.add_request(random_ids(5, 3), SamplingParams(max_tokens=5, seed=7, **options), "short")


Answer = dict[str, list[tuple[Any, ...]]]


def answers(outputs: dict[str, RequestOutput]) -> Answer:
    """All that a user sees of each request, but for times."""
    return {
        name: [
            (one.token_ids, one.text, one.logprobs, one.cumulative_logprob, one.finish_reason) for one in output.outputs
        ]
        for name, output in outputs.items()
    }


def finish(engine: LLMEngine, outputs: dict[str, RequestOutput] | None = None) -> dict[str, RequestOutput]:
    """Step until nothing is left, at most so often as no run needs; no output comes twice."""
    outputs = {} if outputs is None else outputs
    for _ in range(200):
        if not engine.has_unfinished_requests:
            assert_idle(engine)
            return outputs
        for output in engine.step():
            if output.finished:
                assert output.request_id not in outputs, "an output came twice"
                outputs[output.request_id] = output
    raise AssertionError("the engine hangs")
