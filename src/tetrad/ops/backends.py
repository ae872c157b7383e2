"""Which back ends each op has, and which of them computes a given problem on a given device.

A back end is a module beside the op's public function, with functions of the same names and parameters that leave the
checking of arguments to it. The choice depends only on the device and on the problem, never on a tensor's values, and
is remembered: an engine makes it once, with :func:`choose_backend`, and calling an op only looks it up.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from tetrad.errors import ConfigError
from tetrad.ops import nvrtc
from tetrad.platforms import Offer, Platform, current_platform


@dataclass(frozen=True, slots=True)
class Problem:
    """What a back end's offer may depend on besides the platform. Zero or "" where an op has no such thing.

    ``dtype`` is how keys are stored ("fp4", "fp8", "bf16", "fp32"), ``heads`` the number of query heads.
    """

    dtype: str = ""
    head_dim: int = 0
    heads: int = 0


@dataclass(frozen=True, slots=True)
class Backend:
    """A back end of one op: ``supports(platform, problem)`` says (supported, reason) and imports nothing to do so."""

    name: str
    module: str
    supports: Callable[[Platform, Problem], tuple[bool, str]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The back end that was chosen: its module, and (name, reason) of every one that was preferred but refused."""

    op: str
    name: str
    module: ModuleType
    reason: str
    refusals: tuple[tuple[str, str], ...]


def _serves_everything(platform: Platform, problem: Problem) -> tuple[bool, str]:
    return True, "plain torch runs on every device"


def _sm90_plan(platform: Platform, problem: Problem) -> tuple[bool, str]:
    if platform.arch != "sm_90":
        return False, f"written for sm_90, not for {platform.arch}"
    missing = nvrtc.unavailable()
    return missing is None, missing or "CUDA C++ for Hopper"


def _sm90_scorer(platform: Platform, problem: Problem) -> tuple[bool, str]:
    served = problem.dtype in ("fp4", "fp8") and problem.head_dim == 128 and problem.heads in (32, 64)
    if platform.arch == "sm_90" and not served:
        return False, (
            f"serves fp4 and fp8 keys of 128 channels and 32 or 64 heads, not {problem.dtype} keys of "
            f"{problem.head_dim} channels and {problem.heads} heads"
        )
    return _sm90_plan(platform, problem)


def _sm90_topk(platform: Platform, problem: Problem) -> tuple[bool, str]:
    return _sm90_plan(platform, problem)


def _triton_topk(platform: Platform, problem: Problem) -> tuple[bool, str]:
    if platform.device_type != "cuda":
        return False, f"Triton compiles for GPUs, not for {platform.arch}"
    return True, "portable Triton"


def _reference(op: str) -> Backend:
    return Backend("reference", f"tetrad.ops.{op}.reference", _serves_everything)


BACKENDS: dict[str, tuple[Backend, ...]] = {
    "indexer_logits": (
        Backend("sm90", "tetrad.ops.indexer_logits.sm90", _sm90_scorer),
        _reference("indexer_logits"),
    ),
    "topk_indices": (
        Backend("cuda", "tetrad.ops.topk_indices.cuda", _sm90_topk),
        Backend("triton", "tetrad.ops.topk_indices.triton", _triton_topk),
        _reference("topk_indices"),
    ),
    "plan_indexer": (Backend("sm90", "tetrad.ops.plan_indexer.sm90", _sm90_plan), _reference("plan_indexer")),
    "index_keys": (_reference("index_keys"),),
    "kv_entries": (_reference("kv_entries"),),
    "compress": (_reference("compress"),),
    "sparse_attention": (_reference("sparse_attention"),),
}
"""The back ends of every op, the preferred one first. The last one serves everything."""

UNPROVEN: frozenset[tuple[str, str]] = frozenset(
    {("indexer_logits", "sm90"), ("plan_indexer", "sm90"), ("topk_indices", "cuda"), ("topk_indices", "triton")}
)
"""(op, back end) whose present form no device has run. They are tested in emulation, offer themselves with that reason,
and are not chosen; the tests marked ``gpu`` choose them on a device, and whoever has seen those pass takes them out."""


def offers(op: str, platform: Platform, problem: Problem) -> tuple[Offer, ...]:
    """What every back end of ``op`` answers, in order of preference.

    :raises ConfigError: if there is no such op
    """
    given = [Offer(op, backend.name, *backend.supports(platform, problem)) for backend in _backends(op)]
    return tuple(_if_proven(offer) for offer in given)


def _if_proven(offer: Offer) -> Offer:
    if offer.supported and (offer.op, offer.name) in UNPROVEN:
        return Offer(offer.op, offer.name, False, "no device has run its present form yet")
    return offer


@functools.cache
def choose_backend(op: str, platform: Platform, problem: Problem) -> Choice:
    """The first back end of ``op`` that supports the problem on the platform.

    :raises ConfigError: if there is no such op, or none of its back ends supports the problem
    """
    refusals: list[tuple[str, str]] = []
    for backend, offer in zip(_backends(op), offers(op, platform, problem), strict=True):
        if offer.supported:
            return Choice(op, backend.name, importlib.import_module(backend.module), offer.reason, tuple(refusals))
        refusals.append((offer.name, offer.reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise ConfigError(f"no back end computes {op} for {problem} on {platform.arch} ({reasons})")


@functools.cache
def backend_module(op: str, device: torch.device, problem: Problem) -> ModuleType:
    """The module that a call of ``op`` on ``device`` goes to; a look-up in a table after the first call."""
    return choose_backend(op, current_platform(device), problem).module


def _backends(op: str) -> tuple[Backend, ...]:
    if op not in BACKENDS:
        raise ConfigError(f"there is no op {op!r}; there are {', '.join(BACKENDS)}")
    return BACKENDS[op]
