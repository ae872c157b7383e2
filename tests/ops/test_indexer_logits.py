"""The scorer against fp64 on the stored values, with everything around its inputs and outputs poisoned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.ops.indexer_cases import (
    IndexerCase,
    bits,
    calc_diff,
    is_poison,
    keys_fp64,
    logits_fp64,
    make_case,
    poisoned_output,
    query_fp64,
)

from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops import indexer_logits, plan_indexer, write_index_keys
from tetrad.ops.index_keys.encoding import encode

SHAPES = [
    ("fp4", 64, 128),
    ("fp4", 3, 32),
    ("fp4", 20, 64),
    ("fp4", 1, 256),
    ("fp8", 32, 128),
    ("fp8", 5, 40),
    ("fp8", 2, 1),
    ("bf16", 7, 24),
    ("bf16", 64, 128),
    ("fp32", 4, 17),
    ("fp32", 33, 64),
]
IDS = [f"{dtype}-H{heads}-D{dim}" for dtype, heads, dim in SHAPES]

# descending, and every length around a page, a block and nothing; then a prefill whose rows see more and more
RAGGED = [[257], [256], [255, 256], [65, 65, 65], [64], [63], [1], [0]]
PREFILL = [[(position + 1) // 4 for position in range(1000, 1041)], list(range(3, 520, 47))]


def scores(case: IndexerCase, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, the allocation around it)."""
    out, memory = poisoned_output(case.q.shape[0], case.width)
    result = indexer_logits(*case.arguments, width=case.width, out=out, **options)
    assert result is out
    return out, memory


def check_against_fp64(case: IndexerCase) -> None:
    out, memory = scores(case)
    expected = logits_fp64(case)
    seen = torch.arange(case.width) < case.visible_end.unsqueeze(1)
    got = [out[row, : len(values)].numpy() for row, values in enumerate(expected)]
    assert calc_diff(np.concatenate(got), np.concatenate(expected)) < 5e-6
    for row, values in enumerate(expected):
        assert calc_diff(got[row], values) < 5e-6, f"row {row}"
    assert is_poison(out[~seen]).all(), "columns behind the visible end were written"
    assert is_poison(memory).sum() == memory.numel() - int(seen.sum()), "memory around the scores was written"


@pytest.mark.parametrize(("dtype", "heads", "dim"), SHAPES, ids=IDS)
@pytest.mark.parametrize("ends", [RAGGED, PREFILL, PREFILL + RAGGED + PREFILL[1:]], ids=["ragged", "prefill", "mixed"])
def test_equals_fp64_on_stored_values(dtype, heads, dim, ends):
    """Every other byte of the cache is NaN and every other table entry out of range: reading one of them would show."""
    case = make_case(dtype, heads, dim, ends, padding=2, width=530)
    before = case.cache.clone()
    check_against_fp64(case)
    assert torch.equal(case.cache, before)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 511, 512, 513])
def test_every_length(length):
    """The width is exactly the length, so the allocation ends where the last column does."""
    check_against_fp64(make_case("fp4", 8, 64, [[length]], seed=length, extra_stride=0))


def test_shared_pages_score_alike():
    """Requests that share a prefix point at the same pages; each keeps its own tail."""
    case = make_case("fp4", 4, 64, [[150], [150]])
    tables = case.block_tables.clone()
    tables[1, :2] = tables[0, :2]
    shared = replace(
        case,
        block_tables=tables,
        q=case.q[:1].repeat(2, 1, 1),
        q_scale=case.q_scale[:1].repeat(2, 1, 1),
        weights=case.weights[:1].repeat(2, 1),
    )
    check_against_fp64(shared)
    out, _ = scores(shared)
    assert torch.equal(bits(out[0, :128]), bits(out[1, :128]))
    assert not torch.equal(out[0, 128:], out[1, 128:])


def test_what_lies_behind_the_end_changes_no_bit():
    """Stale keys and stale page ids behind the visible end belong to an earlier owner of the memory."""
    case = make_case("fp4", 4, 32, [[70, 71, 100], [5]])
    expected, _ = scores(case)
    stale = case.cache.clone()
    size, scale_size = 16, 1
    for request, end in ((0, 100), (1, 5)):
        page, place = int(case.block_tables[request, end // 64]), end % 64
        stale[page, place * size : 64 * size] = 0x55
        stale[page, 64 * size + place * scale_size :] = 0x80
    tables = torch.where(case.block_tables.abs() < case.cache.shape[0], case.block_tables, 0)
    got, _ = scores(replace(case, cache=stale, block_tables=tables))
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("spread", [10, 45, 46, 47, 60, 100, 127])
@pytest.mark.parametrize("dtype", ["fp4", "fp8"])
def test_wide_spreads_of_scales(dtype, spread):
    """A scale of 2^127 makes fp32 values infinite and one of 2^-127 makes them subnormal, but their product may be an
    ordinary number. Where the score is a normal fp32 number it must be that number."""
    case = make_case(dtype, 3, 64, [[300, 290], list(range(60, 75))], spread=spread, seed=spread)
    expected = logits_fp64(case)
    queries, weights = np.abs(query_fp64(case)), np.abs(case.weights.numpy().astype(np.float64))
    out, _ = scores(case)
    compared = 0
    for row, values in enumerate(expected):
        keys = np.abs(keys_fp64(case, int(case.row_request[row]), len(values)))
        # what is summed up, without its signs: the rounding errors are relative to this
        terms = (weights[row][:, None] * (queries[row] @ keys.T)).sum(0)
        normal = (np.abs(values) > 2.0**-126) & (np.abs(values) < 2.0**127.9)
        error = np.abs(out[row, : len(values)].numpy().astype(np.float64) - values)
        assert (error[normal] <= 2e-6 * terms[normal]).all()
        ordinary = normal & (terms < 1e3 * np.abs(values))
        assert (error[ordinary] <= 1e-4 * np.abs(values[ordinary])).all()
        compared += int(ordinary.sum())
    assert compared > 100


def test_scales_that_only_fit_together():
    """Two groups of key and query with opposite extremes: each product is 1, though the values span 2^254."""
    case = make_case("fp4", 1, 64, [[1]])
    q_scale = torch.tensor([[[254, 1]]], dtype=torch.uint8)
    ones = torch.full_like(case.q, 0x22)
    cache = case.cache.clone()
    page = int(case.block_tables[0, 0])
    cache[page, :32] = 0x22
    cache[page, 64 * 32 : 64 * 32 + 2] = torch.tensor([0, 253], dtype=torch.uint8)
    case = replace(case, q=ones, q_scale=q_scale, cache=cache, weights=torch.ones(1, 1))
    out, _ = scores(case)
    assert out.item() == 64.0


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("dtype", ["fp4", "fp8"])
def test_nan_scale_of_a_key(dtype, rows):
    """A key that was broken when it was written must score NaN, whatever the weights: relu(NaN) as 0 would hide it."""
    case = make_case(dtype, 4, 32, [[300] * rows])
    expected, _ = scores(case)
    cache = case.cache.clone()
    entry = 130
    size, scale_size = (16, 1) if dtype == "fp4" else (32, 4)
    start = 64 * size + (entry % 64) * scale_size
    cache[int(case.block_tables[0, entry // 64]), start : start + scale_size] = 0xFF
    weights = case.weights.clone()
    weights[0] = 0.0
    got, _ = scores(replace(case, cache=cache, weights=weights))
    assert got[:, entry].isnan().all()
    others = torch.arange(300) != entry
    assert torch.equal(bits(got[1:, others]), bits(expected[1:, others]))
    assert (got[0, others] == 0).all()


def test_nan_scale_of_a_query():
    """It spoils its own row and no other, neither in a batch of requests nor in a prefill."""
    case = make_case("fp4", 4, 64, [[70], [90], list(range(80, 95))])
    expected, _ = scores(case)
    for row in (1, 7):
        scale = case.q_scale.clone()
        scale[row, 2, 1] = 255
        got, _ = scores(replace(case, q_scale=scale))
        assert got[row, : case.visible_end[row]].isnan().all()
        others = torch.arange(case.q.shape[0]) != row
        assert torch.equal(bits(got[others]), bits(expected[others]))


def test_scale_byte_zero_is_two_to_minus_127():
    """The smallest byte is a subnormal in fp32: taken for zero, or flushed, it would lose the score."""
    case = make_case("fp4", 1, 32, [[2]])
    cache = case.cache.clone()
    page = int(case.block_tables[0, 0])
    cache[page, :32] = 0x22
    cache[page, 64 * 16 : 64 * 16 + 2] = torch.tensor([0, 1], dtype=torch.uint8)
    ones, scale = torch.full_like(case.q, 0x22), torch.full_like(case.q_scale, 227)
    case = replace(case, q=ones, q_scale=scale, cache=cache, weights=torch.ones(1, 1))
    out, _ = scores(case)
    assert out.tolist() == [[32 * 2.0**-27, 32 * 2.0**-26]]


def test_zero_groups_score_zero():
    """The writer stores byte 1 for a group of zeros; a query of zeros against any key is 0, not NaN."""
    case = make_case("fp4", 4, 64, [[300], [70]])
    zero = replace(case, q=torch.zeros_like(case.q), q_scale=torch.ones_like(case.q_scale))
    out, _ = scores(zero)
    assert (out[0, :300] == 0).all()
    assert (out[1, :70] == 0).all()
    layout = IndexLayout(IndexDtype.FP4, 64)
    cache = torch.zeros_like(case.cache, memory_format=torch.contiguous_format)
    write_index_keys(torch.zeros(64, 64), cache, torch.arange(64), layout)
    keys = replace(case, cache=cache, block_tables=torch.zeros_like(case.block_tables))
    out, _ = scores(keys)
    assert (out[0, :300] == 0).all()


def test_twenty_runs_are_bit_equal():
    case = make_case("fp4", 4, 64, RAGGED + PREFILL)
    expected, _ = scores(case)
    for _ in range(19):
        assert torch.equal(bits(scores(case)[0]), bits(expected))


@pytest.mark.parametrize(("dtype", "bound"), [("fp4", 0.02), ("fp8", 1e-3)])
def test_quantisation_error_on_unit_normals(dtype, bound):
    """Bounds the format and the writer together with the scorer: unit-normal keys, queries and weights."""
    torch.manual_seed(3)
    rows, heads, dim, length = 5, 64, 128, 700
    keys, queries, weights = torch.randn(length, dim), torch.randn(rows, heads, dim), torch.randn(rows, heads)
    layout = IndexLayout(dtype, dim, hadamard=False)
    cache = torch.full((11, layout.page_bytes), 0xFF, dtype=torch.uint8)
    write_index_keys(keys, cache, torch.arange(length), layout)
    q, q_scale = encode(queries, layout.dtype)
    out = indexer_logits(
        q,
        q_scale,
        weights,
        cache,
        torch.arange(11, dtype=torch.int32).unsqueeze(0),
        torch.zeros(rows, dtype=torch.int32),
        torch.full((rows,), length, dtype=torch.int32),
        width=length,
    )
    exact = (queries.double() @ keys.double().T).relu().mul(weights.double().unsqueeze(-1)).sum(1)
    assert calc_diff(out.numpy(), exact.numpy()) < bound


def test_infinite_bf16_key_is_not_made_nan():
    """Padding heads or channels with zeros must not meet an infinity: 0 * inf is NaN."""
    case = make_case("bf16", 3, 24, [[10]])
    cache = case.cache.clone()
    infinity = torch.tensor([float("inf")], dtype=torch.bfloat16).view(torch.uint8)
    cache[int(case.block_tables[0, 0]), 5 * 48 : 5 * 48 + 2] = infinity
    case = replace(case, cache=cache, q=case.q.abs(), weights=case.weights.abs())
    out, _ = scores(case)
    assert out[0, 5] == float("inf")
    assert out[0, :5].isfinite().all()


def test_nothing_to_score():
    """No rows, no columns, only padding, no pages: all are ordinary calls."""
    for ends, padding in (([], 0), ([[0]], 0), ([], 5), ([[0, 0], [0]], 1)):
        case = make_case("fp4", 2, 32, ends, padding=padding)
        out, memory = scores(case)
        assert out.shape == (case.q.shape[0], 0)
        assert is_poison(memory).all()
    case = make_case("fp4", 2, 32, [[0]], padding=3, width=9)
    case = replace(case, cache=case.cache[:0], block_tables=case.block_tables[:, :0])
    assert is_poison(scores(case)[0]).all()


def test_padding_between_rows():
    """Padding need not be at the end: a captured step may hold it anywhere between requests."""
    case = make_case("fp4", 4, 32, [[70] * 3, [80] * 12], padding=1)
    order = [15, 0, 1, 2, 15, *range(3, 15), 15]
    whole, _ = scores(case)
    got, _ = scores(case.rows(order))
    assert torch.equal(bits(got), bits(whole[order]))


def test_rows_of_the_output_may_be_apart():
    """A buffer of the largest width serves every step; the columns behind ``width`` stay as they are."""
    case = make_case("fp4", 4, 32, [[70] * 3, [80] * 12, [81]])
    expected, _ = scores(case)
    memory, _ = poisoned_output(case.q.shape[0], case.width + 19)
    got = indexer_logits(*case.arguments, width=case.width, out=memory[:, : case.width])
    assert torch.equal(bits(got), bits(expected))
    assert is_poison(memory[:, case.width :]).all()


def test_allocates_when_given_nothing():
    case = make_case("fp8", 4, 32, [[70]])
    got = indexer_logits(*case.arguments, width=70)
    assert got.shape == (1, 70)
    assert got.dtype == torch.float32
    assert torch.equal(bits(got), bits(scores(case)[0]))


def test_plan_changes_nothing_and_must_fit():
    """A plan for another step would make a kernel skip rows, or write outside the scores."""
    case = make_case("fp4", 4, 32, [[70] * 3, [300]])
    plan = plan_indexer(case.row_request, case.visible_end, width=case.width)
    assert torch.equal(bits(scores(case, plan=plan)[0]), bits(scores(case)[0]))
    with pytest.raises(ValueError, match="made for 4 rows, width 301"):
        scores(case, plan=plan_indexer(case.row_request, case.visible_end, width=301))
    with pytest.raises(ValueError, match="made for 3 rows"):
        scores(case, plan=plan_indexer(case.row_request[:3], case.visible_end[:3], width=case.width))
