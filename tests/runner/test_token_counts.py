"""Counting what a growing list holds must give what counting it anew gives, at every length."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tetrad.core.messages import Sampling
from tetrad.runner.sampler import Sampler, SamplingRow
from tetrad.runner.token_counts import TokenCounts


def as_dict(ids: np.ndarray, times: np.ndarray) -> dict[int, int]:
    assert ids.dtype == times.dtype == np.int64
    assert len(set(ids.tolist())) == len(ids), "an id that stands twice would be penalised twice"
    return dict(zip(ids.tolist(), times.tolist(), strict=True))


@pytest.mark.parametrize("beginning", [(), (5, 6), tuple(range(300))])
def test_counts_of_a_growing_list(beginning):
    """64 and 128 distinct ids are where the arrays behind it grow."""
    rng = random.Random(3)
    ids: list[int] = []
    counts = TokenCounts(beginning)
    for length in (0, 0, 1, 2, 63, 64, 65, 66, 127, 130, 400, 401):
        ids += [rng.randrange(500) for _ in range(length - len(ids))]
        expected: dict[int, int] = {}
        for token_id in (*beginning, *ids):
            expected[token_id] = expected.get(token_id, 0) + 1
        assert as_dict(*counts.of(ids)) == expected


def test_a_kept_row_samples_as_a_new_one():
    """The engine keeps one row per sequence for its whole life; a token not counted is penalised less."""
    params = Sampling(temperature=0.9, presence_penalty=0.7, frequency_penalty=1.1, repetition_penalty=1.4)
    prompt, vocabulary = [3, 3, 40, 7], 90
    sampler = Sampler(vocabulary)
    output: list[int] = []
    kept = SamplingRow(params, prompt, output, 5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        logits = torch.randn(1, vocabulary, generator=generator)
        (token,) = sampler.sample(logits, [kept])
        assert token == sampler.sample(logits, [SamplingRow(params, prompt, list(output), 5)])[0]
        output.append(token.token_id)
    assert len(set(output)) > 64
