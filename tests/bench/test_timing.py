"""How calls are counted; what they take on this machine is nobody's business here, so the clock is made up."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tetrad.bench.timing import time_calls

CPU = torch.device("cpu")


class Clock:
    """Moves only when a call says so, in seconds."""

    def __init__(self, seconds: list[float]) -> None:
        self.now, self.seconds, self.made = 0.0, seconds, 0

    def call(self) -> None:
        self.now += self.seconds[min(self.made, len(self.seconds) - 1)]
        self.made += 1

    def read(self) -> float:
        return self.now


def clocked(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> Clock:
    clock = Clock(list(seconds))
    monkeypatch.setattr("tetrad.bench.timing.time.perf_counter", clock.read)
    return clock


@pytest.mark.parametrize(("milliseconds", "calls"), [(3.0, 6), (0.001, 1000), (50.0, 1)])
def test_microseconds_of_one_call(monkeypatch, milliseconds, calls):
    """Fast calls are measured together; the figure is always that of one."""
    clock = clocked(monkeypatch, milliseconds / 1e3)
    timing = time_calls([clock.call], CPU, 7)
    assert (timing.method, timing.calls) == ("host", calls)
    assert timing.microseconds == pytest.approx(1e3 * milliseconds)
    assert clock.made == 2 + 7 * calls


def test_median(monkeypatch):
    """The first call compiles and the second finds out how long a call takes; neither counts. One slow run neither."""
    clock = clocked(monkeypatch, 9.0, 0.03, 0.02, 0.01, 5.0, 0.04, 0.03)
    timing = time_calls([clock.call], CPU, 5)
    assert timing.microseconds == pytest.approx(30_000)
    assert timing.least == pytest.approx(10_000)
    assert timing.most == pytest.approx(5_000_000)


def test_every_input_has_its_turn(monkeypatch):
    """Always the same inputs would lie in the cache."""
    clock, order = clocked(monkeypatch, 0.01), []

    def call_of(number: int):
        return lambda: (order.append(number), clock.call())

    time_calls([call_of(number) for number in range(3)], CPU, 5)
    assert order == [0, 0, *(number % 3 for number in range(10))]


class FakeCuda:
    """torch.cuda as far as the timing sees it, on the clock: a captured call takes its time when it is replayed."""

    def __init__(self, clock: Clock, *, waits: bool = False, captures: bool = True) -> None:
        self.clock, self.waits, self.captures = clock, waits, captures
        self.mode: object = 0
        self.capturing: list[float] | None = None
        self.captured = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = outer.clock.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at - self.at)

        class Graph:
            seconds = 0.0

            def replay(self) -> None:
                outer.clock.now += self.seconds

        @contextlib.contextmanager
        def graph(into: Graph):
            if not outer.captures:
                raise RuntimeError("operation not permitted when stream is capturing")
            before, made = outer.clock.now, outer.clock.made
            yield
            into.seconds, outer.clock.now = outer.clock.now - before, before
            outer.captured = outer.clock.made - made

        fakes = {"Event": Event, "CUDAGraph": Graph, "graph": graph, "synchronize": lambda device=None: None}
        fakes |= {
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
        }
        fakes["device"] = lambda device: contextlib.nullcontext()
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def call(self) -> None:
        if self.waits and self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.clock.call()


@pytest.mark.parametrize(
    ("options", "seconds", "method", "calls"),
    [
        ({}, 0.001, "graph", 40),
        ({}, 0.4, "graph", 5),
        ({}, 7.0, "graph", 2),
        ({"waits": True}, 0.004, "events", 5),
        ({"captures": False}, 0.004, "events", 5),
    ],
)
def test_on_a_gpu(monkeypatch, options, seconds, method, calls):
    """Calls are captured if they can be, as many as can be captured in two seconds, and the figure is that of one."""
    clock = clocked(monkeypatch, seconds)
    cuda = FakeCuda(clock, **options)
    cuda.install(monkeypatch)
    timing = time_calls([cuda.call] * 40, torch.device("cuda"), 7)
    assert (timing.method, timing.calls) == (method, calls)
    assert timing.microseconds == pytest.approx(1e6 * seconds)
    assert cuda.mode == 0
    if method == "graph":
        assert cuda.captured == calls


def test_other_errors_are_not_taken_for_a_refusal(monkeypatch):
    """An illegal address in a capture would otherwise be timed from the host, as if nothing had happened."""
    cuda = FakeCuda(clocked(monkeypatch, 0.001))
    cuda.install(monkeypatch)

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        time_calls([broken], torch.device("cuda"), 5)
    assert cuda.mode == 0
