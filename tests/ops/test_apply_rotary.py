"""Rotary embedding against a multiplication of complex numbers."""

from __future__ import annotations

import cmath

import pytest
import torch
from tests.row_splits import ROWS, assert_row_invariant
from torch import Tensor

from tetrad.ops.rotary import apply_rotary


def case(*shape: int, rope: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(x, angles fp32 [N, rope / 2])."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    return x, torch.rand(shape[0], rope // 2, generator=generator) * 6.3


def turn(vector: list[float], angle: list[float], sign: int) -> list[float]:
    """The last channels as complex numbers (2i, 2i + 1), each times e^(i angle)."""
    rope = 2 * len(angle)
    result = vector[: len(vector) - rope]
    for pair, theta in enumerate(angle):
        a, b = vector[len(vector) - rope + 2 * pair :][:2]
        turned = complex(a, b) * cmath.exp(1j * sign * theta)
        result += [turned.real, turned.imag]
    return result


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "rope"), [((5, 24), 10), ((3, 7, 20), 4), ((9, 6), 6), ((2, 3, 2, 8), 2)], ids=str)
def test_against_complex_numbers(shape, rope, dtype, inverse):
    """Neighbours form a pair; every head of a row turns by the row's angles; computed in fp32, rounded once."""
    x, angle = case(*shape, rope=rope, dtype=dtype)
    got = apply_rotary(x, angle.cos(), angle.sin(), inverse=inverse)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert torch.equal(got[..., : x.shape[-1] - rope], x[..., : x.shape[-1] - rope])
    expected = [
        turn(vector, angle[row].tolist(), -1 if inverse else 1)
        for row in range(shape[0])
        for vector in x[row].double().view(-1, shape[-1]).tolist()
    ]
    half_unit = 0.501 * torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(
        got.double().view(-1, shape[-1]), torch.tensor(expected).double(), rtol=half_unit, atol=1e-6
    )


def test_inverse_undoes():
    """The outputs of attention are turned back by the query's own angles."""
    x, angle = case(6, 5, 32, rope=16)
    there = apply_rotary(x, angle.cos(), angle.sin())
    torch.testing.assert_close(apply_rotary(there, angle.cos(), angle.sin(), inverse=True), x)


def test_products_depend_on_the_distance_alone():
    """What rotary embedding is for: <R_p q, R_t k> is the same for all p and t with one p - t."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 16, generator=generator)
    frequency = torch.rand(8, generator=generator)

    def at(position: int, vector: Tensor) -> Tensor:
        angle = (position * frequency).unsqueeze(0)
        return apply_rotary(vector.unsqueeze(0), angle.cos(), angle.sin())[0]

    torch.testing.assert_close(at(19, q) @ at(12, k), at(7, q) @ k)
    assert (at(19, q) @ at(12, k) - at(19, q) @ at(13, k)).abs() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inverse", [False, True])
def test_rows_do_not_depend_on_each_other(dtype, inverse):
    """Keys are rotated before they are quantised."""
    x, angle = case(ROWS, 3, 22, rope=14, dtype=dtype)
    assert_row_invariant(lambda *row: apply_rotary(*row, inverse=inverse), x, angle.cos(), angle.sin())


@pytest.mark.parametrize("shape", [(3, 64, 128), (5, 7)])
@pytest.mark.parametrize("inverse", [False, True])
def test_without_channels_to_rotate(shape, inverse):
    """A head without rotary channels was once a raw error of a view that could not tell its own size."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    angles = torch.empty(shape[0], 0)
    assert torch.equal(apply_rotary(x, angles, angles, inverse=inverse), x)
