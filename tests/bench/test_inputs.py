"""What the ops are timed on: real arguments, cold ones, and no more memory than was said."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.indexer_cases import IndexerCase, keys_fp64, query_fp64
from tetrad.bench.cases import Case, Kind, Op, Shape
from tetrad.bench.costs import cost_of
from tetrad.bench.inputs import InputSet, footprint_of, make_inputs
from tetrad.geometry import IndexDtype
from tetrad.ops import IndexerPlan

CPU = torch.device("cpu")
DECODE, PREFILL = Shape(Kind.DECODE, 3, 150, 2), Shape(Kind.PREFILL, 1, 333, 20)


def make_case(op: Op, shape: Shape, dtype: str = "fp4") -> Case:
    return Case(op, shape, IndexDtype(dtype) if op.reads_keys else None, 5, 64, 40)


def as_oracle_case(inputs: InputSet) -> IndexerCase:
    """The same for the oracle of the ops' tests."""
    dtype = str(inputs.case.dtype)
    return IndexerCase(*inputs.scorer_arguments, inputs.width, dtype, inputs.case.head_dim)


@pytest.mark.parametrize("dtype", IndexDtype)
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=str)
def test_values_are_finite_and_differ(dtype, shape):
    """A NaN would make every back end wrong, and zeros would make none of them so."""
    inputs = make_inputs(make_case(Op.SCORE, shape, dtype), 2, CPU)
    for each in map(as_oracle_case, inputs):
        for values in (query_fp64(each), keys_fp64(each, 0, shape.entries)):
            assert np.isfinite(values).all()
            assert values.std() > 0.1
            assert (values < 0).mean() > 0.3
    first, second = (keys_fp64(as_oracle_case(each), 0, shape.entries) for each in inputs)
    assert not np.array_equal(first, second)


def test_rows():
    decode, prefill = (make_inputs(make_case(Op.PLAN, shape), 1, CPU)[0] for shape in (DECODE, PREFILL))
    assert decode.row_request.tolist() == [0, 0, 1, 1, 2, 2]
    assert decode.visible_end.tolist() == [150] * 6
    assert prefill.row_request.tolist() == [0] * 20
    assert prefill.visible_end.tolist() == list(range(314, 334))


def test_pages_are_scattered_and_not_shared():
    """Sets that read the same pages would find them in the cache; pages in order would be read ahead."""
    inputs = make_inputs(make_case(Op.SCORE, DECODE), 4, CPU)
    pages = torch.cat([each.block_tables.flatten() for each in inputs])
    assert sorted(pages.tolist()) == list(range(4 * 3 * 3))
    assert pages.tolist() != sorted(pages.tolist())
    assert all(each.cache.data_ptr() == inputs[0].cache.data_ptr() for each in inputs)


def test_a_small_pool_is_used_again(monkeypatch):
    """1 GiB is the limit. Within a set no page may stand twice even then."""
    monkeypatch.setattr("tetrad.bench.inputs._POOL_BYTES", 11 * 64 * 34)
    inputs = make_inputs(make_case(Op.SCORE, DECODE), 4, CPU)
    assert inputs[0].cache.shape[0] == 11
    for each in inputs:
        assert len(set(each.block_tables.flatten().tolist())) == 9
    monkeypatch.setattr("tetrad.bench.inputs._POOL_BYTES", 5 * 64 * 34)
    assert make_inputs(make_case(Op.SCORE, DECODE), 4, CPU)[0].cache.shape[0] == 9


@pytest.mark.parametrize("op", Op)
def test_the_same_on_every_run(op):
    first, second = (make_inputs(make_case(op, DECODE), 2, CPU)[1] for _ in range(2))
    for name in ("q", "q_scale", "weights", "cache", "block_tables", "row_request", "visible_end"):
        one, other = getattr(first, name), getattr(second, name)
        assert (one is None and other is None) or torch.equal(one, other), name


@pytest.mark.parametrize("dtype", IndexDtype)
@pytest.mark.parametrize("op", Op)
def test_memory_is_what_was_said(op, dtype):
    """A case that needs more than it says ends in an out-of-memory error instead of a skipped row."""
    case = make_case(op, DECODE, dtype)
    footprint = footprint_of(case, 0)
    inputs = make_inputs(case, footprint.sets, CPU)
    storages = {}
    for each in inputs:
        for value in (*each.scorer_arguments, each.logits, each.chosen):
            if value is not None:
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    assert sum(storages.values()) == footprint.bytes


def test_every_buffer_is_aligned():
    """Kernels load 16 bytes at once, and some compile twice, for aligned and for other arguments."""
    inputs = make_inputs(make_case(Op.TOTAL, DECODE), 1, CPU)[0]
    others = (inputs.visible_end, inputs.q, inputs.q_scale, inputs.weights, inputs.block_tables, inputs.chosen)
    assert all((other.data_ptr() - inputs.row_request.data_ptr()) % 256 == 0 for other in others)


@pytest.mark.parametrize("op", [Op.SCORE, Op.TOPK, Op.TOTAL])
def test_sets_leave_the_cache_cold(op):
    """With fewer sets a call would find its inputs in the cache and seem faster than the memory."""
    case = make_case(op, DECODE)
    size = cost_of(case).bytes
    for cache in (size // 3, size, 10 * size):
        footprint = footprint_of(case, cache)
        assert footprint.cold
        assert footprint.sets >= 2
        assert footprint.sets * size > 4 * cache
        assert footprint.sets == 2 or (footprint.sets - 1) * size <= 4 * cache


def test_what_cannot_be_cold_says_so():
    assert not footprint_of(make_case(Op.PLAN, DECODE), 60 << 20).cold
    assert footprint_of(make_case(Op.PLAN, DECODE), 60 << 20).sets == 64
    tiny = footprint_of(make_case(Op.SCORE, Shape(Kind.DECODE, 1, 64, 1)), 60 << 20)
    assert (tiny.sets, tiny.cold) == (2048, False)
    assert not footprint_of(make_case(Op.SCORE, DECODE), 0).cold


def test_a_plan_type_is_what_the_op_makes():
    """The correctness check reads these two fields of a plan."""
    assert {"buffer", "block"} <= set(IndexerPlan.__dataclass_fields__)
