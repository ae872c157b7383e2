"""Hyper-connections against their formulas, in fp64 and one row at a time."""

from __future__ import annotations

import math

import pytest
import torch
from tests.row_splits import ROWS, assert_row_invariant
from torch import Tensor

from tetrad.models.hyper_connections import MixWeights, collapse, expand, head_collapse, mix_weights, sinkhorn

NORM_EPS, HC_EPS = 0.02, 0.03  # large, so that a missing one shows


def normal(*shape: int, seed: int = 0, deviation: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * deviation


def parameters(count: int, dim: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """(fn, scale, base)."""
    return (
        normal(outputs, count * dim, seed=1, deviation=(count * dim) ** -0.5),
        normal(3, seed=2) + 1,
        normal(outputs, seed=3),
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def normalised_rows(matrix: list[list[float]], eps: float) -> list[list[float]]:
    return [[value / (sum(row) + eps) for value in row] for row in matrix]


def transposed(matrix: list[list[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*matrix, strict=True)]


def sinkhorn_formula(logits: list[list[float]], eps: float, iterations: int) -> list[list[float]]:
    matrix = normalised_rows([[math.exp(value) for value in row] for row in logits], 0.0)
    matrix = [[value + eps for value in row] for row in matrix]
    for iteration in range(iterations):
        if iteration:
            matrix = normalised_rows(matrix, eps)
        matrix = transposed(normalised_rows(transposed(matrix), eps))
    return matrix


def mixes_formula(streams: Tensor, fn: Tensor) -> list[float]:
    x = streams.double().flatten()
    return (fn.double() @ x / math.sqrt(float((x * x).mean()) + NORM_EPS)).tolist()


@pytest.mark.parametrize(("count", "dim", "iterations"), [(4, 20, 20), (4, 36, 2), (2, 24, 1), (3, 4, 3)])
def test_weights(count, dim, iterations):
    """pre, post and comb of every row. One statistic over all N * D channels, three scales, eps where it belongs."""
    fn, scale, base = parameters(count, dim, 2 * count + count**2)
    streams = normal(9, count, dim) * torch.logspace(-2, 2, 9).view(-1, 1, 1)
    weights = mix_weights(streams, fn, scale, base, norm_eps=NORM_EPS, hc_eps=HC_EPS, sinkhorn_iters=iterations)
    for row in range(len(streams)):
        mixes = mixes_formula(streams[row], fn)
        pre = [sigmoid(mixes[j] * float(scale[0]) + float(base[j])) + HC_EPS for j in range(count)]
        post = [2 * sigmoid(mixes[count + j] * float(scale[1]) + float(base[count + j])) for j in range(count)]
        place = [[2 * count + count * j + k for k in range(count)] for j in range(count)]
        logits = [[mixes[i] * float(scale[2]) + float(base[i]) for i in line] for line in place]
        comb = sinkhorn_formula(logits, HC_EPS, iterations)
        for got, expected in ((weights.pre, pre), (weights.post, post), (weights.comb, comb)):
            torch.testing.assert_close(got[row].double(), torch.tensor(expected).double(), rtol=2e-5, atol=1e-6)


def test_comb_is_doubly_stochastic():
    """After 20 rounds rows and columns sum to 1; after 2 only the columns do, since a round ends with them."""
    logits = normal(50, 4, 4, deviation=2.0)
    comb = sinkhorn(logits, 1e-6, 20)
    assert (comb > 0).all()
    torch.testing.assert_close(comb.sum(1), torch.ones(50, 4), rtol=0, atol=1e-5)
    assert (comb.sum(2) - 1).abs().median() < 1e-4
    comb = sinkhorn(logits, 1e-6, 2)
    torch.testing.assert_close(comb.sum(1), torch.ones(50, 4), rtol=0, atol=1e-5)
    assert (comb.sum(2) - 1).abs().amax() > 1e-2


def test_sinkhorn_of_large_logits_is_finite():
    """exp of a logit above 88 is infinite: the largest of a row has to be taken off first."""
    comb = sinkhorn(torch.tensor([[[500.0, -500.0], [400.0, 500.0]]]), 1e-6, 20)
    torch.testing.assert_close(comb[0], torch.eye(2), rtol=0, atol=1e-4)


def test_orientation():
    """comb[j, k] takes stream j to stream k; post[k] adds the output to stream k; pre[j] reads stream j."""
    streams = normal(1, 4, 8)
    comb = torch.zeros(1, 4, 4)
    comb[0, 0, 2] = 1.0
    post = torch.tensor([[0.0, 3.0, 0.0, 0.0]])
    output = normal(1, 8, seed=1)
    new = expand(streams, output, MixWeights(post, post, comb))
    torch.testing.assert_close(new[0], torch.stack((0 * output[0], 3 * output[0], streams[0, 0], 0 * output[0])))
    torch.testing.assert_close(collapse(streams, torch.tensor([[0.0, 0.0, 0.0, 2.0]])), 2 * streams[:, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_collapse_and_expand(dtype):
    """Sums in fp32 and rounded once: adding streams up in bf16 would be off by more than half a unit."""
    streams, output = normal(11, 4, 20).to(dtype), normal(11, 20, seed=1).to(dtype)
    weights = MixWeights(normal(11, 4, seed=2), normal(11, 4, seed=3), normal(11, 4, 4, seed=4))
    expected = torch.zeros(11, 20).double()
    new = torch.zeros(11, 4, 20).double()
    for row in range(11):
        for j in range(4):
            expected[row] += weights.pre[row, j].double() * streams[row, j].double()
            new[row, j] += weights.post[row, j].double() * output[row].double()
            for k in range(4):
                new[row, k] += weights.comb[row, j, k].double() * streams[row, j].double()
    half_unit = 0.501 * torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(collapse(streams, weights.pre).double(), expected, rtol=half_unit, atol=1e-6)
    torch.testing.assert_close(expand(streams, output, weights).double(), new, rtol=half_unit, atol=1e-6)
    assert collapse(streams, weights.pre).dtype == expand(streams, output, weights).dtype == dtype


def test_head_collapse():
    """The head has weights of its own, with eps added like those before a sub-layer."""
    fn, scale, base = parameters(4, 20, 4)
    streams = normal(5, 4, 20)
    got = head_collapse(streams, fn, scale[:1], base, norm_eps=NORM_EPS, hc_eps=HC_EPS)
    for row in range(5):
        mixes = mixes_formula(streams[row], fn)
        expected = sum(
            (sigmoid(mixes[j] * float(scale[0]) + float(base[j])) + HC_EPS) * streams[row, j].double() for j in range(4)
        )
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_each_other(dtype):
    """Mixing weights are computed from all channels of a row and must not round differently beside other rows."""
    fn, scale, base = parameters(4, 52, 24)
    streams, output = normal(ROWS, 4, 52).to(dtype), normal(ROWS, 52, seed=1).to(dtype)

    def mix(streams: Tensor, output: Tensor) -> tuple[Tensor, ...]:
        weights = mix_weights(streams, fn, scale, base, norm_eps=1e-6, hc_eps=1e-6, sinkhorn_iters=20)
        return (*weights, collapse(streams, weights.pre), expand(streams, output, weights))

    assert_row_invariant(mix, streams, output)
    head_fn, head_scale, head_base = parameters(4, 52, 4)
    assert_row_invariant(
        lambda x: head_collapse(x, head_fn, head_scale[:1], head_base, norm_eps=1e-6, hc_eps=1e-6), streams
    )
