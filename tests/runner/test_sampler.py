import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from tetrad.frontend.request import sampling_of
from tetrad.frontend.sampling_params import SamplingParams, resolve_seed
from tetrad.runner.sampler import SampledToken, Sampler, SamplingRow, uniform

REAL_VOCABULARY = 129280


def row(seed: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params) -> SamplingRow:
    checked = SamplingParams(**params)
    return SamplingRow(sampling_of(checked, tuple(sorted(checked.stop_ids))), prompt, list(output), seed)


def tokens(results: list[SampledToken]) -> list[int]:
    assert all(result.error is None for result in results)
    return [result.token_id for result in results]


def by_id(result: SampledToken) -> dict[int, tuple[float, int]]:
    """(log probability, rank) of the tokens that a result tells of."""
    assert result.logprobs is not None
    return {token_id: (logprob, rank) for token_id, logprob, rank in result.logprobs.entries}


def one(logits, sampling_row: SamplingRow, eos: tuple[int, ...] = ()) -> SampledToken:
    values = torch.as_tensor(logits, dtype=torch.float32)
    ends = tuple(sorted({*sampling_row.params.end_token_ids, *eos}))
    changed = dataclasses.replace(sampling_row, params=dataclasses.replace(sampling_row.params, end_token_ids=ends))
    return Sampler(len(values)).sample(values.unsqueeze(0), [changed])[0]


def distribution(logits: np.ndarray, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The oracle: probabilities in fp64, token by token, likeliest first and of equals the lowest id."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if weights[i] >= min_p * weights[order[0]]]
    if top_k > 0:
        order = order[:top_k]
    total, reached, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        reached += weights[i]
        if reached >= top_p * total:
            break
    result = np.zeros(len(logits))
    result[kept] = weights[kept] / weights[kept].sum()
    return result


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 0, "top_p": 0.55},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 11, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.5, "top_p": 0.97, "min_p": 0.01},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_tokens_are_the_inverse_of_the_distribution_over_ids(params):
    """Draw by draw, not by frequency: a wrong order of the filters moves only a few of the draws."""
    logits = np.random.default_rng(1).normal(size=37).astype(np.float32) * 2
    logits[[5, 20, 33]] = logits.max()  # equals, also at the cut of top_k
    ends = np.cumsum(distribution(logits, **params))
    rows = [row(seed=seed, output=(1,) * (seed % 3), **params) for seed in range(500)]
    expected = [int(np.searchsorted(ends, uniform(r.seed, r.index) * ends[-1], side="right")) for r in rows]
    assert tokens(Sampler(37).sample(torch.from_numpy(logits).expand(500, -1), rows)) == expected
    if params.get("top_k") == 1 or params.get("top_p") == 1e-9:
        assert set(expected) == {5}
    elif params.get("min_p") != 1.0:
        assert len(set(expected)) > 2


@pytest.mark.parametrize("params", FILTERS[1::3], ids=str)
def test_frequencies(params):
    """Chi-square against the oracle, so that a generator that is not uniform would show."""
    logits = np.array([0.5, -1.0, 2.0, 1.5, 0.0, 1.4, -3.0], dtype=np.float32)
    probabilities = distribution(logits, **params)
    count = 6000
    drawn = tokens(
        Sampler(7).sample(
            torch.from_numpy(logits).expand(count, -1), [row(seed=seed, **params) for seed in range(count)]
        )
    )
    observed = np.bincount(drawn, minlength=7)
    assert not observed[probabilities == 0].any()
    likely = probabilities > 0
    chi_square = ((observed - count * probabilities)[likely] ** 2 / (count * probabilities[likely])).sum()
    assert chi_square < 30  # 6 degrees of freedom: 4e-5


def philox_4x64_10(key: int, counter: int) -> int:
    """The first output word, from the paper: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"."""
    mask = 2**64 - 1
    words = [(counter >> 64 * place) & mask for place in range(4)]
    low, high = key & mask, key >> 64
    for _ in range(10):
        product_0, product_1 = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [
            (product_1 >> 64) ^ words[1] ^ low,
            product_1 & mask,
            (product_0 >> 64) ^ words[3] ^ high,
            product_0 & mask,
        ]
        low, high = (low + 0x9E3779B97F4A7C15) & mask, (high + 0xBB67AE8584CAA73B) & mask
    return words[0]


def test_the_random_stream():
    """Held to the published generator, because the same seed must give the same tokens in the next release too."""
    for key in (0, 1, 2**64 - 1, 5 << 64 | 77, 2**128 - 1):
        for index in (0, 1, 1000, 2**40):
            assert uniform(key, index) == (philox_4x64_10(key, index + 1) >> 11) / 2**53
    numbers = [uniform(seed, index) for seed in range(40) for index in range(40)]
    assert len(set(numbers)) == 1600
    assert 0 <= min(numbers) < max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 0.03
    grid = np.array(numbers).reshape(40, 40)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.1
    assert uniform(3 | 1 << 64, 0) != uniform(3, 0)


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.999999}], ids=str)
@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 2), (0.25, 3), (0.5, 5), (0.75, 6), (1 - 2.0**-53, 6)])
def test_draws_at_the_boundaries(monkeypatch, params, fraction, expected):
    """0 must not give a token without any probability, nor the largest number below 1 one beyond the last."""
    monkeypatch.setattr("tetrad.runner.sampler.uniform", lambda seed, index: fraction)
    assert one([-1e9, -math.inf, 1, 1, -1e9, 1, 1, -1e9, -math.inf], row(**params)).token_id == expected


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, {0}), (0.2501, {0, 1}), (0.5, {0, 1}), (0.75, {0, 1, 2})])
def test_top_p_stops_where_it_is_reached(top_p, kept):
    rows = [row(seed, top_p=top_p) for seed in range(60)]
    assert set(tokens(Sampler(4).sample(torch.ones(60, 4), rows))) == kept


def test_choices_of_one_request_differ():
    params = SamplingParams(n=3, seed=11)
    logits = torch.zeros(3, 1000)
    rows = [SamplingRow(sampling_of(params, ()), [], [], resolve_seed(params, choice)) for choice in range(3)]
    drawn = tokens(Sampler(1000).sample(logits, rows))
    assert len(set(drawn)) == 3
    assert drawn[0] == one(logits[0], row(seed=11, temperature=1.0)).token_id


def many_kinds(count: int) -> list[SamplingRow]:
    kinds = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 3},
        {},
        {"top_k": 40, "top_p": 0.9},
        {"top_p": 0.95, "logprobs": 0},
        {"temperature": 2.0, "top_p": 0.999},
        {"min_p": 0.02, "frequency_penalty": 0.4, "logprobs": 20},
        {"top_k": 3000, "presence_penalty": 1.0, "min_tokens": 99, "max_tokens": 100, "stop_token_ids": [3, 9]},
        {"logit_bias": {4: 3.0}, "temperature": 0.7},
    ]
    return [
        row(seed=number, prompt=(1, 2, 3), output=tuple(range(number % 7)), **kind)
        for number, kind in zip(range(count), itertools.cycle(kinds), strict=False)
    ]


@pytest.mark.parametrize(("vocabulary", "count"), [(REAL_VOCABULARY, 19), (1003, 61)])
def test_a_row_does_not_depend_on_the_others(vocabulary, count):
    """Alone, in a batch larger than one chunk of work, and in another order: the same token and the same logprobs, bit
    by bit. A sum whose order depends on the number of rows would move a boundary between two tokens."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(count, vocabulary, generator=generator) * 3
    rows = many_kinds(count)
    before = logits.clone()
    sampler = Sampler(vocabulary)
    batch = sampler.sample(logits, rows)
    assert torch.equal(logits, before)
    assert batch == [sampler.sample(logits[i : i + 1], [rows[i]])[0] for i in range(count)]
    order = torch.randperm(count, generator=generator).tolist()
    assert [batch[i] for i in order] == sampler.sample(logits[order], [rows[i] for i in order])
    assert tokens(batch)
    assert len({result.token_id for result in batch}) > count // 2


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_p": 0.999, "min_p": 0.001}, {"top_k": 2500}, {"top_k": 1024}])
def test_a_nucleus_wider_than_the_first_guess(params):
    """Flat logits: more than 1024 tokens are kept, and many are equal at the edge of the guess."""
    generator = np.random.default_rng(2)
    logits = np.round(generator.normal(size=4000) * 8).astype(np.float32) / 8
    ends = np.cumsum(distribution(logits, **params))
    assert (np.diff(ends, prepend=0) > 0).sum() >= 1024
    rows = [row(seed=seed, **params) for seed in range(40)]
    expected = [int(np.searchsorted(ends, uniform(r.seed, 0) * ends[-1], side="right")) for r in rows]
    assert tokens(Sampler(4000).sample(torch.from_numpy(logits).expand(40, -1), rows)) == expected


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.randn(9, REAL_VOCABULARY).clamp_(max=3)
    firsts = [0, 1, 7, 8, 31, 4097, 70000, 129270, 129279]
    for number, first in enumerate(firsts):
        logits[number, :first].clamp_(max=2.5)
        logits[number, first] = 3.5
        logits[number, first + 1 :: 3] = 3.5
    rows = [row(temperature=0, top_k=5, top_p=0.1, min_p=0.5, seed=number) for number in range(9)]
    assert tokens(Sampler(REAL_VOCABULARY).sample(logits, rows)) == firsts
    adjusted = [row(temperature=0, logit_bias={5: -1.0}) for _ in firsts]
    assert tokens(Sampler(REAL_VOCABULARY).sample(logits, adjusted)) == firsts


def test_a_temperature_near_zero_is_no_overflow():
    assert one([1.0, 1.5, -2.0], row(temperature=5e-324)).token_id == 1
    assert one([1e38, 3e38, -3e38], row(temperature=1e-300, top_p=0.5)).token_id == 1


def adjusted_logits(logits: list[float], sampling_row: SamplingRow) -> list[float]:
    """The oracle for greedy rows: a loop over the vocabulary."""
    params, result = sampling_row.params, []
    for token_id, logit in enumerate(logits):
        if token_id in sampling_row.prompt_token_ids or token_id in sampling_row.output_token_ids:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        count = list(sampling_row.output_token_ids).count(token_id)
        logit -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        result.append(logit + (params.logit_bias or {}).get(token_id, 0.0))
    return result


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 2.5},
        {"repetition_penalty": 0.4},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.3},
        {"logit_bias": {2: -2.5, 9: 1.25}},
        {"repetition_penalty": 1.9, "presence_penalty": 0.5, "frequency_penalty": -0.2, "logit_bias": {1: 2, 3: -1}},
    ],
    ids=str,
)
def test_penalties_and_bias(params):
    """The draw shows the logits through: greedy for the largest, and a seeded draw for their shares."""
    generator = np.random.default_rng(3)
    logits, rows, greedy, ends = [], [], [], []
    for seed in range(60):
        values = np.round(generator.normal(size=11) * 2, 2).astype(np.float32)
        prompt, output = tuple(generator.integers(0, 11, 3)), tuple(generator.integers(0, 11, seed % 6))
        rows.append(row(seed, prompt, output, **params))
        changed = np.array(adjusted_logits(values.tolist(), rows[-1]))
        logits.append(values)
        greedy.append(int(changed.argmax()))
        ends.append(np.cumsum(distribution(changed)))
    batch = torch.from_numpy(np.stack(logits))
    drawn = [int(np.searchsorted(e, uniform(r.seed, r.index), side="right")) for e, r in zip(ends, rows, strict=True)]
    assert tokens(Sampler(11).sample(batch, rows)) == drawn
    rows = [row(r.seed, tuple(r.prompt_token_ids), tuple(r.output_token_ids), temperature=0, **params) for r in rows]
    assert tokens(Sampler(11).sample(batch, rows)) == greedy
    assert greedy != batch.argmax(-1).tolist()


def test_min_tokens_excludes_every_end():
    logits = [1.0, 9.0, 8.0, 7.0, 2.0]
    params = {"min_tokens": 2, "stop_token_ids": [2, 3], "temperature": 0}
    assert one(logits, row(**params), eos=(1,)).token_id == 4
    assert one(logits, row(output=(0,), **params), eos=(1,)).token_id == 4
    assert one(logits, row(output=(0, 0), **params), eos=(1,)).token_id == 1
    # a bias cannot bring an excluded token back
    assert one(logits, row(logit_bias={1: 100}, **params), eos=(1,)).token_id == 4
    drawn = [one(logits, row(seed, min_tokens=1, stop_token_ids=[2, 3]), eos=(1,)).token_id for seed in range(50)]
    assert set(drawn) == {0, 4}


def test_the_output_index_alone_moves_the_stream():
    """After preemption the outputs are part of what is recomputed; the stream must go on where it was."""
    logits = torch.zeros(1000)
    params = sampling_of(SamplingParams(seed=4), ())
    by_history = [one(logits, SamplingRow(params, [1], [5] * index, 4)).token_id for index in range(6)]
    by_index = [one(logits, SamplingRow(params, [1], [], 4, output_index=index)).token_id for index in range(6)]
    assert by_history == by_index
    assert len(set(by_history)) == 6
    kept = SamplingRow(params, [1], [], 4)
    growing = []
    for _ in range(6):
        growing.append(one(logits, kept).token_id)
        kept.output_token_ids.append(growing[-1])  # pyright: ignore[reportAttributeAccessIssue]
    assert growing == by_history


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_fail_their_own_row_only(bad):
    """One request's numerical accident must neither be sampled nor stop the others."""
    logits = torch.randn(8, 101)
    rows = many_kinds(8)
    good = Sampler(101).sample(logits, rows)
    for number in (0, 2, 3, 6):
        broken = logits.clone()
        broken[number, 50] = bad
        results = Sampler(101).sample(broken, rows)
        assert results[number] == SampledToken(-1, None, results[number].error)
        assert "NaN or infinity" in (results[number].error or "")
        assert results[:number] + results[number + 1 :] == good[:number] + good[number + 1 :]


def test_nothing_left_to_choose():
    assert "-inf for every token" in (one([-math.inf] * 3, row()).error or "")
    assert "-inf for every token" in (one([-math.inf] * 3, row(temperature=0)).error or "")
    everything = {"min_tokens": 1, "stop_token_ids": [0, 1, 2]}
    assert "min_tokens excludes" in (one([1.0, 2.0, 3.0], row(**everything)).error or "")
    assert "min_tokens excludes" in (one([1.0, 2.0, 3.0], row(temperature=0, **everything)).error or "")
    tiny = row(prompt=(1,), repetition_penalty=1e-200)
    assert "repetition_penalty" in (one([1.0, 2.0, 3.0], tiny).error or "")


def test_tokens_that_the_model_excludes_are_never_drawn():
    logits = torch.full((200, 50), -math.inf)
    logits[:, [7, 30]] = 1.0
    rows = [row(seed, top_k=5 * (seed % 2), logprobs=4) for seed in range(200)]
    results = Sampler(50).sample(logits, rows)
    assert set(tokens(results)) == {7, 30}
    assert all(set(by_id(result)) == {7, 30} for result in results)


def test_logprobs_are_those_of_the_raw_logits():
    generator = torch.Generator().manual_seed(8)
    logits = torch.round(torch.randn(30, 97, generator=generator) * 4) / 4  # many equals
    rows = [
        row(
            seed,
            prompt=(1,),
            output=(2,),
            temperature=1.5,
            repetition_penalty=1.5,
            logprobs=seed % 6,
            logit_bias={seed: 9},
        )
        for seed in range(30)
    ]
    for number, result in enumerate(Sampler(97).sample(logits, rows)):
        values = logits[number].double()
        expected = values - values.exp().sum().log()
        order = sorted(range(97), key=lambda i: (-values[i].item(), i))
        count = number % 6
        found = by_id(result)
        assert list(found)[:count] == order[:count]
        assert set(found) == {*order[:count], result.token_id}
        for token_id, (logprob, rank) in found.items():
            assert logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
            assert rank == order.index(token_id) + 1
    assert one([1.0, 2.0], row()).logprobs is None
    assert len(by_id(one([1.0, 2.0], row(logprobs=20)))) == 2


def test_sizes():
    assert Sampler(5).sample(torch.empty(0, 5), []) == []
    with pytest.raises(ValueError, match=r"\[1, 4\], not \[1, 5\]"):
        Sampler(5).sample(torch.zeros(1, 4), [row()])
    assert tokens(Sampler(1).sample(torch.zeros(2, 1), [row(), row(top_p=0.5, top_k=1)])) == [0, 0]
