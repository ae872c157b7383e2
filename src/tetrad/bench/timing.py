"""How long a call takes: the median of several measurements, each of many calls on different inputs."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

_CAPTURE_SECONDS = 2.0
"""Longer than this nobody waits for a capture; fewer calls are captured then."""
_WARM_SECONDS = 0.03
_CLOCK_SECONDS = 0.5
_SAMPLE_SECONDS = 0.02
"""Of calls that are not captured, as many are measured together as take about this long."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a call: the median, least and most of the measurements.

    ``method`` is "graph" (a CUDA graph of ``calls`` calls, replayed between events), "events" (calls from the host
    between events: the host's time is in it) or "host" (the host's clock around calls).
    """

    microseconds: float
    least: float
    most: float
    method: str
    calls: int


def time_calls(calls: Sequence[Call], device: torch.device, repeats: int) -> Timing:
    """The time of one of ``calls``, which all do the same on inputs of their own. Each may have run before or not."""
    if device.type != "cuda":
        return _time_on_host(calls, repeats)
    with torch.cuda.device(device):
        calls[0]()
        calls[-1]()
        if _waits_for_device(calls[0]):
            return _time_with_events(calls, repeats)
        torch.cuda.synchronize()
        started = time.perf_counter()
        calls[0]()
        each = time.perf_counter() - started
        torch.cuda.synchronize()
        captured = calls[: max(2, int(_CAPTURE_SECONDS / max(each, 1e-9)))]
        graph = _capture(captured)
        if graph is None:
            return _time_with_events(calls, repeats)
        return _time_graph(graph, len(captured), repeats)


def warm_clocks(device: torch.device) -> None:
    """Keep a GPU busy until its clocks have risen. A CPU is left alone."""
    if device.type != "cuda":
        return
    x = torch.randn((4096, 4096), dtype=torch.bfloat16, device=device)
    until = time.perf_counter() + _CLOCK_SECONDS
    while time.perf_counter() < until:
        for _ in range(20):
            torch.mm(x, x)
        torch.cuda.synchronize(device)


def _waits_for_device(call: Call) -> bool:
    """Whether a call waits for its device, and so cannot be captured. Asked before a capture, which it would spoil."""
    with _synchronisation_is_an_error():
        try:
            call()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return True
    return False


@contextlib.contextmanager
def _synchronisation_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that it does not find every such call; those that it misses fail to be captured
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    """A graph of the calls, or None if something in them cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        return None
    return graph


def _time_graph(graph: torch.cuda.CUDAGraph, calls: int, repeats: int) -> Timing:
    until = time.perf_counter() + _WARM_SECONDS
    while True:
        graph.replay()
        torch.cuda.synchronize()
        if time.perf_counter() > until:
            break
    return _summary([_between_events(graph.replay) / calls for _ in range(repeats)], "graph", calls)


def _time_with_events(calls: Sequence[Call], repeats: int) -> Timing:
    count = _calls_in_sample(1e-6 * _between_events(calls[0]))
    rotation = _Rotation(calls, count)
    return _summary([_between_events(rotation) / count for _ in range(repeats)], "events", count)


def _time_on_host(calls: Sequence[Call], repeats: int) -> Timing:
    calls[0]()
    count = _calls_in_sample(1e-6 * _on_the_clock(calls[0]))
    rotation = _Rotation(calls, count)
    return _summary([_on_the_clock(rotation) / count for _ in range(repeats)], "host", count)


class _Rotation:
    """Runs the next ``count`` calls, starting over after the last."""

    def __init__(self, calls: Sequence[Call], count: int) -> None:
        self._calls, self._count, self._next = calls, count, 0

    def __call__(self) -> None:
        for _ in range(self._count):
            self._calls[self._next]()
            self._next = (self._next + 1) % len(self._calls)


def _calls_in_sample(seconds: float) -> int:
    return min(1000, max(1, int(_SAMPLE_SECONDS / max(seconds, 1e-9))))


def _between_events(run: Call) -> float:
    """Microseconds of the current GPU between two events around ``run``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def _on_the_clock(run: Call) -> float:
    """Microseconds by the host's clock."""
    started = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - started)


def _summary(microseconds: list[float], method: str, calls: int) -> Timing:
    return Timing(statistics.median(microseconds), min(microseconds), max(microseconds), method, calls)
