"""Prompts at hand: give them all, get all outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.small import assert_idle, bytes_of, random_ids, run, small_options
from tetrad import LLM, SamplingParams
from tetrad.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(text_folder: Path) -> LLM:
    return LLM(**small_options(text_folder))


def alone(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    llm.engine.add_request(prompt, params)
    (output,) = run(llm.engine).values()
    return output.outputs[0].token_ids


def test_outputs_come_in_the_order_of_the_prompts(llm):
    """The first prompt ends last and the last one first; outputs once came in the order in which requests ended."""
    prompts = [random_ids(3 + place, seed=place) for place in range(5)]
    lengths = [9, 7, 5, 3, 1]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.error is None for output in outputs)
    assert [alone(llm, *pair) for pair in zip(prompts, params, strict=True)] == [
        output.outputs[0].token_ids for output in outputs
    ]
    assert_idle(llm.engine)


def test_one_prompt_or_many_text_or_ids(llm):
    text, ids = "wor", bytes_of("wor")  # no merge applies to it
    (from_text,) = llm.generate(text, GREEDY)
    (from_ids,) = llm.generate(ids, GREEDY)
    (from_tuple,) = llm.generate(tuple(ids), GREEDY)
    mixed = llm.generate([ids, text, tuple(ids)], GREEDY)
    assert (from_text.prompt, from_ids.prompt) == (text, None)
    assert from_text.prompt_token_ids == ids
    expected = from_text.outputs[0].token_ids
    assert len(expected) == 6
    assert [output.outputs[0].token_ids for output in (from_ids, from_tuple, *mixed)] == [expected] * 5
    assert llm.generate([], GREEDY) == []
    assert len(llm.generate(ids)[0].outputs[0].token_ids) <= SamplingParams().max_tokens
    assert from_text.outputs[0].text == llm.engine.tokenizer.decode(expected)


def test_a_refused_prompt_starts_none(llm):
    """The prompts before the bad one once stayed in the engine and ran with the next call."""
    with pytest.raises(RequestError, match=r"prompt 1: the prompt is empty"):
        llm.generate([[5], []], GREEDY)
    with pytest.raises(RequestError, match=r"2 prompts but 1 sampling_params"):
        llm.generate([[5], [6]], [GREEDY])
    assert_idle(llm.engine)


def test_an_interrupt_leaves_nothing_behind(llm, monkeypatch):
    """Ctrl-C in a notebook must not leave half a batch that the next call would drag along."""
    steps = iter([0, 0, 1])
    execute = llm.engine.runner.execute

    def interrupted(batch):
        if next(steps):
            raise KeyboardInterrupt
        return execute(batch)

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7], [8]], GREEDY)
    assert_idle(llm.engine)


# ---- beside requests that were added by hand ----


@pytest.mark.parametrize("length", [1, 40], ids=["ends first", "ends last"])
def test_generate_keeps_the_outputs_of_requests_that_were_added_by_hand(llm, length):
    """Such an output was dropped where the request ended while ``generate`` ran: nobody ever saw it."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    expected = alone(llm, [9, 8, 7], params)
    llm.engine.add_request([9, 8, 7], params, "by hand")
    (output,) = llm.generate([[5, 6]], GREEDY)
    assert output.prompt_token_ids == [5, 6]
    assert llm.engine.has_unfinished_requests, "a loop over step() must still see the output"
    outputs = run(llm.engine)
    assert list(outputs) == ["by hand"]
    assert outputs["by hand"].outputs[0].token_ids == expected
    assert_idle(llm.engine)


def test_kept_outputs_outlive_an_interrupt_and_a_failing_step(llm, monkeypatch):
    """They once went with the call during which they ended."""
    llm.engine.add_request([9], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), "by hand")
    execute, steps = llm.engine.runner.execute, iter([0, 1, 1])

    def interrupted(batch):
        if next(steps):
            raise KeyboardInterrupt
        return execute(batch)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7], [8]], GREEDY)
        llm.engine.add_request([4], GREEDY, "later")
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    assert set(run(llm.engine)) == {"by hand", "later"}
    assert_idle(llm.engine)


def test_a_kept_output_holds_its_request_id(llm):
    """A second request of that name would make two outputs that nobody can tell apart; abort gives the output."""
    llm.engine.add_request([9], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), "by hand")
    llm.generate([[5, 6]], GREEDY)
    with pytest.raises(
        RequestError, match=r"request_id 'by hand' is in use by a request whose output step\(\) has not"
    ):
        llm.engine.add_request([4], GREEDY, "by hand")
    output = llm.engine.abort("by hand")
    assert output is not None
    assert output.outputs[0].finish_reason == "length"
    assert llm.engine.abort("by hand") is None
    assert llm.engine.step() == []
    assert_idle(llm.engine)
