"""Ctrl-C at any line of the front end and the core: no request, block or token is lost, and none comes twice."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tests.engine.faults import Answer, add_scenario, answers, finish
from tests.engine.small import assert_idle, random_ids, small_config, small_options, write_config, write_tokenizer
from tetrad import LLM, RequestOutput, SamplingParams

FILES = ("/tetrad/frontend/llm.py", "/tetrad/frontend/llm_engine.py", "/tetrad/frontend/request.py", "/tetrad/core/")
PROMPTS = [random_ids(80, 11), random_ids(75, 12)]
PARAMS = SamplingParams(max_tokens=4, seed=1, logprobs=1, stop=["\x00\x01"])


class Tracer:
    """Counts the lines that run in ``FILES``, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        code = frame.f_code
        # what is being returned already is the caller's
        if not any(part in code.co_filename for part in FILES) or code.co_name == "_deliver":
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                self.where = f"{code.co_filename.rpartition('/tetrad/')[2]}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self

    def run(self, call: Callable[[], Any]) -> bool:
        """Whether the call came to its end."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return False
        finally:
            sys.settrace(before)
        return True


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    config = small_config(num_hidden_layers=2, compress_ratios=(4, 16), hc_sinkhorn_iters=2, n_routed_experts=2)
    folder = write_config(tmp_path_factory.mktemp("models") / "two-layers", config)
    write_tokenizer(folder)
    return LLM(**small_options(folder) | {"num_gpu_blocks_override": 5, "max_num_seqs": 5})


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> Answer:
    add_scenario(llm.engine)
    return answers(finish(llm.engine))


def generate_beside(llm: LLM, tracer: Tracer) -> dict[str, RequestOutput]:
    """``generate`` while other requests run; the outputs of those others."""
    add_scenario(llm.engine)
    llm.engine.step()
    tracer.run(lambda: llm.generate(PROMPTS, PARAMS))
    assert set(llm.engine.requests) | set(llm.engine._kept) == {"long", "forks", "short"}, tracer.where
    return finish(llm.engine)


def lines_of(lines: int, count: int, seed: int) -> Iterator[int]:
    """Some lines of a run, from all of its parts."""
    chance = random.Random(seed)
    for part in range(count):
        yield 1 + lines * part // count + chance.randrange(max(lines // count, 1))


def check_generate(llm: LLM, undisturbed: Answer, places: Callable[[int], Iterator[int]]) -> None:
    counter = Tracer()
    assert answers(generate_beside(llm, counter)) == undisturbed
    for place in places(counter.lines):
        llm.engine.runner.pools.poison()
        tracer = Tracer(place)
        outputs = generate_beside(llm, tracer)
        assert tracer.where
        assert answers(outputs) == undisturbed, tracer.where


def check_step(llm: LLM, undisturbed: Answer, places: Callable[[int], Iterator[int]]) -> None:
    engine = llm.engine
    outputs: dict[str, RequestOutput] = {}

    def go_on() -> None:
        while engine.has_unfinished_requests:
            outputs.update((output.request_id, output) for output in engine.step() if output.finished)

    counter = Tracer()
    add_scenario(engine)
    assert counter.run(go_on)
    assert answers(outputs) == undisturbed
    for place in places(counter.lines):
        engine.runner.pools.poison()
        outputs.clear()
        tracer = Tracer(place)
        add_scenario(engine)
        tracer.run(go_on)
        assert answers(finish(engine, outputs)) == undisturbed, tracer.where


def check_add_and_abort(llm: LLM, undisturbed: Answer, places: Callable[[int], Iterator[int]]) -> None:
    engine = llm.engine

    def come_and_go() -> None:
        names = engine.add_requests(PROMPTS, PARAMS)
        engine.abort(names[0])
        engine.abort(names[1])

    counter = Tracer()
    assert counter.run(come_and_go)
    for place in places(counter.lines):
        add_scenario(engine)
        engine.step()
        tracer = Tracer(place)
        tracer.run(come_and_go)
        for name in engine.request_ids - set(undisturbed):
            engine.abort(name)
        assert answers(finish(engine)) == undisturbed, tracer.where


CHECKS = {"generate": (check_generate, 14), "step": (check_step, 14), "add and abort": (check_add_and_abort, 10)}


@pytest.mark.parametrize("check", CHECKS)
def test_an_interrupt_at_some_lines(check, llm, undisturbed):
    """Ctrl-C at the wrong line of ``generate`` once leaked blocks, and one while a step's tokens were taken lost
    them."""
    run, count = CHECKS[check]
    run(llm, undisturbed, lambda lines: lines_of(lines, count, seed=3))
    assert_idle(llm.engine)


@pytest.mark.faults_all
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("check", CHECKS)
def test_an_interrupt_at_every_line(check, llm, undisturbed):
    """As above, at every line of a run."""
    run, _ = CHECKS[check]
    run(llm, undisturbed, lambda lines: iter(range(1, lines + 1)))
    assert_idle(llm.engine)
