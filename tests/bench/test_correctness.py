"""The gate before the clock: right results pass, and each kind of wrong one is refused with its reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.bench.test_inputs import CPU, DECODE, PREFILL, as_oracle_case, make_case
from tests.ops.indexer_cases import calc_diff, logits_fp64
from tetrad.bench.cases import Op
from tetrad.bench.correctness import SCORE_GAPS, Oracle, choice_fault, difference_of, exact_scores, plan_fault, poison
from tetrad.bench.inputs import make_inputs
from tetrad.geometry import IndexDtype
from tetrad.ops import indexer_logits, plan_indexer, topk_indices


@pytest.mark.parametrize("dtype", IndexDtype)
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=str)
def test_the_oracle_agrees_with_the_tests_own(dtype, shape, monkeypatch):
    """Two oracles that share no code, to the last digits of fp64; pages in pieces, the last one not full."""
    monkeypatch.setattr("tetrad.bench.correctness._ENTRIES_AT_ONCE", 128)
    inputs = make_inputs(make_case(Op.SCORE, shape, dtype), 1, CPU)[0]
    for row, wanted in enumerate(logits_fp64(as_oracle_case(inputs))):
        got = exact_scores(inputs, row, int(inputs.visible_end[row])).numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", IndexDtype)
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=str)
def test_right_results_pass(dtype, shape):
    inputs = make_inputs(make_case(Op.TOTAL, shape, dtype), 1, CPU)[0]
    poison(inputs)
    scores = indexer_logits(*inputs.scorer_arguments, width=inputs.width, out=inputs.logits)
    chosen = topk_indices(scores, inputs.visible_end, inputs.case.k, out=inputs.chosen)
    assert Oracle(inputs).fault(chosen) is None
    assert Oracle(replace(inputs, case=make_case(Op.SCORE, shape, dtype))).fault(scores) is None
    assert Oracle(replace(inputs, case=make_case(Op.TOPK, shape))).fault(chosen) is None


def test_rows_that_are_looked_at():
    """The first and the last row are always among them, and no row that is not there."""
    for shape, rows in ((DECODE, [0, 1, 2, 3, 4, 5]), (PREFILL, [0, 3, 5, 8, 11, 14, 16, 19])):
        assert Oracle(make_inputs(make_case(Op.PLAN, shape), 1, CPU)[0]).rows == rows


@pytest.mark.parametrize("row", [0, 5])
@pytest.mark.parametrize("damage", ["nan", "unwritten", "scaled", "one entry", "other row"])
def test_wrong_scores(row, damage):
    inputs = make_inputs(make_case(Op.SCORE, DECODE), 1, CPU)[0]
    scores = indexer_logits(*inputs.scorer_arguments, width=inputs.width)
    oracle = Oracle(inputs)
    assert oracle.fault(scores) is None
    if damage == "nan":
        scores[row, 149] = float("nan")
    elif damage == "unwritten":
        poison(inputs)
        scores[row, 100:101] = inputs.logits[row, 100:101]
    elif damage == "scaled":
        scores[row] *= 1.01
    elif damage == "one entry":
        scores[row, 0] += 0.05 * scores[row].abs().max()
    else:
        scores[row] = scores[5 - row].clone()
    assert f"scores of row {row} differ" in (oracle.fault(scores) or "")


@pytest.mark.parametrize(
    ("result", "message"),
    [(None, "None"), (3, "int"), (torch.zeros(6, 149), "6, 149"), (torch.zeros(6, 150).double(), "float64")],
)
def test_results_of_another_form(result, message):
    assert message in (Oracle(make_inputs(make_case(Op.SCORE, DECODE), 1, CPU)[0]).fault(result) or "")


SCORES = torch.tensor([5.0, 1.0, 4.0, 4.0, 2.0, 3.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([0, 2, 3], None),
        ([0, 2, 3, 5], None),
        ([0, 1, 2, 3, 4, 5, 6, -1, -1], None),
        ([2, 3, 4], "1 of the best 3 places are missing, 1 worse"),
        ([0, 2, 3, 4], "0 of the best 4 places are missing, 1 worse"),
        ([2, 0, 3], "not ascending"),
        ([0, 2, 2], "not ascending"),
        ([0, 2, 7], "not among the 7"),
        ([0, 2, -1], "not among the 7"),
        ([0, 1, 2, 3, 4, 5, 6, 7, -1], "something else than -1"),
        ([0, 1, 2, 3, 4, 5, -1, -1, -1], "not among"),
        ([0, 1, 2, 3, 4, 5, 6, -2, -1], "something else than -1"),
    ],
)
def test_choices(places, message):
    """``[0, 2]`` and ``[0, 3]`` of equal scores are both right; everything else has one answer."""
    fault = choice_fault(torch.tensor(places, dtype=torch.int32), SCORES, 1e-5)
    assert fault is None if message is None else message in (fault or "")


@pytest.mark.parametrize("places", [[0, 2], [0, 3]])
def test_ties_may_go_either_way(places):
    assert choice_fault(torch.tensor(places, dtype=torch.int32), SCORES, 1e-5) is None


@pytest.mark.parametrize(("difference", "right"), [(0.9e-5, True), (1.2e-5, False)])
def test_the_gap_is_a_share_of_the_largest_score(difference, right):
    """fp32 sums in another order move a score by that much, whatever the size of the scores."""
    for size in (1e-20, 1.0, 1e20):
        scores = size * torch.tensor([1.0, 0.5 + difference, 0.5], dtype=torch.float64)
        places = torch.tensor([0, 2], dtype=torch.int32)
        assert (choice_fault(places, scores, 1e-5) is None) is right
        assert choice_fault(places, scores, 0.0) is not None


def test_plans():
    """The plan of the reference is right; a block too few, too many or twice, or a strange row, is not."""
    inputs = make_inputs(make_case(Op.PLAN, replace(DECODE, entries=1000)), 1, CPU)[0]

    def plan():
        return plan_indexer(inputs.row_request, inputs.visible_end, width=inputs.width)

    assert plan_fault(plan(), inputs) is None
    for unit, field, value, message in [
        (0, 0, -1, "1 visible blocks are in no work item, 0 in several"),
        (0, 0, 6, "a row that is not there"),
        (3, 3, 999, "another visible end"),
        (3, 1, 2, "1 visible blocks are in no work item, 1 in several"),
        (3, 2, 2, "blocks that its row does not see"),
        (3, 2, 0, "has no blocks"),
        (2, 2, 2, "0 visible blocks are in no work item, 1 in several"),
        (1, 1, -1, "does not see"),
    ]:
        broken = plan()
        assert broken.buffer[:4].tolist() == [[0, block, 1, 1000] for block in range(4)]
        broken.buffer[unit, field] = value
        assert message in (plan_fault(broken, inputs) or ""), (unit, field, value)


def test_the_difference():
    generator = np.random.default_rng(0)
    x = generator.standard_normal(1000)
    y = x + 1e-3 * generator.standard_normal(1000)
    for size in (1.0, 1e-200, 1e200):
        got = difference_of(torch.from_numpy(x * size), torch.from_numpy(y * size))
        assert got == pytest.approx(calc_diff(x, y), rel=1e-6)
    zeros = torch.zeros(3, dtype=torch.float64)
    assert difference_of(zeros, zeros) == 0.0
    assert difference_of(zeros, zeros + 1) == 1.0
    assert not difference_of(zeros, zeros * float("nan")) < 1


@pytest.mark.parametrize("dtype", IndexDtype)
def test_only_a_total_has_a_gap(dtype):
    """A total may take a place whose score is that little worse; a top-k of its own saw the scores and may not."""
    allowed = SCORE_GAPS[dtype]
    assert allowed == {"fp4": 1e-4, "fp8": 1e-3}.get(str(dtype), 1e-5)
    for op, difference, right in (
        (Op.TOTAL, 0.5 * allowed, True),
        (Op.TOTAL, 2 * allowed, False),
        (Op.TOPK, 0.5 * allowed, False),
    ):
        inputs = make_inputs(make_case(op, replace(DECODE, entries=300), str(dtype)), 1, CPU)[0]
        oracle = Oracle(inputs)
        k = inputs.case.k
        row = torch.linspace(1.0, 0.5, 300, dtype=torch.float64)
        row[k] = row[k - 1] - difference
        oracle._scores = [row.clone() for _ in oracle.rows]
        chosen = torch.arange(k, dtype=torch.int32).repeat(inputs.case.shape.total_rows, 1)
        assert oracle.fault(chosen) is None
        chosen[:, -1] = k
        assert (oracle.fault(chosen) is None) is right, (op, difference)
