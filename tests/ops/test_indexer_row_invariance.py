"""A row's scores have the same bits whatever else is in the call.

One unit in the last place, in a library that picks another matrix kernel for another number of rows, would let two
scores change places, and then tokens, only because another request was served in the same step.
"""

from __future__ import annotations

import random
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from tests.ops.indexer_cases import IndexerCase, bits, make_case

from tetrad.ops import indexer_logits

reference = import_module("tetrad.ops.indexer_logits.reference")

SHAPES = [
    ("fp4", 32, 128),
    ("fp4", 5, 64),
    ("fp8", 7, 40),
    ("fp8", 1, 1),
    ("bf16", 9, 24),
    ("fp32", 6, 5),
    ("fp32", 9, 128),
]
ENDS = [[300, 301, 302], [700], list(range(246, 262)), [64], [1, 1], list(range(508, 517)), [257], [255]]

SPREAD = 14
"""Scales from 2^-14 to 2^14: with scales of one size the products of 4-bit and 8-bit values, and their sums, are exact
in fp32, and no order of summation could show."""


@pytest.fixture(autouse=True)
def two_threads():
    """One thread, as elsewhere in the suite, would hide it: a library splits a single product among its threads, with
    other kernels at the edges of the parts."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def scores(case: IndexerCase) -> torch.Tensor:
    out = torch.zeros((case.q.shape[0], case.width))
    return bits(indexer_logits(*case.arguments, width=case.width, out=out))


@pytest.fixture(params=SHAPES, ids=[f"{dtype}-H{heads}-D{dim}" for dtype, heads, dim in SHAPES])
def case(request) -> IndexerCase:
    return make_case(*request.param, ENDS, spread=SPREAD)


def test_alone_equals_together(case):
    """Decode of one request (a single row), against the same row in a prefill or among other requests."""
    together = scores(case)
    for row in range(case.q.shape[0]):
        assert torch.equal(scores(case.rows([row])), together[row : row + 1]), f"row {row}"


def test_any_composition(case):
    """Parts of requests beside parts of others, as chunked prefill mixed with decode makes them."""
    together = scores(case)
    dice = random.Random(4)
    for _ in range(8):
        rows = [row for row in range(case.q.shape[0]) if dice.random() < dice.choice((0.1, 0.5, 0.9))]
        assert torch.equal(scores(case.rows(rows)), together[rows])


@pytest.mark.parametrize("chunk_bytes", [1, 1_000_000])
def test_chunking_inside_changes_nothing(case, chunk_bytes, monkeypatch):
    """The memory that is set aside for temporaries decides how many rows share a product, not what comes out."""
    together = scores(case)
    monkeypatch.setattr(reference, "_CHUNK_BYTES", chunk_bytes)
    assert torch.equal(scores(case), together)


@pytest.mark.parametrize("many_rows", [1, 1000])
def test_both_paths_agree(case, many_rows, monkeypatch):
    """Requests with many rows share their keys in place, others get copies in a batch: the same bits either way."""
    together = scores(case)
    monkeypatch.setattr(reference, "_MANY_ROWS", many_rows)
    assert torch.equal(scores(case), together)


def test_narrower_width_changes_nothing(case):
    together = scores(case)
    row = 2
    alone = replace(case.rows([row]), width=int(case.visible_end[row]))
    assert torch.equal(scores(alone), together[row : row + 1, : alone.width])


def test_extreme_scales_of_a_neighbour_change_nothing():
    """Scores beyond the range of fp32 products take a detour; rows and keys without extreme scales must not notice."""
    case = make_case("fp4", 5, 64, ENDS, spread=SPREAD)
    together = scores(case)
    scale = case.q_scale.clone()
    scale[[0, 10]] = 200
    cache = case.cache.clone()
    page = int(case.block_tables[2, 0])
    cache[page, 64 * 32 + 7 * 2] = 20
    got = scores(replace(case, q_scale=scale, cache=cache))
    rows = torch.tensor([row for row in range(case.q.shape[0]) if row not in (0, 10)])
    columns = torch.arange(case.width) != 7
    assert torch.equal(got[rows][:, columns], together[rows][:, columns])
    other_requests = rows[case.row_request[rows] != 2]
    assert torch.equal(got[other_requests], together[other_requests])
