"""Nothing that the engine hands out, and nothing that it was given, is the engine's own state."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.engine.small import ABC, random_ids, run, small_engine
from tetrad import EngineArgs, LLMEngine, RequestOutput, SamplingParams


@pytest.fixture(scope="module")
def engine(text_folder) -> LLMEngine:
    return small_engine(text_folder, seed=3)


def vandalise(value: Any, done: set[int]) -> int:
    """Change everything that can be changed and is reached from ``value``. Returns how many objects that were."""
    if id(value) in done:
        return 0
    done.add(id(value))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        count = sum(vandalise(getattr(value, name), done) for name in names)
        for name in names:
            try:
                setattr(value, name, None)
            except dataclasses.FrozenInstanceError:
                return count
        return count + 1
    if isinstance(value, (list, tuple)):
        count = sum(vandalise(item, done) for item in value)
        if isinstance(value, tuple):
            return count
        value[:] = [319, 7, 319]
        return count + 1
    if isinstance(value, dict):
        count = sum(vandalise(item, done) for item in value.values())
        value.clear()
        value[317] = 5.0
        return count + 1
    return 0


def requests() -> tuple[list[Any], list[SamplingParams]]:
    """Prompts that begin alike (they share a prefix), and every container that parameters can hold."""
    begin = random_ids(70, seed=1)
    prompts: list[Any] = [
        [*begin, 5, 6, 7],
        [*begin, 8],
        {"prompt_token_ids": [*begin, 9, 10]},
        [*begin, 11],
    ]
    bias, stops, stop_ids = {17: 3.0, "18": -2.0}, ["qqqq", "zzzz"], [ABC[0]]
    common = {"max_tokens": 9, "ignore_eos": True, "logprobs": 2}
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.5, **common),
        SamplingParams(n=2, temperature=1.5, seed=5, **common),
        SamplingParams(stop=stops, stop_token_ids=stop_ids, logit_bias=bias, **common),
        SamplingParams(temperature=0, **(common | {"max_tokens": 2})),
    ]
    vandalise([bias, stops, stop_ids], set())
    return prompts, params


def summary(output: RequestOutput) -> dict[str, Any]:
    plain = output.to_dict()
    for name in ("request_id", "metrics"):
        plain.pop(name)
    return plain


def serve(engine: LLMEngine, *, vandal: bool) -> list[dict[str, Any]]:
    prompts, params = requests()
    ids = tuple(engine.add_requests(prompts, params))
    kept: list[Any] = [prompts, params] if vandal else []
    seen: dict[str, dict[str, Any]] = {}
    while engine.has_unfinished_requests:
        assert len(seen) < len(ids), "a request went on after its end"
        for output in engine.step():
            if output.finished:
                seen[output.request_id] = summary(output)
            kept += [output, output.to_dict()]
        if vandal:
            assert vandalise(kept, set()) > 0
            kept = []
    return [seen[name] for name in ids]


def test_what_is_done_to_outputs_and_arguments_changes_nothing(text_folder):
    """``ids = out.prompt_token_ids; ids += ...`` on a running request changed what it computed; ``.clear()`` made it
    run for ever. The dicts of ``logprobs`` were shared, and ``logit_bias`` of parameters that were already in use."""
    expected = serve(small_engine(text_folder, seed=3), vandal=False)
    assert [len(output["outputs"]) for output in expected] == [1, 2, 1, 1]
    assert serve(small_engine(text_folder, seed=3), vandal=True) == expected


def test_two_outputs_of_a_request_share_nothing_that_can_be_changed(engine):
    """What a consumer does to one output must not show in the next one, nor in the one that ``abort`` gives."""
    engine.add_request(random_ids(9, seed=2), SamplingParams(n=2, max_tokens=9, ignore_eos=True, logprobs=1), "it")
    outputs = [output for _ in range(3) for output in engine.step()]
    aborted = engine.abort("it")
    assert aborted is not None
    expected = [summary(output) for output in outputs[1:]] + [summary(aborted)]
    vandalise(outputs[0], set())
    assert [summary(output) for output in [*outputs[1:], aborted]] == expected
    plain = aborted.to_dict()
    vandalise(plain, set())
    assert summary(aborted) == expected[-1]


def test_parameters_that_were_spoilt_are_checked_again(engine):
    """The dict of a checked ``logit_bias`` can still be changed; NaN in it would reach the sampler."""
    params = SamplingParams(logit_bias={5: 1.0})
    params.logit_bias[6] = float("nan")  # type: ignore[index]
    with pytest.raises(ValueError, match=r"logit_bias\[6\]=nan is not allowed"):
        engine.add_request([5], params)
    assert run(engine) == {}


def test_overrides_are_the_engines_own(text_folder):
    """The nested dict that the caller goes on using is not the one that the engine's record of its options holds."""
    overrides = {"rope_scaling": {"factor": 2}}
    args = EngineArgs(model=str(text_folder), hf_overrides=overrides)
    vandalise(overrides, set())
    assert args.hf_overrides == {"rope_scaling": {"factor": 2}}
