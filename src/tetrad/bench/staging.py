"""The host's part of a decode step, without a model: how long the core and the request table take."""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from tetrad.bench.device import versions
from tetrad.core.engine_core import Drawn, EngineCore
from tetrad.core.messages import Add, AddSequence, Sampling
from tetrad.core.plan import StepPlan
from tetrad.errors import ConfigError, check_whole
from tetrad.geometry import blocks_for
from tetrad.runner.request_table import RequestTable

_WARM_STEPS = 5
_TOKEN = 7
_MOST_TOKENS = 1 << 24
_MOST_BLOCKS = 1 << 22
"""The tables of so many take some hundred MiB."""


@dataclass(frozen=True, slots=True)
class StagingResult:
    """Medians over the steps, in microseconds.

    schedule: from the call of ``EngineCore.step`` to the plan; apply: the plan's way into the request table, until the
    rows are there; commit: from the drawn tokens to the messages. On a GPU the rows are ready in the stream, not yet on
    the device: what is measured is the host.
    """

    sequences: int
    context: int
    steps: int
    schedule: float
    apply: float
    commit: float
    total: float
    versions: dict[str, str | None]

    @property
    def before_the_model(self) -> float:
        """What a step's kernels wait for."""
        return self.schedule + self.apply

    def text(self) -> str:
        """The result as a person reads it."""
        known = self.versions
        software = ", ".join(f"{name} {known[name]}" for name in ("tetrad", "torch") if known[name])
        return "\n".join(
            [
                f"{known['device']} ({known['arch']}), {software}, {known['date']}",
                f"decode step of {self.sequences} sequences at {self.context} tokens; us: median of {self.steps}",
                f"schedule {self.schedule:10.1f}",
                f"apply    {self.apply:10.1f}",
                f"commit   {self.commit:10.1f}",
                f"total    {self.total:10.1f}",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; times in microseconds."""
        return dataclasses.asdict(self) | {"before_the_model": self.before_the_model}


class _TableRunner:
    """Carries a plan as far as its rows, and draws the same token for everyone. Notes the times of both ends."""

    def __init__(self, table: RequestTable, context: int) -> None:
        self.table, self.context = table, context
        self.started = self.applied = self.returned = 0.0

    def execute(self, plan: StepPlan) -> list[Drawn]:
        if any(segment.tokens for segment in plan.segments):
            return self._prefill(plan)
        self.started = time.perf_counter()
        rows = self.table.apply(plan)
        self.applied = time.perf_counter()
        self.table.advance(rows)
        drawn = [Drawn((_TOKEN,))] * plan.wanted
        self.returned = time.perf_counter()
        return drawn

    def _prefill(self, plan: StepPlan) -> list[Drawn]:
        """The prompts as if they had been computed: nobody has a row for each of their tokens."""
        self.table.apply(dataclasses.replace(plan, segments=()))
        self.table.length[: len(plan.segments)] = self.context
        return [Drawn((_TOKEN,))] * plan.wanted


def _check_size(sequences: int, longest: int) -> None:
    if longest > _MOST_TOKENS:
        raise ConfigError(f"context and steps may be {_MOST_TOKENS} tokens together; they are {longest}")
    blocks = sequences * blocks_for(longest)
    if blocks > _MOST_BLOCKS:
        raise ConfigError(
            f"{sequences} sequences of {longest} tokens have {blocks} blocks, and the tables of this measurement hold "
            f"{_MOST_BLOCKS}; lower sequences or context"
        )


def run_staging(
    device: torch.device, *, sequences: int = 256, context: int = 1_000_000, steps: int = 101
) -> StagingResult:
    """Measure ``steps`` decode steps of ``sequences`` sequences that have ``context`` tokens each at the start.

    Raises:
        ValueError, TypeError: a count is no integer of at least 1.
        ConfigError: a count is so large that the tables of the measurement would not fit.
    """
    for name, value in (("sequences", sequences), ("context", context), ("steps", steps)):
        check_whole(name, value, 1)
    longest = context + _WARM_STEPS + steps + 2
    _check_size(sequences, longest)
    table = RequestTable(
        requests=sequences, max_model_len_blocks=blocks_for(longest), step_rows=sequences, device=device
    )
    runner = _TableRunner(table, context)
    core = EngineCore.build(
        runner,
        blocks=sequences * blocks_for(longest),
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * context,
        chunked_prefill=True,
    )
    prompt = (_TOKEN,) * context
    core.add(Add(tuple(AddSequence(i, prompt, Sampling(), 0, longest - context) for i in range(sequences))))
    for _ in range(1 + _WARM_STEPS):
        core.step()
    times: list[tuple[float, float, float, float]] = []
    for _ in range(steps):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        core.step()
        end = time.perf_counter()
        schedule, apply, commit = runner.started - begin, runner.applied - runner.started, end - runner.returned
        times.append((schedule, apply, commit, schedule + apply + commit))
    medians = [1e6 * statistics.median(part) for part in zip(*times, strict=True)]
    return StagingResult(sequences, context, steps, *medians, versions=versions(device))
