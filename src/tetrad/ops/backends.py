"""Which back ends each op has, and which of them computes a given problem on a given device.

A back end is a module beside the op's public function, with functions of the same names and parameters that leave the
checking of arguments to it. The choice depends only on the device and on the problem, never on a tensor's values, and
is remembered: an engine makes it once, with :func:`choose_backend`, and calling an op only looks it up.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType

import torch

from tetrad.errors import ConfigError, check_whole
from tetrad.formats.arguments import described
from tetrad.ops import nvrtc
from tetrad.platforms import Platform, Support, current_platform


@dataclass(frozen=True, slots=True)
class Problem:
    """What a back end's answer may depend on besides the platform. Zero or "" where an op has no such thing.

    ``dtype`` is how keys are stored ("fp4", "fp8", "bf16", "fp32"), ``heads`` the number of query heads.
    """

    dtype: str = ""
    head_dim: int = 0
    heads: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str):
            raise TypeError(f'dtype must be a name such as "fp4"; got {described(self.dtype)}')
        check_whole("head_dim", self.head_dim, 0)
        check_whole("heads", self.heads, 0)


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


def _supports_everything(platform: Platform, problem: Problem) -> tuple[bool, str]:
    return True, "plain torch runs on every device"


def _sm90_plan(platform: Platform, problem: Problem) -> tuple[bool, str]:
    if platform.arch != "sm_90":
        return False, f"written for sm_90, not for {platform.arch}"
    missing = nvrtc.unavailable()
    return missing is None, missing or "CUDA C++ for Hopper"


def _sm90_scorer(platform: Platform, problem: Problem) -> tuple[bool, str]:
    fits = problem.dtype in ("fp4", "fp8") and problem.head_dim == 128 and problem.heads in (32, 64)
    if platform.arch == "sm_90" and not fits:
        return False, (
            f"supports fp4 and fp8 keys of 128 channels and 32 or 64 heads, not {problem.dtype} keys of "
            f"{problem.head_dim} channels and {problem.heads} heads"
        )
    return _sm90_plan(platform, problem)


def _sm90_topk(platform: Platform, problem: Problem) -> tuple[bool, str]:
    return _sm90_plan(platform, problem)


def _triton_topk(platform: Platform, problem: Problem) -> tuple[bool, str]:
    if platform.device_type != "cuda":
        return False, f"Triton compiles for GPUs, not for {platform.arch}"
    return True, "portable Triton"


def _triton_plan(platform: Platform, problem: Problem) -> tuple[bool, str]:
    return _triton_topk(platform, problem)


def _triton_scorer(platform: Platform, problem: Problem) -> tuple[bool, str]:
    if platform.device_type != "cuda":
        return False, f"Triton compiles for GPUs, not for {platform.arch}"
    if platform.arch.startswith("sm_") and int(platform.arch[3:]) < 80:
        return False, f"{platform.arch} has no tensor cores for bf16"
    least = 32 if problem.dtype in ("fp4", "fp8") else 16
    if not least <= problem.head_dim <= 256 or problem.head_dim & (problem.head_dim - 1):
        return False, f"supports {least} to 256 channels of {problem.dtype}, a power of two, not {problem.head_dim}"
    return True, "portable Triton"


def _triton_keys(platform: Platform, problem: Problem) -> tuple[bool, str]:
    if platform.device_type != "cuda":
        return False, f"Triton compiles for GPUs, not for {platform.arch}"
    if platform.arch.startswith("sm_") and int(platform.arch[3:]) < 80:
        return False, f"{platform.arch} has no conversion to bf16"
    if not 32 <= problem.head_dim <= 512 or problem.head_dim & (problem.head_dim - 1):
        return False, f"supports 32 to 512 channels, a power of two, not {problem.head_dim}"
    return True, "portable Triton"


def _reference(op: str) -> Backend:
    return Backend("reference", f"tetrad.ops.{op}.reference", _supports_everything)


BACKENDS: dict[str, tuple[Backend, ...]] = {
    "indexer_logits": (
        Backend("sm90", "tetrad.ops.indexer_logits.sm90", _sm90_scorer),
        Backend("triton", "tetrad.ops.indexer_logits.triton", _triton_scorer),
        _reference("indexer_logits"),
    ),
    "topk_indices": (
        Backend("cuda", "tetrad.ops.topk_indices.cuda", _sm90_topk),
        Backend("triton", "tetrad.ops.topk_indices.triton", _triton_topk),
        _reference("topk_indices"),
    ),
    "plan_indexer": (
        Backend("sm90", "tetrad.ops.plan_indexer.sm90", _sm90_plan),
        Backend("triton", "tetrad.ops.plan_indexer.triton", _triton_plan),
        _reference("plan_indexer"),
    ),
    "index_keys": (Backend("triton", "tetrad.ops.index_keys.triton", _triton_keys), _reference("index_keys")),
    "kv_entries": (_reference("kv_entries"),),
    "compress": (_reference("compress"),),
    "sparse_attention": (_reference("sparse_attention"),),
}
"""The back ends of every op, the preferred one first. The last one supports everything."""

UNPROVEN: Mapping[tuple[str, str], str] = {}
"""(op, back end) that is not chosen yet, and why; none at present. A kernel that no device has run stands here: it is
tested in emulation and refused with that reason, and the tests marked ``gpu`` and :func:`forced_backends` choose
it on a device."""


def support(op: str, platform: Platform, problem: Problem) -> tuple[Support, ...]:
    """What every back end of ``op`` answers, in order of preference.

    Raises:
        ConfigError: if there is no such op
    """
    _check_asked(platform, problem)
    given = [Support(op, backend.name, *backend.supports(platform, problem)) for backend in _backends(op)]
    return tuple(_if_proven(answer) for answer in given)


def _if_proven(answer: Support) -> Support:
    if answer.supported and (answer.op, answer.name) in UNPROVEN:
        return Support(answer.op, answer.name, False, UNPROVEN[answer.op, answer.name])
    return answer


@functools.cache
def choose_backend(op: str, platform: Platform, problem: Problem) -> Choice:
    """The first back end of ``op`` that supports the problem on the platform.

    Raises:
        ConfigError: if there is no such op, or none of its back ends supports the problem
    """
    refusals: list[tuple[str, str]] = []
    for backend, answer in zip(_backends(op), support(op, platform, problem), strict=True):
        if answer.supported:
            return Choice(op, backend.name, importlib.import_module(backend.module), answer.reason, tuple(refusals))
        refusals.append((answer.name, answer.reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise ConfigError(f"no back end computes {op} for {problem} on {platform.arch} ({reasons})")


def named_backend(op: str, name: str, platform: Platform, problem: Problem) -> Choice:
    """The back end of ``op`` that is called ``name``, also one of ``UNPROVEN``; for comparisons, which must check it.

    Raises:
        ConfigError: if there is no such op or back end, or it does not support the problem on the platform
    """
    _check_asked(platform, problem)
    backends = {backend.name: backend for backend in _backends(op)}
    if name not in backends:
        raise ConfigError(f"{op} has no back end {name!r}; it has {', '.join(backends)}")
    supported, reason = backends[name].supports(platform, problem)
    if not supported:
        raise ConfigError(f"the back end {name} does not compute {op} here: {reason}")
    return Choice(op, name, importlib.import_module(backends[name].module), reason, ())


@contextlib.contextmanager
def forced_backends(names: Mapping[str, str] | str) -> Iterator[None]:
    """Inside, calls of the ops go to the back ends that ``names`` gives by op; see :func:`named_backend`::

        with forced_backends({"indexer_logits": "triton"}):     # one op
            ...
        with forced_backends("sm90+cuda"):                      # every op that has a back end of one of these names
            ...

    :data:`BACKENDS` lists the names. It holds for this thread (or asynchronous task) alone, so an engine beside it is
    not touched, nor is what :func:`choose_backend` says. An op that is not named goes where it always goes. A back end
    that does not support a call makes it a ``ConfigError``.

    Args:
        names: the name of a back end by op, or names alone, joined by "+"; of several that an op has, the first

    Raises:
        ConfigError: if there is no such op or back end
        TypeError: if ``names`` is neither a mapping nor a text
    """
    if isinstance(names, str):
        names = _names_by_op(names.split("+"))
    if not isinstance(names, Mapping):
        raise TypeError(
            f'names must be back ends by op, such as {{"indexer_logits": "triton"}}, or the name of one, such as '
            f'"triton"; got {described(names)}'
        )
    for op, name in names.items():
        if name not in (known := [backend.name for backend in _backends(op)]):
            raise ConfigError(f"{op} has no back end {name!r}; it has {', '.join(known)}")
    token = _forced.set(tuple(sorted(names.items())))
    try:
        yield
    finally:
        _forced.reset(token)


_forced: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("forced back ends", default=())


@functools.cache
def _module(op: str, device: torch.device, problem: Problem, forced: tuple[tuple[str, str], ...]) -> ModuleType:
    name = dict(forced).get(op)
    if name is not None:
        return named_backend(op, name, current_platform(device), problem).module
    return choose_backend(op, current_platform(device), problem).module


class _ModuleLookup:
    """``backend_module(op, device, problem)``: the module that a call of ``op`` on ``device`` goes to.

    A look-up in a table after the first call. The key holds what :func:`forced_backends` forces.
    """

    def __call__(self, op: str, device: torch.device, problem: Problem) -> ModuleType:
        return _module(op, device, problem, _forced.get())

    def cache_clear(self) -> None:
        """Forget every choice, as ``choose_backend.cache_clear`` does."""
        _module.cache_clear()


backend_module = _ModuleLookup()


def _check_asked(platform: Platform, problem: Problem) -> None:
    if not isinstance(platform, Platform):
        raise TypeError(f'platform must be a Platform, such as current_platform("cuda"); got {described(platform)}')
    if not isinstance(problem, Problem):
        raise TypeError(f'problem must be a Problem, such as Problem("fp4", 128, 64); got {described(problem)}')


def _names_by_op(names: Sequence[str]) -> dict[str, str]:
    """For every op that has one of the back ends, the first of ``names`` that it has."""
    known = list(dict.fromkeys(backend.name for backends in BACKENDS.values() for backend in backends))
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"no op has a back end {unknown!r}; there are {', '.join(known)}")
    found: dict[str, str] = {}
    for op, backends in BACKENDS.items():
        of_op = {backend.name for backend in backends}
        found.update((op, name) for name in reversed(names) if name in of_op)
    return found


def _backends(op: str) -> tuple[Backend, ...]:
    if not isinstance(op, str) or op not in BACKENDS:
        raise ConfigError(f"there is no op {op!r}; there are {', '.join(BACKENDS)}")
    return BACKENDS[op]
