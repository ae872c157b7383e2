"""MXFP4 bit for bit: the rule in exact rational arithmetic is one oracle, ml_dtypes' E2M1 and e8m0 are another."""

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

from tetrad.formats import mxfp4

MAGNITUDES = [Fraction(value) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
LARGEST_FP32 = float(np.finfo(np.float32).max)


def exact_scale_byte(group: NDArray[np.float32]) -> int:
    """Byte of 2^ceil(log2(max(amax, 6 * 2^-126) / 6)), by exact comparison: no fp32 product, no bit trick."""
    if not np.isfinite(group).all():
        return 255
    amax = max([Fraction(6) / 2**126, *(abs(Fraction(float(value))) for value in group)])
    exponent = -126
    while 6 * Fraction(2) ** exponent < amax:
        exponent += 1
    return exponent + 127


def exact_code(value: float, byte: int) -> int:
    """The nearest magnitude by exact distance, the even code of two that are equally near, and the sign."""
    ratio = min(abs(Fraction(value)) / Fraction(2) ** (byte - 127), Fraction(6))
    code = min(range(8), key=lambda candidate: (abs(MAGNITUDES[candidate] - ratio), candidate % 2))
    return code + 8 * bool(np.signbit(value))


def ml_dtypes_rule(x: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(codes [..., D], scale bytes [..., D/32]) of finite fp32 data: exponents from frexp, codes from ml_dtypes."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.maximum(np.abs(groups).max(-1), np.float32(6 * 2.0**-126))
    mantissa, exponent = np.frexp(amax * np.float32(1 / 6))
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    ratio = groups.astype(np.float64) / np.exp2(exponent.astype(np.float64))[..., None]
    codes = np.clip(ratio, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return codes.reshape(x.shape), (exponent + 127).astype(np.uint8)


def codes_and_scales(x: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """What the module makes of ``x``, with the nibbles taken apart by numpy."""
    packed, scales = mxfp4.quantize(x)
    data = packed.numpy()
    codes = np.empty((*data.shape[:-1], 2 * data.shape[-1]), np.uint8)
    codes[..., 0::2] = data & 15
    codes[..., 1::2] = data >> 4
    return codes, scales.numpy()


def assert_follows_rule(x: Tensor) -> None:
    codes, scales = codes_and_scales(x)
    want_codes, want_scales = ml_dtypes_rule(x.float().numpy())
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(codes, want_codes)


def all_fp16_and_bf16_bits(dtype: torch.dtype) -> Tensor:
    """Every finite non-negative value of a 16-bit dtype, in order."""
    values = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


def test_code_values_are_ml_dtypes() -> None:
    want = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(np.array(mxfp4.CODE_VALUES, np.float32).view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("exponent", [-126, -125, -124, -1, 0, 1, 60, 125])
def test_ties_go_to_even(exponent: int) -> None:
    """Ties towards zero, or away from it, change 0.5 % of the codes of bf16 data: each midpoint, and its neighbours."""
    scale = np.float32(2.0**exponent)
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32) * scale
    below, above = np.nextafter(midpoints, np.float32(0)), np.nextafter(midpoints, np.float32(np.inf))
    group = np.zeros(32, np.float32)
    group[:21] = np.concatenate((below, midpoints, above))
    group[31] = 5 * scale  # amax / scale > 3, so that this scale and no other is the group's
    codes, scales = codes_and_scales(torch.from_numpy(np.stack((group, -group))))
    assert scales.tolist() == [[exponent + 127]] * 2
    below_codes, tie_codes, above_codes = [0, 1, 2, 3, 4, 5, 6], [0, 2, 2, 4, 4, 6, 6], [1, 2, 3, 4, 5, 6, 7]
    assert codes[0, :21].tolist() == below_codes + tie_codes + above_codes
    assert codes[1, :21].tolist() == [8 + code for code in below_codes + tie_codes + above_codes]


def test_scale_at_every_edge() -> None:
    """amax = 6 * 2^k and both neighbours, for every k of fp32: off by one bit, a group loses half its precision."""
    edges = (6 * 2.0 ** np.arange(-126.0, 126.0)).astype(np.float32)
    tops = np.concatenate((np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(np.inf))))
    groups = np.zeros((tops.size, 32), np.float32)
    groups[:, 17] = tops
    codes, scales = codes_and_scales(torch.from_numpy(groups))
    assert scales[:, 0].tolist() == [exact_scale_byte(group) for group in groups]
    pairs = zip(tops.tolist(), scales[:, 0].tolist(), strict=True)
    assert codes[:, 17].tolist() == [exact_code(top, byte) for top, byte in pairs]
    count = edges.size
    assert scales[count : 2 * count, 0].tolist() == list(range(1, 253))
    assert set(codes[count : 2 * count, 17]) == {7}


def test_largest_finite_values() -> None:
    x = torch.zeros(2, 32)
    x[0, 0] = LARGEST_FP32
    x[1, 1] = -LARGEST_FP32
    codes, scales = codes_and_scales(x)
    assert scales.tolist() == [[253], [253]]
    assert (codes[0, 0], codes[1, 1]) == (6, 14)  # just under 4 * 2^126
    assert mxfp4.dequantize(*mxfp4.quantize(x))[0, 0].item() == torch.inf  # 4 * 2^126 = 2^128


def test_zero_groups_and_signed_zeros() -> None:
    """A scale of zero would give NaN; a sign lost on the way to zero would break equality with the trained kernels."""
    x = torch.zeros(3, 64)
    x[1] = -0.0
    x[2, 0], x[2, 1], x[2, 2] = 6.0, -0.2, 0.2
    packed, scales = mxfp4.quantize(x)
    assert scales.tolist() == [[1, 1], [1, 1], [127, 1]]
    codes = mxfp4.unpack(packed)
    assert codes[0].eq(0).all()
    assert codes[1].eq(8).all()
    assert codes[2, :3].tolist() == [7, 8, 0]
    back = mxfp4.dequantize(packed, scales)
    assert torch.signbit(back[1]).all()
    assert not torch.signbit(back[0]).any()


def test_subnormals_are_divided_exactly() -> None:
    """2^126 times a subnormal: a reciprocal that overflows, or a scale under 2^-126, would give inf or zero."""
    fractions = np.arange(0, 2**23, 4099, dtype=np.int32)
    values = np.resize(fractions.view(np.float32), (fractions.size // 32 + 1) * 32).reshape(-1, 32)
    codes, scales = codes_and_scales(torch.from_numpy(values))
    assert set(scales.flat) == {1}
    want = [[exact_code(float(value), 1) for value in row] for row in values]
    assert codes.tolist() == want
    assert {0, 1, 2} == set(codes.flat)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_broken_group_is_nan_and_alone(bad: float, dtype: torch.dtype) -> None:
    """A NaN that came back as a number would rank a broken key among good ones; the neighbours must not notice."""
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    broken = x.clone()
    broken[2, 40] = bad
    packed, scales = mxfp4.quantize(broken)
    assert scales[2, 1] == 255
    assert mxfp4.unpack(packed)[2, 32:64].remainder(8).eq(0).all()
    back = mxfp4.dequantize(packed, scales)
    assert back[2, 32:64].isnan().all()
    back[2, 32:64] = 0
    want = mxfp4.dequantize(*mxfp4.quantize(x))
    want[2, 32:64] = 0
    assert torch.equal(back, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_alone_in_its_group(dtype: torch.dtype) -> None:
    """Every positive bf16 and fp16 number as the only value of a group, subnormals included."""
    values = all_fp16_and_bf16_bits(dtype)
    x = torch.zeros(values.numel(), 32, dtype=dtype)
    x[torch.arange(values.numel()), torch.arange(values.numel()) % 32] = values
    assert_follows_rule(x)


@pytest.mark.parametrize("top", [6.0, 3.0625, 4.5, 6 * 2.0**-126, 5 * 2.0**-120, 3.5 * 2.0**100])
def test_every_bf16_value_under_a_given_scale(top: float) -> None:
    """31 values of a group at a time, the last one fixing the scale; both signs."""
    values = all_fp16_and_bf16_bits(torch.bfloat16)
    values = values[values.float() <= top]
    values = torch.cat((values, -values))
    padded = torch.cat((values, values.new_zeros(-values.numel() % 31)))
    last = torch.full((padded.numel() // 31, 1), top, dtype=torch.bfloat16)
    assert_follows_rule(torch.cat((padded.view(-1, 31), last), dim=1))


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_random_fp32_groups(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 701, 96, generator=generator)
    x = x * torch.exp2(spread * torch.randn(3, 701, 1, generator=generator))
    assert_follows_rule(x)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(width=32), min_size=32, max_size=32))
def test_any_group_follows_the_exact_rule(values: list[float]) -> None:
    group = np.array(values, np.float32)
    codes, scales = codes_and_scales(torch.from_numpy(group))
    byte = exact_scale_byte(group)
    assert scales.tolist() == [byte]
    if byte != 255:
        assert codes.tolist() == [exact_code(float(value), byte) for value in group]


def test_dequantize_every_byte_with_every_scale() -> None:
    """All 65,536 pairs against ml_dtypes: the order of the nibbles, byte 0 = 2^-127, byte 255 = NaN, -0."""
    data = np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 16))
    codes = np.stack((data & 15, data >> 4), axis=-1).reshape(256, 512)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * np.repeat(
            scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1
        )
        want = {torch.float64: exact, torch.float32: exact.astype(np.float32), torch.float16: exact.astype(np.float16)}
        want[torch.bfloat16] = exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    for dtype, expected in want.items():
        got = mxfp4.dequantize(torch.from_numpy(data.copy()), torch.from_numpy(scales.copy()), dtype)
        assert got.dtype == dtype
        numbers = got.float().numpy() if dtype == torch.bfloat16 else got.numpy()
        np.testing.assert_array_equal(numbers, expected)
        np.testing.assert_array_equal(np.signbit(numbers)[:255], np.signbit(expected)[:255])


def test_checkpoint_dtypes_mean_the_same_bytes() -> None:
    """Checkpoints store int8 and float8_e8m0fnu: a sign extension would corrupt every byte above 127."""
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(0, 256, (6, 48), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (6, 3), dtype=torch.uint8, generator=generator)
    want = mxfp4.dequantize(data, scales)
    assert torch.equal(mxfp4.dequantize(data.view(torch.int8), scales.view(torch.float8_e8m0fnu)), want)
    assert torch.equal(mxfp4.dequantize(data.view(torch.float4_e2m1fn_x2), scales.view(torch.int8)), want)


def test_pack_puts_the_even_index_low() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = mxfp4.pack(codes)
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(mxfp4.unpack(packed), codes)
    every_byte = torch.arange(256, dtype=torch.uint8).view(2, 2, 64)
    assert torch.equal(mxfp4.pack(mxfp4.unpack(every_byte)), every_byte)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 255), min_size=16, max_size=16), st.integers(1, 252))
def test_quantizing_again_changes_no_value(data: list[int], byte: int) -> None:
    """Values that MXFP4 holds come back as they were, though perhaps with another scale."""
    values = mxfp4.dequantize(torch.tensor(data, dtype=torch.uint8), torch.tensor([byte], dtype=torch.uint8))
    packed, scales = mxfp4.quantize(values)
    back = mxfp4.dequantize(packed, scales)
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))
    assert torch.equal(mxfp4.quantize(back)[0], packed)


@pytest.mark.parametrize("shape", [(32,), (0, 32), (7, 0), (1, 96), (3, 5, 2, 64)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    packed, scales = mxfp4.quantize(x)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], shape[-1] // 32)
    assert packed.dtype == scales.dtype == torch.uint8
    assert mxfp4.dequantize(packed, scales).shape == shape


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Nor on strides: a transposed view, every third row and a row alone give the same bytes."""
    x = torch.randn(37, 128, generator=torch.Generator().manual_seed(4), dtype=torch.float32)
    packed, scales = mxfp4.quantize(x)
    sources = ((x.t().contiguous().t(), slice(None)), (x[1::3], slice(1, None, 3)), (x[36:], slice(36, None)))
    for source, rows in sources:
        got_packed, got_scales = mxfp4.quantize(source)
        assert torch.equal(got_packed, packed[rows])
        assert torch.equal(got_scales, scales[rows])
        strided_packed, strided_scales = packed[rows], scales[rows]
        assert torch.equal(mxfp4.dequantize(strided_packed, strided_scales), mxfp4.dequantize(packed, scales)[rows])


def test_the_input_stays_as_it_is() -> None:
    """fp32 input is not copied on the way in, so any operation in place would write into the caller's keys."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5), requires_grad=True)
    before = x.detach().clone()
    packed, _ = mxfp4.quantize(x)
    assert torch.equal(x.detach(), before)
    assert not packed.requires_grad


@pytest.mark.parametrize("shape", [(48,), (3, 31), (2, 33), ()])
def test_other_lengths_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiple of 32") as error:
        mxfp4.quantize(torch.zeros(shape))
    assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """fp64 would be rounded twice on its way through fp32, which moves values across midpoints."""
    with pytest.raises(TypeError, match=str(dtype)):
        mxfp4.quantize(torch.zeros(32).to(dtype))


@pytest.mark.parametrize(
    ("packed_shape", "scales_shape"),
    [((4, 16), (4, 2)), ((4, 32), (2,)), ((4, 8), (4, 0)), ((3, 16), (4, 1)), ((), ())],
)
def test_dequantize_refuses_other_shapes(packed_shape: tuple[int, ...], scales_shape: tuple[int, ...]) -> None:
    """Broadcasting would otherwise give every row the scales of another one."""
    with pytest.raises(ValueError, match="do not belong together"):
        mxfp4.dequantize(torch.zeros(packed_shape, dtype=torch.uint8), torch.zeros(scales_shape, dtype=torch.uint8))


def test_dequantize_and_pack_refuse_other_dtypes() -> None:
    with pytest.raises(TypeError, match="packed MXFP4"):
        mxfp4.dequantize(torch.zeros(16), torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(TypeError, match="int32"):
        mxfp4.dequantize(torch.zeros(16, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), torch.int32)
    with pytest.raises(TypeError, match="uint8"):
        mxfp4.pack(torch.zeros(4))
    with pytest.raises(ValueError, match="even"):
        mxfp4.pack(torch.zeros(3, dtype=torch.uint8))
