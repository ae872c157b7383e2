"""Exceptions and interrupts anywhere in a step: every sequence gets the tokens of an undisturbed run, or an error."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest

from tests.core.played_runner import Collected, PlayedRunner, add, assert_all_free, build, expected
from tetrad.core import engine_core
from tetrad.core.engine_core import EngineCore
from tetrad.core.messages import Abort
from tetrad.errors import DeviceLostError

PREFIX = [5 + place for place in range(130)]
PROMPTS = {
    0: [*range(200, 453)],
    1: [3, 1, 4, 1, 5],
    2: [*PREFIX, 9],
    3: [*PREFIX, 8, 7],
    4: [*PREFIX, 2],
}
TOKENS = 6


def scenario() -> tuple[EngineCore, PlayedRunner]:
    """Chunks, decode rows, a shared prefix, and blocks for little more than the longest: it is preempted."""
    core, runner = build(blocks=2, requests=4)
    add(core, {number: PROMPTS[number] for number in (0, 1)}, TOKENS)
    add(core, {number: PROMPTS[number] for number in (2, 3, 4)}, TOKENS, shared=len(PREFIX))
    return core, runner


def finish(core: EngineCore, collected: Collected) -> None:
    for _ in range(500):
        if not core.has_work:
            return
        collected.take(core.step())
    raise AssertionError("the core hangs")


def assert_undisturbed(collected: Collected) -> None:
    assert not collected.errors
    assert collected.tokens == {number: expected(prompt, TOKENS) for number, prompt in PROMPTS.items()}
    assert set(collected.ends.values()) == {"length"}


def steps_of_scenario() -> int:
    core, _ = scenario()
    steps = 0
    while core.has_work:
        core.step()
        steps += 1
    return steps


def test_the_scenario_has_what_it_should():
    """Preemptions, forks and chunks, and the expected tokens without any fault."""
    core, _ = scenario()
    collected = Collected()
    finish(core, collected)
    assert_undisturbed(collected)
    assert core.scheduler.preemptions
    assert_all_free(core)


@pytest.mark.parametrize("place", ["copies", "deltas", "segment", "sampled"])
def test_an_exception_in_any_step(place):
    """An exception once left requests hanging for ever, or going on over rings that had been written already."""
    for step in range(steps_of_scenario()):
        core, runner = scenario()
        collected = Collected()
        for _ in range(step):
            collected.take(core.step())
        runner.trouble = raise_once(runner, place)
        finish(core, collected)
        assert_undisturbed(collected)
        assert_all_free(core)


def raise_once(runner: PlayedRunner, wanted: str) -> Any:
    def trouble(place: str) -> None:
        if place == wanted:
            runner.trouble = lambda place: None
            raise ValueError("broken")

    return trouble


def test_a_second_exception_ends_what_was_in_both_steps():
    """Computing anew for ever would hang; after two failed steps the sequences in them end, and say why."""
    core, runner = build(blocks=8, requests=2)
    add(core, {0: [1, 2, 3], 1: [4, 5], 2: [6]}, TOKENS)
    collected = Collected()

    def trouble(place: str) -> None:
        if place == "sampled" and 0 not in collected.ends:
            raise ValueError("broken for good")

    runner.trouble = trouble
    finish(core, collected)
    assert collected.ends == {0: "error", 1: "error", 2: "length"}
    assert "2 of its steps failed" in collected.errors[0]
    assert "ValueError: broken for good" in collected.errors[0]
    assert collected.tokens[2] == expected([6], TOKENS)
    assert_all_free(core)


def test_two_failures_far_apart_end_nothing():
    """A long request lives through more than one failed step, as long as it got a token between them."""
    core, runner = build(blocks=8, requests=2)
    add(core, {0: [1, 2, 3]}, 40)
    collected, step = Collected(), 0
    while core.has_work:
        step += 1
        if step % 5 == 0:
            runner.trouble = raise_once(runner, "sampled")
        collected.take(core.step())
    assert collected.ends == {0: "length"}
    assert collected.tokens[0] == expected([1, 2, 3], 40)


def test_a_lost_device_ends_everything():
    """Nothing can be computed anew on a device that is gone: running and waiting sequences end at once."""
    core, runner = scenario()
    collected = Collected()
    collected.take(core.step())

    def trouble(place: str) -> None:
        raise DeviceLostError("the device is lost")

    runner.trouble = trouble
    finish(core, collected)
    assert collected.ends == dict.fromkeys(PROMPTS, "error")
    assert set(collected.errors.values()) == {"the device is lost"}
    assert_all_free(core)


def test_a_failing_prefix_ends_those_that_wait_for_it():
    """The sequences that wait for a common prefix never ran themselves, and would wait for ever."""
    core, runner = scenario()
    core.abort(Abort((0, 1)))

    def trouble(place: str) -> None:
        raise ValueError("broken for good")

    runner.trouble = trouble
    collected = Collected()
    finish(core, collected)
    assert collected.ends == {2: "error", 3: "error", 4: "error"}
    assert_all_free(core)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that is executed in the core's files."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        code = frame.f_code
        if "/tetrad/core/" not in code.co_filename or code.co_name in ("_hand_over", "_report"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("seed", range(8))
def test_an_interrupt_at_any_line(seed):
    """Ctrl-C at the wrong line once leaked blocks. Whoever goes on afterwards gets the tokens of an undisturbed run.

    Lines that hand a finished step's messages over are left out: what is on its way there is the caller's.
    """
    chance = random.Random(seed)
    for _ in range(60):
        core, _ = scenario()
        collected = Collected()
        for _ in range(chance.randrange(steps_of_scenario())):
            collected.take(core.step())
        if not core.has_work:
            continue
        before = sys.gettrace()
        sys.settrace(Interrupt(chance.randrange(1, 400)))
        try:
            collected.take(core.step())
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        finish(core, collected)
        assert_undisturbed(collected)
        assert_all_free(core)


def test_attempts_are_what_the_docstring_says():
    """Compute again once."""
    assert engine_core.ATTEMPTS == 2


def test_two_failures_of_a_long_prompt_end_nothing():
    """A prompt in chunks was given up after two passing faults, with good chunks between them."""
    core, runner = build(blocks=8, requests=1, budget=16)
    prompt = [*range(100)]
    add(core, {0: prompt}, TOKENS)
    collected, step = Collected(), 0
    while core.has_work:
        step += 1
        if step in (3, 7):  # the second chunk behind the place that failed first has gone well by then
            runner.trouble = raise_once(runner, "segment")
        collected.take(core.step())
    assert (collected.ends, collected.errors) == ({0: "length"}, {})
    assert collected.tokens[0] == expected(prompt, TOKENS)


def test_a_chunk_that_always_fails_ends_its_prompt():
    """The chunks before it go well each time, which must not count as getting further."""
    core, runner = build(blocks=8, requests=1, budget=16)
    add(core, {0: [*range(100)]}, TOKENS)
    collected = Collected()

    def trouble(place: str) -> None:
        if place == "segment" and runner.length[0] == 32:
            raise ValueError("broken for good")

    runner.trouble = trouble
    finish(core, collected)
    assert collected.ends == {0: "error"}
    assert_all_free(core)


def test_who_only_waited_outlives_a_result_that_cannot_be_used():
    """A runner's answer of the wrong length ended the requests that waited, and not the one it was for."""
    core, runner = build(blocks=8, requests=1)
    add(core, {0: [1, 2]}, TOKENS)
    add(core, {1: [3]}, TOKENS)
    execute, calls = runner.execute, 0

    def doubled(plan: Any) -> Any:
        nonlocal calls
        calls += 1
        drawn = execute(plan)
        return drawn + drawn if calls <= 2 else drawn

    runner.execute = doubled
    collected = Collected()
    finish(core, collected)
    assert collected.ends[1] == "length"
    assert collected.tokens[1] == expected([3], TOKENS)
    assert_all_free(core)
