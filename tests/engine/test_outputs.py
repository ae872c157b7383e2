"""What an output tells besides its tokens: log probabilities in all, and how long the parts of a request took."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from tests.engine.small import ABC, greedy, random_ids, run, script, small_engine
from tetrad import LLMEngine, RequestMetrics, RequestOutput, SamplingParams
from tetrad.core import scheduler
from tetrad.frontend import llm_engine


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (llm_engine, scheduler):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture(scope="module")
def engine(text_folder: Path) -> LLMEngine:
    return small_engine(text_folder, max_num_batched_tokens=32, max_num_seqs=2)


def step(engine: LLMEngine) -> RequestOutput:
    (output,) = engine.step()
    return output


def metrics_of(output: RequestOutput | None) -> RequestMetrics:
    assert output is not None
    assert output.metrics is not None
    return output.metrics


def test_the_parts_of_a_request_are_durations_in_seconds(engine, clock):
    """They were moments of a clock that nobody else has, in a dict without units."""
    engine.add_request(random_ids(40, seed=1), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    clock.now += 7
    assert engine.step() == []
    clock.now += 2
    first = metrics_of(step(engine))
    assert first == RequestMetrics(queue_seconds=7, prefill_seconds=2, time_to_first_token_seconds=9, decode_seconds=0)
    clock.now += 0.5
    assert metrics_of(step(engine)) == dataclasses.replace(first, decode_seconds=0.5)
    clock.now += 3
    assert metrics_of(step(engine)) == dataclasses.replace(first, decode_seconds=3.5, end_to_end_seconds=12.5)


def test_what_was_not_reached_is_none(engine, clock):
    """A request that is aborted while it waits has an end and nothing before it."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    name = engine.add_request(random_ids(40, seed=2), params)
    clock.now += 4
    assert metrics_of(engine.abort(name)) == RequestMetrics(end_to_end_seconds=4)
    name = engine.add_request(random_ids(40, seed=2), params)
    clock.now += 1
    engine.step()
    clock.now += 5
    assert metrics_of(engine.abort(name)) == RequestMetrics(queue_seconds=1, end_to_end_seconds=6)


def test_a_request_starts_with_the_prefix_that_it_shares(engine, clock):
    """The prefix is computed for it, so it waits no longer in the queue."""
    begin = random_ids(70, seed=3)
    names = engine.add_requests([[*begin, 5], [*begin, 6]], SamplingParams(temperature=0, max_tokens=2))
    clock.now += 3
    assert engine.step() == []
    clock.now += 4
    outputs = run(engine)
    for name in names:
        assert metrics_of(outputs[name]).queue_seconds == 3
        assert metrics_of(outputs[name]).prefill_seconds == 4


def test_metrics_are_plain_in_json(engine):
    """What the command line prints: every name says its unit, and a request that never ran has none."""
    engine.add_request([5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    (output,) = run(engine).values()
    plain = json.loads(json.dumps(output.to_dict()))
    assert plain["metrics"] == dataclasses.asdict(metrics_of(output))
    assert all(name.endswith("_seconds") or name == "preemptions" for name in plain["metrics"])
    assert all(value >= 0 for value in plain["metrics"].values())
    assert pickle.loads(pickle.dumps(output)) == output
    assert RequestOutput("name", None, [], [], finished=True).to_dict()["metrics"] is None


@pytest.mark.parametrize("logprobs", [0, 3])
def test_the_log_probabilities_in_all(engine, logprobs):
    """It is the sum over the generated tokens, of each choice by itself, whatever else was reported beside them."""
    params = SamplingParams(n=2, seed=4, max_tokens=7, ignore_eos=True, logprobs=logprobs)
    engine.add_request(random_ids(9, seed=4), params)
    for output in iter(lambda: step(engine) if engine.has_unfinished_requests else None, None):
        for choice in output.outputs:
            assert choice.logprobs is not None
            own = [entries[token].logprob for token, entries in zip(choice.token_ids, choice.logprobs, strict=True)]
            assert choice.cumulative_logprob == pytest.approx(sum(own), abs=1e-12)
            assert choice.to_dict()["cumulative_logprob"] == choice.cumulative_logprob
    assert len({choice.cumulative_logprob for choice in output.outputs}) == 2


def test_the_token_that_ends_an_output_counts(text_folder):
    engine = small_engine(text_folder)
    script(engine, {"it": ABC})
    engine.add_request([70], greedy(stop_token_ids=[ABC[1]], logprobs=0), "it")
    choice = run(engine)["it"].outputs[0]
    assert choice.text == "a"
    assert choice.logprobs is not None
    assert choice.cumulative_logprob == sum(choice.logprobs[i][ABC[i]].logprob for i in range(2)) < 0


def test_no_log_probabilities_no_sum(engine):
    engine.add_request([5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert step(engine).outputs[0].cumulative_logprob is None
    run(engine)
