"""How many threads torch gets for the arithmetic of one step on a CPU."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from tetrad.errors import ConfigError
from tetrad.models.config import ModelConfig

if TYPE_CHECKING:
    from tetrad.config.engine_config import EngineConfig

AUTO = "auto"
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

_LAYER_WEIGHTS = 1 << 25
"""From as many weights on that a token passes through in a layer, several threads are faster than one.

A step is thousands of operations, and threads wait for one another at the end of each. On two cores a second thread
gained nothing in decoding below 10 million weights a layer and a sixth at 34 million. Where anything else runs, threads
that spin while they wait made the smaller models tens of times slower.
"""

_TOPOLOGY = Path("/sys/devices/system/cpu")


class CpuThreads(NamedTuple):
    """The threads of a step: ``count``, None to leave torch's own number as it is, and why."""

    count: int | None
    reason: str

    def __str__(self) -> str:
        return f"{torch.get_num_threads() if self.count is None else self.count}: {self.reason}"


def choose_cpu_threads(option: int | str, model: ModelConfig, device: torch.device) -> CpuThreads:
    """The threads for a model on a device; ``option`` is a number or "auto".

    auto: what the environment (OMP_NUM_THREADS, MKL_NUM_THREADS) or an earlier ``torch.set_num_threads`` says, else one
    thread for a small model and torch's own number, a thread for each core, for a large one.

    Raises:
        ConfigError: the option is neither.
    """
    number = _number(option)
    if device.type != "cpu":
        return CpuThreads(None, f"as torch has it, the model is on {device.type}")
    if number is not None:
        return CpuThreads(number, "as asked for")
    if name := next((name for name in _VARIABLES if os.environ.get(name)), None):
        return CpuThreads(None, f"as {name} says")
    if torch.get_num_threads() not in _own_defaults():
        return CpuThreads(None, "as torch.set_num_threads was told")
    if layer_weights(model) < _LAYER_WEIGHTS:
        return CpuThreads(1, "the model is small, several threads would mostly wait for one another")
    return CpuThreads(None, "all cores, the model is large")


def layer_weights(model: ModelConfig) -> int:
    """Weights of the large products that a token passes through in a layer: attention, its experts, the shared one."""
    heads = model.num_attention_heads * model.head_dim
    attention = model.hidden_size * (model.q_lora_rank + model.head_dim + model.o_groups * model.o_lora_rank)
    attention += heads * (model.q_lora_rank + model.o_lora_rank)
    experts = 3 * model.hidden_size * model.moe_intermediate_size
    return attention + experts * (model.num_experts_per_tok + model.n_shared_experts)


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """``torch.set_num_threads(count)`` inside, the number from before afterwards; None changes nothing.

    The number belongs to the process: while this is open, torch in other threads of the program may see it too.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _HasConfig(Protocol):
    config: EngineConfig


_Self = TypeVar("_Self", bound=_HasConfig)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def with_cpu_threads(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Make a method of an object with an ``EngineConfig`` named ``config`` run with that engine's threads."""

    @functools.wraps(method)
    def call(self: _Self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with torch_threads(self.config.cpu_threads.count):
            return method(self, *args, **kwargs)

    return call


def _number(option: int | str) -> int | None:
    if option == AUTO:
        return None
    text = str(option)
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigError(f"cpu_threads {option!r} is not a number of threads; give auto, or 1 or more")


def _own_defaults() -> set[int]:
    """What torch may start with: a thread for each processor that the process may use, or for each core."""
    if not hasattr(os, "sched_getaffinity"):
        count = os.cpu_count() or 1
        return {count, max(1, count // 2)}
    processors = os.sched_getaffinity(0)
    return {len(processors), len({_core(processor) for processor in processors})}


def _core(processor: int) -> str:
    """A name that the processors of one core share."""
    with contextlib.suppress(OSError):
        return (_TOPOLOGY / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    return str(processor)
