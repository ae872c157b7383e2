"""FP8 bit for bit, with ml_dtypes' E4M3 and e8m0 as the oracle and plain numpy loops for groups and tiles."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tetrad.formats import fp8

LARGEST_FP32 = float(np.finfo(np.float32).max)


def rule(group: NDArray[np.float32]) -> tuple[NDArray[np.uint8], int]:
    """(E4M3 bytes, scale byte) of the finite values that share a scale, in fp64 after the fp32 product of the rule."""
    amax = np.maximum(np.abs(group).max(initial=np.float32(0)), np.float32(1e-4))
    mantissa, exponent = np.frexp(amax * np.float32(1 / 448))
    exponent = int(exponent) - (mantissa == 0.5)
    ratio = np.clip(group.astype(np.float64) / 2.0**exponent, -448, 448)
    return ratio.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), exponent + 127


def rule_by_groups(x: NDArray[np.float32], group: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    rows = x.reshape(-1, x.shape[-1])
    values = np.empty(rows.shape, np.uint8)
    scales = np.empty((rows.shape[0], -(-rows.shape[1] // group)), np.uint8)
    for row in range(rows.shape[0]):
        for index in range(scales.shape[1]):
            part = slice(index * group, (index + 1) * group)
            values[row, part], scales[row, index] = rule(rows[row, part])
    return values.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)


def spread_data(*shape: int, seed: int = 0) -> Tensor:
    """Gaussian data whose magnitude changes along the last dimension and from row to row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp2(6 * torch.rand(shape[-1], generator=generator))
    return x * torch.rand(*shape[:-1], 1, generator=generator)


def assert_groups_follow_rule(x: Tensor, group: int) -> None:
    values, scales = fp8.quantize_groups(x, group)
    want_values, want_scales = rule_by_groups(x.float().numpy(), group)
    np.testing.assert_array_equal(scales.numpy(), want_scales)
    np.testing.assert_array_equal(values.view(torch.uint8).numpy(), want_values)


def test_every_bf16_value_alone() -> None:
    """One value to a group, every finite bf16 number of both signs: scales, ties, E4M3 subnormals and -0."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()].unsqueeze(-1)
    got, scales = fp8.quantize_groups(values, 1)
    numbers = values.float().numpy()
    amax = np.maximum(np.abs(numbers), np.float32(1e-4))
    mantissa, exponent = np.frexp(amax * np.float32(1 / 448))
    exponent = exponent - (mantissa == 0.5)
    want = (numbers.astype(np.float64) / np.exp2(exponent.astype(np.float64))).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(scales.numpy(), exponent + 127)
    np.testing.assert_array_equal(got.view(torch.uint8).numpy(), want.view(np.uint8))


@pytest.mark.parametrize("top", [448.0, 230.0, 1e-5, 300 * 2.0**90])
def test_every_bf16_value_under_a_given_scale(top: float) -> None:
    """Groups of 64 whose last value fixes the scale: the values below reach every E4M3 code and every tie."""
    values = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.float() <= top]
    values = torch.cat((values, -values))
    padded = torch.cat((values, values.new_zeros(-values.numel() % 63))).view(-1, 63)
    x = torch.cat((padded, torch.full((padded.shape[0], 1), top, dtype=torch.bfloat16)), dim=1)
    assert_groups_follow_rule(x, 64)


def test_scale_at_every_edge() -> None:
    """448 * 2^k and its neighbours. fp32(1/448) is rounded, so the rule is that of the fp32 product, within one bit."""
    edges = (448 * 2.0 ** np.arange(-22.0, 119.0)).astype(np.float32)
    tops = np.stack((np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(np.inf))), axis=-1)
    values, scales = fp8.quantize_groups(torch.from_numpy(tops), 1)
    want_values, want_scales = rule_by_groups(tops, 1)
    np.testing.assert_array_equal(scales.numpy(), want_scales)
    np.testing.assert_array_equal(values.view(torch.uint8).numpy(), want_values)
    assert scales[:, 1].tolist() == list(range(127 - 22, 127 + 119))
    back = fp8.dequantize_groups(values, scales, 1).double().numpy()
    assert (np.abs(back[:, 1] - edges) == 0).all()
    for top, byte in zip(tops.flat, scales.flatten().tolist(), strict=True):
        assert Fraction(float(top)) <= 448 * (1 + Fraction(1, 2**22)) * Fraction(2) ** (byte - 127)


def test_floor_of_tiny_and_zero_groups() -> None:
    """Without the floor a group of zeros would divide by zero, and tiny noise would be blown up to full range."""
    x = torch.tensor([[0.0, -0.0], [1e-4, 0.0], [1e-9, -1e-9], [2.0**-149, 2.0**-130]])
    values, scales = fp8.quantize_groups(x, 2)
    assert scales.flatten().tolist() == [127 - 22] * 4
    assert values.view(torch.uint8)[0].tolist() == [0x00, 0x80]
    assert values.view(torch.uint8)[2].tolist() == [0x02, 0x82]  # 1e-9 / 2^-22 = 2.1 steps of 2^-9
    assert_groups_follow_rule(x, 2)


def test_largest_finite_value() -> None:
    values, scales = fp8.quantize_groups(torch.tensor([LARGEST_FP32, -LARGEST_FP32, 1.0]), 3)
    assert scales.tolist() == [247]
    assert values.float().tolist() == [256.0, -256.0, 0.0]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_broken_group_is_nan_and_alone(bad: float) -> None:
    x = spread_data(3, 100)
    broken = x.clone()
    broken[1, 99] = bad  # in the short last group
    values, scales = fp8.quantize_groups(broken, 64)
    back = fp8.dequantize_groups(values, scales, 64)
    want = fp8.dequantize_groups(*fp8.quantize_groups(x, 64), 64)
    assert scales[1].tolist()[1] == 255
    assert back[1, 64:].isnan().all()
    assert torch.equal(back[1, :64], want[1, :64])
    assert torch.equal(back[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "group"), [((5, 448), 64), ((3, 48), 64), ((2, 7, 200), 128), ((9, 129), 128), ((4, 5), 1)]
)
def test_groups(shape: tuple[int, ...], group: int, dtype: torch.dtype) -> None:
    """Short last groups too: padding must not leak into a scale, nor a neighbouring group."""
    x = spread_data(*shape).to(dtype)
    assert_groups_follow_rule(x, group)
    values, scales = fp8.quantize_groups(x, group)
    assert values.is_contiguous()
    want = (
        values.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        * np.repeat(scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64), group, axis=-1)[..., : shape[-1]]
    )
    for result in (torch.float64, torch.float32, torch.bfloat16):
        got = fp8.dequantize_groups(values, scales.view(torch.float8_e8m0fnu), group, result)
        assert got.dtype == result
        np.testing.assert_array_equal(got.double().numpy(), want)
    got = fp8.dequantize_groups(values, scales, group, torch.float16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.numpy(), want.astype(np.float16))


def test_dequantize_every_value_with_every_scale() -> None:
    """All 65,536 pairs, NaN codes and scale bytes 0 and 255 among them."""
    values = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous().view(torch.float8_e4m3fn)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(-1)
    exact = values.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales.numpy().view(
        ml_dtypes.float8_e8m0fnu
    ).astype(np.float64)
    with np.errstate(over="ignore"):
        single = exact.astype(np.float32)
        half = single.astype(ml_dtypes.bfloat16).astype(np.float32)
    for got in (fp8.dequantize_groups(values, scales, 256), fp8.dequantize_blocks(values, scales, (1, 256))):
        np.testing.assert_array_equal(got.numpy(), single)
    np.testing.assert_array_equal(fp8.dequantize_groups(values, scales, 256, torch.bfloat16).float().numpy(), half)
    np.testing.assert_array_equal(fp8.dequantize_blocks(values, scales, (1, 256), torch.bfloat16).float().numpy(), half)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((256, 384), (128, 128)),
        ((130, 257), (128, 128)),
        ((5, 3), (128, 128)),
        ((7, 10), (3, 4)),
        ((2, 33, 65), (32, 32)),
    ],
)
def test_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    """Tiles at the right and lower edge are short: ceil division, and no scale from a neighbour."""
    rows, columns = shape[-2:]
    weight = spread_data(*shape) * torch.exp2(torch.arange(rows) % 17 - 8.0).unsqueeze(-1)
    values, scales = fp8.quantize_blocks(weight, block)
    assert values.shape == shape
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    numbers = weight.view(-1, rows, columns).numpy()
    got_values = values.view(torch.uint8).view(-1, rows, columns).numpy()
    got_scales = scales.view(-1, *scales.shape[-2:]).numpy()
    want = np.full(numbers.shape, np.nan)
    for matrix, tile_row, tile_column in np.ndindex(got_scales.shape):
        part = (
            matrix,
            slice(tile_row * block[0], (tile_row + 1) * block[0]),
            slice(tile_column * block[1], (tile_column + 1) * block[1]),
        )
        codes, byte = rule(numbers[part])
        assert got_scales[matrix, tile_row, tile_column] == byte
        np.testing.assert_array_equal(got_values[part], codes)
        want[part] = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (byte - 127)
    want = want.reshape(shape)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for stored in (scales, scales.view(torch.float8_e8m0fnu)):
            got = fp8.dequantize_blocks(values, stored, block, dtype)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got.double().numpy(), want)
    transposed = fp8.dequantize_blocks(values.mT, scales.mT, (block[1], block[0]))
    assert transposed.is_contiguous()
    np.testing.assert_array_equal(transposed.double().numpy(), np.swapaxes(want, -1, -2))


def test_a_broken_weight_spoils_one_tile() -> None:
    weight = torch.ones(6, 6)
    weight[4, 1] = torch.nan
    values, scales = fp8.quantize_blocks(weight, (4, 4))
    assert scales.eq(255).tolist() == [[False, False], [True, False]]
    back = fp8.dequantize_blocks(values, scales, (4, 4))
    assert back.isnan().sum() == 2 * 4
    assert back[4:, :4].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_quantize_is_the_round_trip(dtype: torch.dtype) -> None:
    x = spread_data(3, 300).to(dtype)
    got = fp8.fake_quantize(x)
    codes, scales = rule_by_groups(x.float().numpy(), 128)
    powers = np.repeat(2.0 ** (scales - 127.0), 128, axis=-1)[:, :300]
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * powers
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.double().numpy(), want)
    assert not torch.equal(got, x)
    assert torch.equal(fp8.fake_quantize(got), got)


@pytest.mark.parametrize("size", [128, 20, 1])
def test_index_rows(size: int) -> None:
    x = spread_data(3, 5, size)
    x[1, 2, 0] = torch.inf
    values, scale = fp8.quantize_index(x)
    assert values.shape == x.shape
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (3, 5)
    assert scale.dtype == torch.float32
    for row in np.ndindex(3, 5):
        if row == (1, 2):
            assert scale[row].isnan()
            continue
        codes, byte = rule(x[row].numpy())
        assert scale[row].item() == 2.0 ** (byte - 127)
        np.testing.assert_array_equal(values[row].view(torch.uint8).numpy(), codes)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.floats(width=32), min_size=1, max_size=19), st.integers(1, 7))
def test_any_row_follows_the_rule(numbers: list[float], group: int) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    values, scales = fp8.quantize_groups(x, group)
    back = fp8.dequantize_groups(values, scales, group, torch.float64)
    for index in range(-(-len(numbers) // group)):
        part = slice(index * group, (index + 1) * group)
        if not x[part].isfinite().all():
            assert scales[index] == 255
            assert back[part].isnan().all()
            continue
        codes, byte = rule(x[part].numpy())
        assert scales[index] == byte
        assert values[part].view(torch.uint8).tolist() == codes.tolist()
        half_step = 2.0 ** (byte - 127) * 2.0**-10
        error = (back[part] - x[part].double()).abs()
        assert (error <= (x[part].double().abs() * 2.0**-4).clamp(min=half_step)).all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    x = spread_data(37, 192)
    values, scales = fp8.quantize_groups(x, 64)
    sources = ((x.t().contiguous().t(), slice(None)), (x[1::3], slice(1, None, 3)), (x[36:], slice(36, None)))
    for source, rows in sources:
        got_values, got_scales = fp8.quantize_groups(source, 64)
        assert torch.equal(got_values.view(torch.uint8), values[rows].view(torch.uint8))
        assert torch.equal(got_scales, scales[rows])


def test_the_input_stays_as_it_is() -> None:
    x = spread_data(4, 256).requires_grad_()
    before = x.detach().clone()
    fp8.quantize_groups(x, 128)
    fp8.quantize_blocks(x, (2, 128))
    assert torch.equal(x.detach(), before)
    values, scales = fp8.quantize_blocks(x, (2, 128))
    codes = values.view(torch.uint8).clone()
    fp8.dequantize_blocks(values, scales, (2, 128))
    assert torch.equal(values.view(torch.uint8), codes)


@pytest.mark.parametrize("shape", [(0, 128), (3, 0)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    values, scales = fp8.quantize_groups(torch.zeros(shape), 64)
    assert values.shape == shape
    assert scales.shape == (shape[0], shape[1] // 64)
    assert fp8.dequantize_groups(values, scales, 64).shape == shape
    values, scales = fp8.quantize_blocks(torch.zeros(shape))
    assert fp8.dequantize_blocks(values, scales).shape == shape


def test_wrong_shapes_are_refused() -> None:
    values, scales = fp8.quantize_groups(torch.ones(4, 192), 64)
    with pytest.raises(ValueError, match=r"need scales of shape \[4, 2\]; got \[4, 3\]"):
        fp8.dequantize_groups(values, scales, 128)
    with pytest.raises(ValueError, match=r"need scales of shape \[1, 2\]; got \[4, 3\]"):
        fp8.dequantize_blocks(values, scales)
    with pytest.raises(ValueError, match="at least one value, not 0"):
        fp8.quantize_groups(torch.ones(4), 0)
    with pytest.raises(ValueError, match="last dimension"):
        fp8.quantize_groups(torch.tensor(1.0), 4)
    with pytest.raises(ValueError, match="rows and columns"):
        fp8.quantize_blocks(torch.ones(4))
    with pytest.raises(ValueError, match="at least one row"):
        fp8.quantize_blocks(torch.ones(4, 4), (0, 4))
    with pytest.raises(ValueError, match="at least one value"):
        fp8.quantize_index(torch.ones(4, 0))


def test_wrong_dtypes_are_refused() -> None:
    """fp32 scales, as other FP8 checkpoints have them, must not pass for bytes; fp64 would be rounded twice."""
    values, scales = fp8.quantize_groups(torch.ones(4, 64), 64)
    with pytest.raises(TypeError, match="float64"):
        fp8.quantize_groups(torch.ones(4, dtype=torch.float64), 4)
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        fp8.dequantize_groups(values.float(), scales, 64)
    with pytest.raises(TypeError, match="float32"):
        fp8.dequantize_groups(values, torch.ones(4, 1), 64)
    with pytest.raises(TypeError, match="int64"):
        fp8.dequantize_groups(values, scales, 64, torch.int64)
