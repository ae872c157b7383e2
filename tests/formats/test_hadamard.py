"""The rotation against the matrix of its definition, H[j, k] = (-1)^popcount(j & k)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tetrad.formats import hadamard


def sylvester(size: int) -> torch.Tensor:
    """The matrix, element by element, in fp64."""
    signs = [[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    return torch.tensor(signs, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 32, 64, 128, 256])
def test_matches_the_matrix(size: int) -> None:
    """Another order of rows (Walsh's, or a bit reversal) also preserves dot products, but is not what was trained."""
    x = torch.randn(3, 5, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    want = x @ sylvester(size).T / size**0.5
    torch.testing.assert_close(hadamard.rotate(x), want, rtol=0, atol=1e-13)
    torch.testing.assert_close(hadamard.rotate(x.float()).double(), want, rtol=0, atol=3e-6)


def test_integers_are_exact() -> None:
    """Sums of integers are exact in fp32, so only the one multiplication by fp32(128^-0.5) rounds: bit for bit."""
    x = torch.randint(-99, 100, (17, 128), generator=torch.Generator().manual_seed(0)).float()
    sums = (x.double() @ sylvester(128).T).numpy().astype(np.float32)
    want = sums * np.float32(128**-0.5)
    np.testing.assert_array_equal(hadamard.rotate(x).numpy(), want)
    halves = hadamard.rotate(x.bfloat16())
    assert halves.dtype == torch.bfloat16
    assert torch.equal(halves, torch.from_numpy(want).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_rounded_once(dtype: torch.dtype) -> None:
    """Passes made in bf16 would round seven times."""
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(hadamard.rotate(x), hadamard.rotate(x.float()).to(dtype))
    exact = x.double() @ sylvester(128).T / 128**0.5
    assert (hadamard.rotate(x).double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps


def test_rotating_twice_gives_the_vector_back_and_keeps_dot_products() -> None:
    q, k = torch.randn(2, 11, 128, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(hadamard.rotate(hadamard.rotate(q)), q, rtol=0, atol=2e-6)
    torch.testing.assert_close(hadamard.rotate(q) @ hadamard.rotate(k).T, q @ k.T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 33])
def test_a_vector_does_not_depend_on_its_batch(count: int) -> None:
    """A matrix library rounds differently for other numbers of rows, and one bit before FP4 can flip a token."""
    x = torch.randn(33, 128, generator=torch.Generator().manual_seed(3))
    whole = hadamard.rotate(x)
    assert torch.equal(hadamard.rotate(x[:count]), whole[:count])
    assert torch.equal(hadamard.rotate(x[33 - count :].t().contiguous().t()), whole[33 - count :])
    assert torch.equal(hadamard.rotate(x.view(3, 11, 128)), whole.view(3, 11, 128))


def test_one_nan_stays_in_its_vector_and_the_input_is_untouched() -> None:
    x = torch.ones(3, 8)
    x[1, 5] = torch.nan
    before = x.clone()
    y = hadamard.rotate(x)
    assert y.isnan().all(dim=-1).tolist() == [False, True, False]
    assert torch.equal(y[0], torch.tensor([8**0.5] + [0.0] * 7))
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    assert hadamard.rotate(torch.ones(2, 1)).data_ptr() != x.data_ptr()


def test_gradient_is_the_rotation_itself() -> None:
    x = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4), requires_grad=True)
    weight = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    (hadamard.rotate(x) * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, hadamard.rotate(weight), rtol=0, atol=1e-14)


def test_empty_batch() -> None:
    assert hadamard.rotate(torch.zeros(0, 64)).shape == (0, 64)


@pytest.mark.parametrize("shape", [(3, 96), (5,), (2, 0), ()])
def test_other_lengths_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="power of two") as error:
        hadamard.rotate(torch.zeros(shape))
    assert str(list(shape)) in str(error.value)


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        hadamard.rotate(torch.zeros(8, dtype=torch.int64))
