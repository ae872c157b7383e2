"""Who is timed: our own back ends, and any module that has the same calls.

A peer is an importable module with one or more of these functions, each with the signature and the meaning of
tetrad's own (:mod:`tetrad.ops`)::

    plan_indexer(row_request, visible_end, *, width, out=None) -> plan
    indexer_logits(q, q_scale, weights, cache, block_tables, row_request, visible_end, *, width, plan, out) -> scores
    topk_indices(logits, visible_end, k, *, out) -> places

``out`` may be written to or left alone: what the function returns counts. A plan may be any object. It is given back to
``plan_indexer`` as ``out``, so that it can keep its addresses, and to ``indexer_logits`` as ``plan``, which is None for
a peer without plans. A plan with ``buffer`` and ``block`` as :class:`tetrad.ops.IndexerPlan` has them is checked for
itself, any other through the scores that come of it. A peer may have ``refusal(op, dtype, heads, head_dim)``, which
says why it does not compute a case (op is "plan", "score" or "topk", dtype "fp4", "fp8", "bf16", "fp32" or None) or
returns None. Calls that neither synchronise nor allocate outside torch are captured into CUDA graphs.

:mod:`tetrad.bench.deep_gemm` is a peer whose calls are not these, and how it is adapted.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

import tetrad.ops
from tetrad.bench.cases import Case, Op
from tetrad.bench.inputs import InputSet
from tetrad.bench.timing import Call
from tetrad.errors import ConfigError
from tetrad.ops.backends import BACKENDS, Problem, choose_backend, forced_backends, named_backend
from tetrad.platforms import current_platform

FUNCTIONS = {Op.PLAN: "plan_indexer", Op.SCORE: "indexer_logits", Op.TOPK: "topk_indices"}
"""The function behind each op; a total is all of them."""


class Peer:
    """A module with calls like ours."""

    def __init__(self, name: str, module: ModuleType) -> None:
        self.name = name
        self._module = module

    def label(self, case: Case) -> str:
        """What the table calls it."""
        return self.name

    def note(self, case: Case) -> str:
        """What a reader of its figures must know."""
        return ""

    def refusal(self, case: Case) -> str | None:
        """Why it does not compute a case, or None."""
        needed = (Op.SCORE, Op.TOPK) if case.op is Op.TOTAL else (case.op,)
        for op in needed:
            if not self._has(op):
                return f"it has no {FUNCTIONS[op]}"
        refuse = getattr(self._module, "refusal", None)
        if refuse is None:
            return None
        dtype = None if case.dtype is None else str(case.dtype)
        reasons = (refuse(str(op), dtype, case.heads, case.head_dim) for op in needed)
        return next((str(reason) for reason in reasons if reason), None)

    def chosen(self) -> AbstractContextManager[None]:
        """Its calls are made inside of this."""
        return contextlib.nullcontext()

    def call(self, inputs: InputSet) -> Call:
        """The call that is timed. What does not belong to the case's op is done here, beforehand."""
        module, width, k = self._module, inputs.width, inputs.case.k
        op = inputs.case.op
        if op is Op.TOPK:
            return lambda: module.topk_indices(inputs.logits, inputs.visible_end, k, out=inputs.chosen)
        plan = None
        if self._has(Op.PLAN):
            plan = module.plan_indexer(inputs.row_request, inputs.visible_end, width=width)

        def make_plan() -> Any:
            return module.plan_indexer(inputs.row_request, inputs.visible_end, width=width, out=plan)

        def score(with_plan: Any) -> Any:
            arguments = inputs.scorer_arguments
            return module.indexer_logits(*arguments, width=width, plan=with_plan, out=inputs.logits)

        def total() -> Any:
            scores = score(None if plan is None else make_plan())
            return module.topk_indices(scores, inputs.visible_end, k, out=inputs.chosen)

        if op is Op.PLAN:
            return make_plan
        return total if op is Op.TOTAL else lambda: score(plan)

    def _has(self, op: Op) -> bool:
        return callable(getattr(self._module, FUNCTIONS[op], None))


@dataclass(frozen=True, slots=True)
class BackendUse:
    """Which back end of tetrad computes an op, for which dtypes of the index, and why no other."""

    contender: str
    op: str
    dtypes: tuple[str, ...]
    name: str
    reason: str
    refused: tuple[tuple[str, str], ...]


class Own(Peer):
    """tetrad itself: the back ends that it chooses, or those of the given names, the proven and the unproven ones.

    ``names`` are tried in their order; an op that has none of them goes where it always goes, and is not timed alone.
    """

    def __init__(self, device: torch.device, names: Sequence[str] = ()) -> None:
        super().__init__("+".join(names) or "tetrad", tetrad.ops)
        self._platform = current_platform(device)
        self._forced: dict[str, str] = {}
        for function in FUNCTIONS.values():
            known = [backend.name for backend in BACKENDS[function]]
            found = next((name for name in names if name in known), None)
            if found is not None:
                self._forced[function] = found
        unknown = [name for name in names if name not in _known_names()]
        if unknown:
            raise ConfigError(f"no op has a back end {unknown[0]!r}; there are {', '.join(_known_names())}")
        self._names = tuple(names)

    def label(self, case: Case) -> str:
        """The back ends behind it, in the order of the calls."""
        used = dict.fromkeys(self._use(op, case).name for op in _parts(case.op))
        return "+".join(used)

    def refusal(self, case: Case) -> str | None:
        """A back end that was named and does not serve the case, or an op without one of the names."""
        for op in _parts(case.op):
            try:
                self._use(op, case)
            except ConfigError as error:
                return str(error)
        if self._names and not any(FUNCTIONS[op] in self._forced for op in _parts(case.op)):
            return f"{FUNCTIONS[case.op]} has no back end of that name"
        return None

    def chosen(self) -> AbstractContextManager[None]:
        return forced_backends(self._forced)

    def uses(self, cases: Sequence[Case]) -> list[BackendUse]:
        """The back ends that serve the cases, equal ones together."""
        together: dict[BackendUse, list[str]] = {}
        for case in cases:
            if self.refusal(case) is None:
                for op in _parts(case.op):
                    dtypes = together.setdefault(self._use(op, case), [])
                    if op is Op.SCORE and str(case.dtype) not in dtypes:
                        dtypes.append(str(case.dtype))
        ordered = sorted(together.items(), key=lambda item: list(FUNCTIONS.values()).index(item[0].op))
        return [
            BackendUse(use.contender, use.op, tuple(dtypes), use.name, use.reason, use.refused)
            for use, dtypes in ordered
        ]

    def _use(self, op: Op, case: Case) -> BackendUse:
        function = FUNCTIONS[op]
        problem = Problem(str(case.dtype), case.head_dim, case.heads) if op is Op.SCORE else Problem()
        if function in self._forced:
            choice = named_backend(function, self._forced[function], self._platform, problem)
        else:
            choice = choose_backend(function, self._platform, problem)
        return BackendUse(self.name, function, (), choice.name, choice.reason, choice.refusals)


def _parts(op: Op) -> tuple[Op, ...]:
    return tuple(FUNCTIONS) if op is Op.TOTAL else (op,)


def _known_names() -> list[str]:
    return list(dict.fromkeys(backend.name for function in FUNCTIONS.values() for backend in BACKENDS[function]))


def load_peer(name: str, device: torch.device) -> Peer:
    """The peer of that name: ``deep_gemm``, or a module.

    Raises:
        ConfigError: it cannot be imported, or has none of the calls.
    """
    if name == "deep_gemm":
        from tetrad.bench.deep_gemm import DeepGemm

        return DeepGemm(device)
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever a module's own code raises
        raise ConfigError(
            f"the peer {name} cannot be imported ({type(error).__name__}: {error}); install it, or set PYTHONPATH to "
            f"the folder that holds it"
        ) from error
    if not any(callable(getattr(module, function, None)) for function in FUNCTIONS.values()):
        raise ConfigError(f"the peer {name} has none of {', '.join(FUNCTIONS.values())}")
    return Peer(name, module)


def contenders(device: torch.device, backends: Sequence[Sequence[str]], peers: Sequence[str]) -> list[Peer]:
    """Who is timed, the first being what the others are compared with.

    backends: names for each contender of our own; none: what tetrad chooses. peers: modules.

    Raises:
        ConfigError: a name is unknown or stands there twice.
    """
    found = [Own(device, names) for names in backends] or [Own(device)]
    everyone = [*found, *(load_peer(name, device) for name in peers)]
    names = [peer.name for peer in everyone]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is named twice; name each back end and peer once")
    return everyone
