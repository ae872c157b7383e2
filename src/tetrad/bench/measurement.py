"""Every case for every contender: checked first, and timed only if it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from tqdm import tqdm

from tetrad.bench.cases import BenchSettings, Case, Op
from tetrad.bench.ceilings import measure_ceilings
from tetrad.bench.correctness import Oracle, can_check_plan, poison
from tetrad.bench.costs import Ceilings, cost_of, floor_of
from tetrad.bench.device import cache_bytes, free_bytes, versions
from tetrad.bench.inputs import Footprint, InputSet, footprint_of, make_inputs
from tetrad.bench.peers import BackendUse, Own, Peer
from tetrad.bench.timing import Timing, time_calls, warm_clocks


class Status(StrEnum):
    """Timed; wrong, and so not timed; failed with an exception; skipped for lack of memory; refused."""

    OK = "ok"
    WRONG = "wrong"
    FAILED = "failed"
    SKIPPED = "skipped"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Result:
    """One case by one contender. ``note`` says what went wrong, or what a reader must know of the figure.

    ``cold``: the inputs together exceed four times the last-level cache, so that each call found it cold.
    """

    case: Case
    contender: str
    label: str
    status: Status
    note: str = ""
    timing: Timing | None = None
    cold: bool = False

    @property
    def terabytes_per_second(self) -> float | None:
        """Bytes that must be moved, each once, over the time."""
        return None if self.timing is None else cost_of(self.case).bytes / self.timing.microseconds / 1e6

    @property
    def teraflops(self) -> float | None:
        """Operations (see :func:`tetrad.bench.costs.cost_of`) over the time, 1e12 a second; None if none count."""
        flops = cost_of(self.case).flops
        return None if self.timing is None or not flops else flops / self.timing.microseconds / 1e6

    def percent_of_floor(self, ceilings: Ceilings) -> float | None:
        """100 is as fast as the floor; half of that takes twice as long."""
        if self.timing is None:
            return None
        return 100 * floor_of(self.case, ceilings).microseconds / self.timing.microseconds


@dataclass(slots=True)
class BenchResult:
    """All results, and what they were measured with.

    An interrupted measurement keeps what it has, and so does one whose device died of a kernel; ``died`` is what the
    device said, or empty.
    """

    settings: BenchSettings
    versions: dict[str, str | None]
    device_type: str
    contenders: list[str]
    uses: list[BackendUse]
    ceilings: Ceilings | None = None
    results: list[Result] = field(default_factory=list)
    interrupted: bool = False
    died: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong and nothing failed."""
        return not self.died and not any(result.status in (Status.WRONG, Status.FAILED) for result in self.results)

    def ratio(self, result: Result) -> float | None:
        """The time over that of the first contender on the same case: 2 is twice as slow. None for the first one."""
        if result.contender == self.contenders[0] or result.timing is None:
            return None
        for other in self.results:
            if other.case == result.case and other.contender == self.contenders[0] and other.timing is not None:
                return result.timing.microseconds / other.timing.microseconds
        return None


def run_bench(
    settings: BenchSettings,
    device: torch.device,
    contenders: Sequence[Peer],
    *,
    progress: bool = False,
    memory: Callable[[torch.device], int] = free_bytes,
) -> BenchResult:
    """Measure. An interrupt (Ctrl-C) ends it with the results so far, if there are any.

    device: see :func:`tetrad.bench.device.resolve_device`. contenders: see :func:`tetrad.bench.peers.contenders`.
    memory: how many bytes are free on a device.
    """
    cases = list(settings.cases())
    uses = [use for peer in contenders if isinstance(peer, Own) for use in peer.uses(cases)]
    names = [peer.name for peer in contenders]
    result = BenchResult(settings, versions(device), device.type, names, uses)
    with tqdm(total=len(cases) * len(contenders), unit="case", disable=not progress) as bar:
        try:
            bar.set_description("ceilings")
            warm_clocks(device)
            result.ceilings = measure_ceilings(device)
            for case in cases:
                bar.set_description(str(case))
                for each in _measure_case(case, device, contenders, settings.repeats, memory):
                    result.results.append(each)
                    bar.update()
        except KeyboardInterrupt:
            if not result.results:
                raise
            result.interrupted = True
        except RuntimeError as error:
            # after an illegal memory access a device computes nothing more, nor can it be asked for its memory
            if not result.results:
                raise
            result.died = next(iter(str(error).splitlines()), type(error).__name__)
    return result


def _measure_case(
    case: Case, device: torch.device, contenders: Sequence[Peer], repeats: int, memory: Callable[[torch.device], int]
) -> list[Result]:
    """Its buffers are gone when it returns."""
    results: dict[str, Result] = {}
    ready: list[Peer] = []
    for peer in contenders:
        reason = peer.refusal(case)
        if reason is None:
            ready.append(peer)
        else:
            results[peer.name] = Result(case, peer.name, peer.name, Status.REFUSED, reason)
    if ready:
        footprint, free = footprint_of(case, cache_bytes(device)), memory(device)
        note = f"needs {footprint.bytes} bytes of memory, {free} are free"
        try:
            if footprint.bytes > free:
                raise torch.OutOfMemoryError
            inputs = make_inputs(case, footprint.sets, device)
            oracle = Oracle(inputs[0])
            for peer in ready:
                results[peer.name] = _measure(peer, case, inputs, oracle, footprint, device, repeats)
        except torch.OutOfMemoryError:
            for peer in ready:
                skipped = Result(case, peer.name, peer.label(case), Status.SKIPPED, note)
                results.setdefault(peer.name, skipped)
    return [results[peer.name] for peer in contenders]


def _measure(
    peer: Peer,
    case: Case,
    inputs: list[InputSet],
    oracle: Oracle,
    footprint: Footprint,
    device: torch.device,
    repeats: int,
) -> Result:
    name, label = peer.name, peer.label(case)
    try:
        with peer.chosen():
            poison(inputs[0])
            first = peer.call(inputs[0])
            answer = first()
            unseen = case.op is Op.PLAN and not can_check_plan(answer)
            fault = oracle.fault(answer)
            del answer
            if fault:
                return Result(case, name, label, Status.WRONG, fault)
            calls = [first, *(peer.call(each) for each in inputs[1:])]
            timing = time_calls(calls, device, repeats)
            if timing.method == "graph" and (fault := _replayed_fault(calls[0], inputs[0], oracle)):
                return Result(case, name, label, Status.WRONG, f"after the timing: {fault}")
    except torch.OutOfMemoryError:
        return Result(
            case, name, label, Status.SKIPPED, f"needs more memory than the {footprint.bytes} bytes of inputs"
        )
    except Exception as error:  # a peer may raise anything, and the other cases go on
        first_line = next(iter(str(error).splitlines()), "")
        return Result(case, name, label, Status.FAILED, f"{type(error).__name__}: {first_line}")
    cold = footprint.cold and timing.method == "graph" and timing.calls == footprint.sets
    return Result(
        case, name, label, Status.OK, "checked only through its scores" if unseen else peer.note(case), timing, cold
    )


def _replayed_fault(call: Callable[[], object], inputs: InputSet, oracle: Oracle) -> str | None:
    """What thousands of calls in a row may have broken, such as a counter that a kernel leaves behind."""
    poison(inputs)
    return oracle.fault(call())
