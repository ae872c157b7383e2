"""A thousand small requests that come, go, are aborted and preempted: each gets what it gets alone."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from tests.engine.small import EOS, assert_idle, random_ids, run, small_engine
from tetrad import LLMEngine, SamplingParams
from tetrad.frontend.outputs import RequestOutput

pytestmark = pytest.mark.slow

REQUESTS = 1000
KINDS = 40
SHORT = (1, 3, 4, 5, 7, 8, 9, 15, 17, 31, 33, 64)
CROSSING = (249, 251, 252, 253, 254, 255, 256)
LONG = (509,)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A prompt and how to continue it. Kinds of one family begin alike and may come together."""

    prompt: list[int]
    params: SamplingParams
    family: int | None


def make_kinds(rng: random.Random) -> list[Kind]:
    beginnings = [random_ids(length, seed=900 + length) for length in (64, 130, 251)]
    kinds = []
    for number in range(KINDS):
        family = number % 4 if number % 4 < 3 else None
        beginning = beginnings[family] if family is not None and number % 3 == 0 else []
        lengths = LONG if number == KINDS - 1 else CROSSING if number % 8 == 6 else SHORT
        length = max(1, rng.choice(lengths) - len(beginning))
        kinds.append(
            Kind(
                beginning + random_ids(length, seed=number),
                SamplingParams(
                    n=1 if number % 7 else 2,
                    temperature=0.0 if number % 7 and number % 2 else 1.2,
                    top_p=rng.choice([0.8, 1.0]),
                    repetition_penalty=rng.choice([1.0, 1.3]),
                    seed=rng.getrandbits(40),
                    max_tokens=9 if lengths is CROSSING else rng.choice([1, 2, 3, 5]),
                    min_tokens=rng.choice([0, 1]),
                    ignore_eos=bool(number % 5),
                    logit_bias=None if number % 5 else {EOS: 4},
                ),
                family if beginning else None,
            )
        )
    return kinds


def choices(output: RequestOutput) -> list[list[int]]:
    return [choice.token_ids for choice in output.outputs]


@pytest.fixture(scope="module")
def kinds() -> list[Kind]:
    return make_kinds(random.Random(5))


@pytest.fixture(scope="module")
def expected(folder: Path, kinds: list[Kind]) -> list[list[list[int]]]:
    """What every kind gets alone, in an engine with room for everything, its choices one after the other."""
    built = small_engine(folder, max_model_len=600, max_num_seqs=1, max_num_batched_tokens=600)
    result = []
    for kind in kinds:
        built.add_request(kind.prompt, kind.params)
        (output,) = run(built).values()
        result.append(choices(output))
    return result


def churn(built: LLMEngine, kinds: list[Kind], rng: random.Random) -> tuple[dict[str, int], dict[str, RequestOutput]]:
    """Requests in bursts; some aborted after a random number of steps. Which kind each was, and every last output."""
    kind_of: dict[str, int] = {}
    outputs: dict[str, RequestOutput] = {}
    doomed: dict[str, int] = {}
    families = {family: [i for i, kind in enumerate(kinds) if kind.family == family] for family in range(3)}
    while len(kind_of) < REQUESTS or built.has_unfinished_requests:
        while len(kind_of) < REQUESTS and len(built.requests) < 16 and rng.random() < 0.7:
            if rng.random() < 0.1:
                family = rng.choice([members for members in families.values() if members])
                numbers = rng.choices(family, k=rng.randint(1, 3))
                names = built.add_requests([kinds[i].prompt for i in numbers], [kinds[i].params for i in numbers])
            else:
                numbers = [rng.randrange(len(kinds))]
                names = [built.add_request(kinds[numbers[0]].prompt, kinds[numbers[0]].params)]
            kind_of.update(zip(names, numbers, strict=True))
            doomed.update({name: rng.randint(0, 8) for name in names if rng.random() < 0.15})
        for output in built.step():
            outputs[output.request_id] = output
        for name in [name for name, steps in doomed.items() if not steps]:
            if (output := built.abort(name)) is not None:
                outputs[name] = output
        doomed = {name: steps - 1 for name, steps in doomed.items() if steps}
    return kind_of, outputs


def test_churn(folder, kinds, expected):
    """Ten places, six blocks (one sequence may need three), steps of 200 tokens, caches full of NaN.

    Blocks and rings go from request to request hundreds of times. A key that is read behind its owner's end,
    a state that is not rebuilt after a preemption, a seed that is consumed twice: each changes a token.
    """
    built = small_engine(
        folder, max_model_len=600, max_num_seqs=10, max_num_batched_tokens=200, num_gpu_blocks_override=6
    )
    kind_of, outputs = churn(built, kinds, random.Random(17))
    assert_idle(built)
    assert len(kind_of) >= REQUESTS
    aborted = 0
    for name, number in kind_of.items():
        output = outputs[name]
        assert output.finished
        assert output.error is None
        for got, whole, choice in zip(choices(output), expected[number], output.outputs, strict=True):
            if choice.finish_reason == "abort":
                aborted += 1
                assert got == whole[: len(got)], (name, number)
            else:
                assert got == whole, (name, number)
    assert aborted > 50
    assert built.core.scheduler.preemptions > 20
    assert sum(output.metrics.preemptions for output in outputs.values() if output.metrics) > 20


def test_the_kinds_cover_what_matters(kinds, expected):
    """Short and long, greedy and drawn, several choices, ended by length and by an end of sequence."""
    lengths = [len(kind.prompt) for kind in kinds]
    assert min(lengths) < 8
    assert max(lengths) > 500
    assert sum(249 <= length <= 256 for length in lengths) >= 4, "these cross a block while they are decoded"
    assert {kind.params.n for kind in kinds} == {1, 2}
    assert any(
        len(tokens) < kind.params.max_tokens for kind, all_ in zip(kinds, expected, strict=True) for tokens in all_
    )
    assert sum(kind.family is not None for kind in kinds) >= 8
