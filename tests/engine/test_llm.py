"""Prompts at hand: give them all, get all outputs."""

from __future__ import annotations

import array
import dataclasses
import inspect
import json
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tqdm import tqdm

from tests.engine.small import assert_idle, bytes_of, greedy, random_ids, run, small_options
from tetrad import LLM, ConfigError, EngineArgs, RequestError, SamplingParams

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


# ---- the forms of a prompt, and what people paste ----

IDS = bytes_of("wor")
ONE = {
    "text": "wor",
    "numpy text": np.array(["wor"])[0],
    "ids": IDS,
    "tuple": tuple(IDS),
    "numpy": np.array(IDS),
    "numpy int32": np.array(IDS, dtype=np.int32),
    "numpy uint16, every other": np.array([token for token in IDS for _ in range(2)], dtype=np.uint16)[::2],
    "torch": torch.tensor(IDS),
    "torch uint8, a column": torch.tensor([[token, 0] for token in IDS], dtype=torch.uint8)[:, 0],
    "numpy scalars": list(np.array(IDS)),
    "torch scalars": list(torch.tensor(IDS)),
    "array": array.array("i", IDS),
    "text in a dict": {"prompt": "wor"},
    "ids in a dict": {"prompt_token_ids": IDS},
    "numpy in a dict": {"prompt_token_ids": np.array(IDS)},
    "torch in a dict": {"prompt_token_ids": torch.tensor(IDS), "prompt": None},
    "ids and their text": {"prompt_token_ids": IDS, "prompt": "said so"},
    "a mapping": types.MappingProxyType({"prompt": "wor"}),
}


@pytest.fixture(scope="module")
def expected_tokens(llm: LLM) -> list[int]:
    return alone(llm, IDS, GREEDY)


def test_every_form_of_a_prompt(llm, expected_tokens):
    """Dicts, arrays and tensors were refused, as one prompt and in a list."""
    assert max(IDS) < 256
    outputs = llm.generate(list(ONE.values()), GREEDY)
    for name, output in zip(ONE, outputs, strict=True):
        assert output.prompt_token_ids == IDS, name
        assert {type(token) for token in output.prompt_token_ids} == {int}, name
        assert output.outputs[0].token_ids == expected_tokens, name
        expected_text = {"ids and their text": "said so"}.get(name, "wor" if "text" in name or "map" in name else None)
        assert output.prompt == expected_text, name
        assert type(output.prompt) in (str, type(None)), name
        json.dumps(output.to_dict())


@pytest.mark.parametrize("form", ONE)
def test_one_prompt_is_not_a_list_of_them(llm, form):
    """generate(ids) is one prompt in every form that ids have, and add_request takes the same forms."""
    short = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    (output,) = llm.generate(ONE[form], short)
    assert output.prompt_token_ids == IDS
    name = llm.engine.add_request(ONE[form], short)
    assert run(llm.engine)[name].prompt_token_ids == IDS


@pytest.mark.parametrize(
    "prompts",
    [
        (IDS, [5]),
        np.array(["wor", "a"]),
        [np.array(IDS), np.array([5])],
        [torch.tensor(IDS), torch.tensor([5])],
        list(torch.tensor([IDS, IDS])),
        range(5, 8),
    ],
    ids=["tuple", "numpy texts", "numpy rows", "torch rows", "rows of a matrix", "range"],
)
def test_lists_of_prompts(llm, prompts):
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    assert len(outputs) == (1 if isinstance(prompts, range) else 2)
    assert outputs[0].prompt_token_ids == (list(prompts) if isinstance(prompts, range) else IDS)


def test_use_tqdm_is_the_third_argument(llm, capfd):
    """generate(prompts, params, True) is what people paste; it was an error."""
    llm.generate([[5], [6]], GREEDY, True)
    assert "requests: 100%" in capfd.readouterr().err
    llm.generate([[5], [6]], GREEDY, False)
    llm.generate([[5], [6]], GREEDY)
    assert capfd.readouterr().err == ""
    made = []

    class Bar(tqdm):
        def __init__(self, **options):
            made.append(options["total"])
            super().__init__(**options)

    llm.generate([[5], [6]], GREEDY, use_tqdm=Bar)
    assert made == [2]


def test_use_tqdm_without_standard_error(llm, monkeypatch):
    """Where standard error is closed, the bar was an AttributeError and the outputs were lost."""
    monkeypatch.setattr("sys.stderr", None)
    assert len(llm.generate([[5], [6]], GREEDY, use_tqdm=True)) == 2


def test_the_tokenizer_of_the_model(llm, folder):
    assert llm.get_tokenizer() is llm.engine.get_tokenizer()
    assert llm.get_tokenizer().encode("wor") == IDS
    with pytest.raises(ConfigError, match=r"ids-only has no tokenizer\.json; add the file, or name a tokenizer"):
        LLM(
            str(folder), **{name: value for name, value in small_options(folder).items() if name != "model"}
        ).get_tokenizer()


def test_the_model_is_the_first_argument_and_every_option_is_named():
    """``LLM(**options)`` told an editor nothing; the model can also be given by position, as people paste it."""
    parameters = inspect.signature(LLM).parameters
    fields = dataclasses.fields(EngineArgs)
    assert {*parameters} == {field.name for field in fields}
    assert next(iter(parameters)) == "model"
    for field in fields:
        by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert (parameters[field.name].kind is by_position) == (field.name == "model")
        assert parameters[field.name].annotation == field.type
    assert EngineArgs("somewhere").model == "somewhere"


# ---- beside requests that were added by hand ----


@pytest.mark.parametrize("length", [1, 11], ids=["ends first", "ends last"])
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


def test_two_callers_of_one_engine_get_their_own_outputs(llm):
    """Each steps for its own requests, and neither loses what the other's step has brought to its end."""
    names = [f"{place}" for place in range(12)]
    for place, name in enumerate(names):
        llm.engine.add_request([5 + place], SamplingParams(temperature=0, max_tokens=1 + place % 3), name)
    seen: dict[str, list[str]] = {"1": [], "10": []}
    for _ in range(3):
        seen["1"] += [output.request_id for output in llm.engine.step(only="1")]
        seen["10"] += [output.request_id for output in llm.engine.step(only=["10"], finished_only=True)]
    assert {*seen["1"]} == {"1"}
    assert seen["10"] == ["10"]
    assert set(run(llm.engine)) == {*names} - {"1", "10"}
    assert_idle(llm.engine)


def test_several_threads_take_turns(folder):
    """Calls that overlapped broke one another's steps: every thread got outputs of no tokens, with an error inside."""
    llm = LLM(**small_options(folder))
    prompts = [[1 + number, 7, 9] for number in range(6)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(max_tokens=9), use_tqdm=False)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        outputs = list(pool.map(lambda prompt: llm.generate(prompt, greedy(max_tokens=9), use_tqdm=False)[0], prompts))
    assert [output.outputs[0].token_ids for output in outputs] == expected
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


@pytest.mark.parametrize("take", ["step", "abort"])
def test_another_caller_takes_an_output(folder, take):
    """generate() waited for ever for a request whose output another call of step() or abort() had got."""
    llm = LLM(**small_options(folder))

    class Bar:
        def __init__(self, **_options):
            self.calls = 0

        def __enter__(self):
            return self

        def __exit__(self, *_error):
            pass

        def update(self):
            if take == "abort":
                for request_id in llm.engine.request_ids:
                    llm.engine.abort(request_id)
            while llm.engine.has_unfinished_requests:
                llm.engine.step()

    with pytest.raises(RequestError, match=r"another caller of step\(\) or abort\(\) has taken the output of request-"):
        llm.generate([[5], [6]], [greedy(max_tokens=1), greedy(max_tokens=3)], Bar)
    assert_idle(llm.engine)
