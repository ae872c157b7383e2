"""e8m0 against ml_dtypes and against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tetrad.formats import e8m0

ALL_BYTES = np.arange(256, dtype=np.uint8)


def smallest_power_at_least(value: float) -> int:
    """The e8m0 byte of the least power of two >= value, by exact comparison."""
    exact = Fraction(value)
    byte = 0
    while Fraction(2) ** (byte - 127) < exact:
        byte += 1
    return byte


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_decode_all_bytes(dtype: torch.dtype) -> None:
    """A plain shift would make byte 0 a zero and byte 255 an infinity."""
    got = e8m0.decode(torch.from_numpy(ALL_BYTES), dtype)
    want = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.double().numpy(), want)
    assert want[0] == 2.0**-127
    assert np.isnan(want[255])


def test_decode_agrees_with_torch_and_takes_every_byte_dtype() -> None:
    raw = torch.from_numpy(ALL_BYTES).view(2, 128)
    want = raw.view(torch.float8_e8m0fnu).float()
    for scales in (raw, raw.view(torch.int8), raw.view(torch.float8_e8m0fnu), raw.t().contiguous().t()):
        torch.testing.assert_close(e8m0.decode(scales), want, rtol=0, atol=0, equal_nan=True)


def test_decode_of_a_scalar() -> None:
    assert e8m0.decode(torch.tensor(130, dtype=torch.uint8)).item() == 8.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16])
def test_numbers_are_no_bytes(dtype: torch.dtype) -> None:
    """An fp32 scale read as bytes would be off by many powers of two."""
    with pytest.raises(TypeError, match="uint8"):
        e8m0.decode(torch.ones(3, dtype=dtype))


def test_reciprocal_all_bytes() -> None:
    got = e8m0.reciprocal(torch.from_numpy(ALL_BYTES)).numpy()
    want = [2.0 ** (127 - int(byte)) for byte in ALL_BYTES[:255]]
    np.testing.assert_array_equal(got[:255].astype(np.float64), want)
    assert np.isnan(got[255])


def test_encode_ceil_around_every_power_of_two() -> None:
    """The number below, at and above each power: an exponent taken from log2 in fp32 rounds some of them wrongly."""
    powers = (2.0 ** np.arange(-149.0, 128.0)).astype(np.float32)
    values = np.concatenate((np.nextafter(powers, np.float32(0)), powers, np.nextafter(powers, np.float32(np.inf))))
    got = e8m0.encode_ceil(torch.from_numpy(values)).tolist()
    assert got == [smallest_power_at_least(float(value)) for value in values]


def test_encode_ceil_at_the_ends() -> None:
    largest = float(np.finfo(np.float32).max)
    values = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**127, largest, torch.inf, torch.nan, -torch.nan, -3.0])
    assert e8m0.encode_ceil(values).tolist() == [0, 0, 0, 254, 255, 255, 255, 255, 129]


def test_encode_ceil_wants_fp32() -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        e8m0.encode_ceil(torch.ones(2, dtype=torch.bfloat16))


@given(st.floats(min_value=0, max_value=2.0**127, width=32))
def test_encode_ceil_is_the_least_scale(value: float) -> None:
    byte = int(e8m0.encode_ceil(torch.tensor([value], dtype=torch.float32)))
    assert byte == smallest_power_at_least(value)


def test_product_dtype() -> None:
    assert e8m0.product_dtype(torch.bfloat16) == torch.bfloat16
    assert e8m0.product_dtype(torch.float16) == torch.float32
    with pytest.raises(TypeError, match="int32"):
        e8m0.product_dtype(torch.int32)
