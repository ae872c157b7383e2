"""The rotation angles against their formulas, and the numbers of the released models."""

from __future__ import annotations

import math

import pytest
import torch
from tests.released import flash_document, pro_document
from tests.row_splits import ROWS, assert_row_invariant
from tests.tiny import tiny_config

from tetrad.models.config import ModelConfig
from tetrad.models.rotary import angles, inverse_frequencies

RELEASED = [ModelConfig.from_dict(document) for document in (flash_document(), pro_document())]


@pytest.mark.parametrize("config", RELEASED, ids=["flash", "pro"])
def test_yarn_of_the_released_models(config):
    """Pairs 0 to 15 turn as ever, pairs 25 to 31 sixteen times slower, those between in even steps."""
    got = inverse_frequencies(config, compressed=True)
    assert got.shape == (32,)
    assert got.dtype == torch.float32
    for pair in range(32):
        plain = 160_000.0 ** (-2 * pair / 64)
        ramp = min(max((pair - 15) / (25 - 15), 0.0), 1.0)
        assert math.isclose(float(got[pair]), plain * (1 - ramp) + plain / 16 * ramp, rel_tol=1e-6), pair


@pytest.mark.parametrize("config", RELEASED, ids=["flash", "pro"])
def test_window_layers_have_their_own_base_and_no_yarn(config):
    """Layers without compressed keys see 128 tokens: base 10000, not stretched."""
    got = inverse_frequencies(config, compressed=False)
    expected = torch.tensor([10_000.0 ** (-2 * pair / 64) for pair in range(32)]).double()
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("rope", "base", "original", "fast", "slow", "low", "high"),
    [
        (64, 160_000.0, 65_536, 32.0, 1.0, 15, 25),
        # 16 log(64 / 64 pi) / (2 log base) is below 0: clamped
        (16, 160_000.0, 64, 32.0, 1.0, 0, 2),
        # 8 log(1e6 / 0.02 pi) / (2 log 100) is 14.4, but there are channels 0 to 7 only
        (8, 100.0, 1_000_000, 32.0, 0.01, 7, 7),
        (32, 1000.0, 5000, 32.0, 1.0, 7, 16),
        # a context of less than one turn: every pair but the first is stretched
        (16, 160_000.0, 4, 32.0, 1.0, 0, 0),
    ],
)
def test_yarn_of_other_constants(rope, base, original, fast, slow, low, high):
    """The ramp's ends are whole channels, clamped to those there are; both the same is a step, not a division by 0."""
    config = tiny_config(
        head_dim=128,
        qk_rope_head_dim=rope,
        compress_rope_theta=base,
        rope_original_max_position_embeddings=original,
        max_position_embeddings=original * 16,
        rope_beta_fast=fast,
        rope_beta_slow=slow,
    )
    got = inverse_frequencies(config, compressed=True)
    for pair in range(rope // 2):
        plain = base ** (-2 * pair / rope)
        ramp = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
        assert math.isclose(float(got[pair]), plain * (1 - ramp) + plain / 16 * ramp, rel_tol=1e-6), pair


def test_factor_one_is_no_yarn():
    """A model that was never stretched keeps the compressed layers' base."""
    got = inverse_frequencies(tiny_config(rope_factor=1.0, max_position_embeddings=64), compressed=True)
    expected = torch.tensor([160_000.0 ** (-2 * pair / 16) for pair in range(8)]).double()
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


def test_angle_is_an_fp32_product():
    """Near a million tokens the rounded product is off by hundredths of a radian: the model was trained with that."""
    frequencies = inverse_frequencies(RELEASED[0], compressed=True)
    positions = torch.tensor([0, 1, 127, 128, 65_535, 987_654, 1_048_575])
    cos, sin = angles(positions, frequencies)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (7, 32)
    rounded = (positions.float().view(-1, 1) * frequencies).double()
    torch.testing.assert_close(cos.double(), rounded.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), rounded.sin(), rtol=0, atol=1e-6)
    exact = positions.double().view(-1, 1) * frequencies.double()
    assert (rounded - exact).abs().amax() > 0.005


@pytest.mark.parametrize("rope", [2, 16, 64])
def test_rows_do_not_depend_on_each_other(rope):
    """A vectorised cosine may treat the last elements of a tensor in another way."""
    frequencies = 1.0 / 10_000 ** (torch.arange(0, rope, 2) / rope)
    positions = torch.randint(0, 1 << 20, (ROWS,), generator=torch.Generator().manual_seed(0))
    assert_row_invariant(lambda position: angles(position, frequencies), positions)
