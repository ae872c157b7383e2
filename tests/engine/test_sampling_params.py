import dataclasses
import math

import numpy as np
import pytest

from tetrad.errors import RequestError
from tetrad.frontend.sampling_params import SamplingParams, resolve_seed


def test_defaults_are_the_documented_ones():
    values = dataclasses.asdict(SamplingParams())
    assert values == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "max_tokens": 16,
        "min_tokens": 0,
        "ignore_eos": False,
        "logprobs": None,
        "logit_bias": None,
    }


def test_the_edges_of_every_range_are_allowed():
    for values in (
        {"temperature": 0},
        {"temperature": 2, "n": 128},
        {"temperature": 5e-324},
        {"top_p": 5e-324},
        {"top_p": 1},
        {"top_k": 0},
        {"top_k": 10**9},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 1e-3},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop": ["a", "b", "c", "d"]},
        {"stop": None, "stop_token_ids": None},
        {"stop_token_ids": {0}},
        {"max_tokens": 1, "min_tokens": 1},
        {"max_tokens": None, "min_tokens": 10**6},
        {"logprobs": 0},
        {"logprobs": 20},
        {"logit_bias": {}},
        {"logit_bias": {0: -100, 7: 100.0}},
    ):
        SamplingParams(**values)


NAN, INF = math.nan, math.inf
BAD = {
    "n": [0, -1, 129, 1.0, True, "1", None],
    "temperature": [NAN, INF, -0.1, 2.1, True, "0.5", None, [1], 10**400, 1j],
    "top_p": [0, NAN, 1.01, -1, "1", False, None],
    "top_k": [-2, 1.5, True, "5", None, NAN],
    "min_p": [-0.1, 1.1, NAN, None],
    "presence_penalty": [-2.1, 2.1, NAN, None, True],
    "frequency_penalty": [-2.1, 2.1, NAN, None, True],
    "repetition_penalty": [0, -1, INF, NAN, None, 10**400],
    "seed": [2**63, -(2**63) - 1, 1.0, True, "7"],
    "stop": ["", ["a", ""], ["a"] * 5, [1], b"a", {"a"}, 3, ["\ud800"]],
    "stop_token_ids": [[-1], [1.0], [True], "12", 5, [None], {1: 2}],
    "max_tokens": [0, -1, 1.0, True, "16"],
    "min_tokens": [-1, 1.0, True, None, 17],
    "ignore_eos": [1, 0, None, "true"],
    "logprobs": [-1, 21, True, 1.0, "5"],
    "logit_bias": [[1], 5, {-1: 0}, {1.0: 0}, {"x": 0}, {"-1": 0}, {True: 0}, {1: NAN}, {1: 101}, {1: "1"}, {1: None}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_a_bad_value_is_one_error_that_names_the_field(field, value):
    """A value that slips through here meets tensors, where NaN or a bool is not noticed, or ends the whole engine."""
    with pytest.raises(RequestError, match=rf"^{field}\S*=.* is not allowed: ") as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 300


def test_the_message_names_value_and_range():
    with pytest.raises(RequestError, match=r"^temperature=2\.5 is not allowed: give a finite number from 0 .* to 2$"):
        SamplingParams(temperature=2.5)


def test_greedy_takes_one_choice_only():
    with pytest.raises(RequestError, match=r"^n=2 .*temperature 0"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


def test_every_field_is_checked():
    assert set(BAD) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_values_become_plain_and_copies():
    """numpy scalars break JSON; a list that the caller changes later would slip past the checks."""
    stop, bias = ["x"], {"12": np.float32(0.5)}
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(4), stop=stop, stop_token_ids=[np.int32(3)], logit_bias=bias
    )
    stop.append("")
    bias["-1"] = np.float32(0)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (3,), {12: 0.5})
    assert [type(value) for value in (params.temperature, params.top_k, params.stop_token_ids[0])] == [float, int, int]
    assert SamplingParams(stop="end").stop == ("end",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert dataclasses.replace(params, max_tokens=3).stop == ("x",)


@pytest.mark.parametrize("values", [{"stop_token_ids": [3, 97]}, {"logit_bias": {97: 1.0}}])
def test_ids_beyond_the_vocabulary(values):
    """Such an id is an index out of bounds in the step of every running request."""
    params = SamplingParams(**values)
    params.check_vocabulary(98)
    with pytest.raises(RequestError, match=r"=97 is not allowed: the model's token ids are 0 to 96"):
        params.check_vocabulary(97)


def test_token_limit():
    assert SamplingParams(max_tokens=5).token_limit(9) == 5
    assert SamplingParams(max_tokens=5).token_limit(3) == 3
    assert SamplingParams(max_tokens=None).token_limit(9) == 9


def test_seeds_of_choices():
    """Choices with one stream would all be the same text."""
    params = SamplingParams(n=4, seed=-1)
    keys = [resolve_seed(params, choice) for choice in range(4)]
    assert len({*keys, *(resolve_seed(SamplingParams(n=4, seed=0), choice) for choice in range(4))}) == 8
    assert keys == [resolve_seed(params, choice) for choice in range(4)]
    assert all(0 <= key < 2**128 for key in keys)
    unseeded = {resolve_seed(SamplingParams(), 0) for _ in range(8)}
    assert len(unseeded) == 8
