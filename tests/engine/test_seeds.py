"""The engine's seed: which draws follow from it, and what must not shift them."""

from __future__ import annotations

import pytest

from tests.engine.small import run, small_engine
from tetrad import LLMEngine, SamplingParams
from tetrad.errors import RequestError

FREE = SamplingParams(max_tokens=12, ignore_eos=True)


def drawn(engine: LLMEngine, count: int = 3) -> list[list[int]]:
    names = [engine.add_request([5, 6], FREE) for _ in range(count)]
    outputs = run(engine)
    return [outputs[name].outputs[0].token_ids for name in names]


@pytest.mark.parametrize("pair", [(1, -1), (0, 2**64), (2**63, -(2**63)), (7, 7 + 2**64)], ids=str)
def test_every_engine_seed_has_streams_of_its_own(folder, pair):
    """1 and -1 gave the same tokens: the generator behind them took the absolute value."""
    first, second = (small_engine(folder, seed=seed) for seed in pair)
    second.runner = first.runner  # the same weights, so that the draws alone differ
    assert drawn(first) != drawn(second)


REFUSED = {
    "a bad prompt behind good ones": lambda engine: engine.add_requests([[5], [6], [999]]),
    "bad parameters behind good ones": lambda engine: engine.add_requests(
        [[5], [6]], [FREE, SamplingParams(stop_token_ids=[400])]
    ),
    "stop strings without a tokenizer": lambda engine: engine.add_requests(
        [[5], [6]], [FREE, SamplingParams(stop="x")]
    ),
    "one request": lambda engine: engine.add_request([5, 999], FREE),
    "a name in use": lambda engine: engine.add_request([5], FREE, 7),
    "no request at all": lambda engine: engine.add_requests([]),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_is_refused_shifts_no_draw(folder, refused):
    """The good requests of a refused batch drew seeds, so later requests got other tokens (and other names)."""
    engine = small_engine(folder, seed=4)
    if refused == "no request at all":
        REFUSED[refused](engine)
    else:
        with pytest.raises(RequestError):
            REFUSED[refused](engine)
    assert engine.add_request([5, 6], FREE) == "request-0"
    (output,) = run(engine).values()
    assert [output.outputs[0].token_ids] == drawn(small_engine(folder, seed=4), 1)
