"""Shapes and settings: what is written on the command line is what is measured."""

from __future__ import annotations

import pytest

from tetrad.bench.cases import BenchSettings, Case, Kind, Op, Shape, default_shapes, parse_shapes
from tetrad.errors import ConfigError
from tetrad.geometry import IndexDtype


def visible(shape: Shape) -> list[int]:
    """What each row sees, one by one."""
    if shape.kind is Kind.DECODE:
        return [shape.entries] * (shape.requests * shape.rows)
    return [shape.entries - shape.rows + 1 + row for row in range(shape.rows)]


def test_parsing():
    assert parse_shapes("64x32768x1, 8x300x4,7x5", Kind.DECODE) == (
        Shape(Kind.DECODE, 64, 32768, 1),
        Shape(Kind.DECODE, 8, 300, 4),
        Shape(Kind.DECODE, 7, 5, 1),
    )
    assert parse_shapes("4096x16384", Kind.PREFILL) == (Shape(Kind.PREFILL, 1, 16384, 4096),)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "64",
        "64x",
        "x64",
        "64x5x1x1",
        "64x-5",
        "64x5_0",
        "6 4x5",
        "64X5",
        "axb",
        "64x5,",
        "0x5",
        "5x0",
        "1.5x5",
        "٣x5",
    ],
)
def test_wrong_shapes(kind, text):
    with pytest.raises(ConfigError):
        parse_shapes(text, kind)


@pytest.mark.parametrize("text", ["5x4", "4x5x1"])
def test_wrong_prefill(text):
    """More rows than entries would need rows that see a negative number of entries."""
    with pytest.raises(ConfigError):
        parse_shapes(text, Kind.PREFILL)


@pytest.mark.parametrize("text", ["3x7x2", "1x1x1", "5x130x3"])
def test_counts_of_decode(text):
    (shape,) = parse_shapes(text, Kind.DECODE)
    assert shape.scores == sum(visible(shape))
    assert shape.total_rows == len(visible(shape))
    assert shape.keys == shape.requests * shape.entries
    assert str(shape) == f"decode {text}"


@pytest.mark.parametrize("text", ["1x1", "7x7", "3x100", "64x333"])
def test_counts_of_prefill(text):
    (shape,) = parse_shapes(text, Kind.PREFILL)
    assert shape.scores == sum(visible(shape))
    assert visible(shape)[-1] == shape.keys == shape.entries
    assert str(shape) == f"prefill {text}"


def test_default_shapes():
    """The set that README's table is made of: a shape that went missing would not be noticed there."""
    names = [str(shape) for shape in default_shapes("cuda")]
    decode = [f"decode {b}x{n}x1" for b in (1, 8, 64, 256) for n in (2048, 8192, 32768)]
    more = ["decode 64x32768x2", "decode 64x32768x4", "decode 1x131072x1", "decode 1x262144x1"]
    assert names == [*decode, *more, "prefill 4096x4096", "prefill 4096x16384", "prefill 16384x65536"]
    assert max(shape.scores for shape in default_shapes("cpu")) < 1 << 17


def test_cases_in_order():
    """A plan and a top-k do not depend on the dtype: timing them for each would only take longer."""
    shape = Shape(Kind.DECODE, 2, 10, 1)
    settings = BenchSettings(shapes=(shape, shape), dtypes=(IndexDtype.FP8, IndexDtype.FP4), heads=3, head_dim=32, k=4)
    wanted = [
        (Op.PLAN, None),
        (Op.TOPK, None),
        (Op.SCORE, IndexDtype.FP8),
        (Op.TOTAL, IndexDtype.FP8),
        (Op.SCORE, IndexDtype.FP4),
        (Op.TOTAL, IndexDtype.FP4),
    ]
    assert list(settings.cases()) == [Case(op, shape, dtype, 3, 32, 4) for op, dtype in wanted]


@pytest.mark.parametrize(
    "wrong",
    [
        {"shapes": ()},
        {"dtypes": ()},
        {"ops": ()},
        {"heads": 0},
        {"head_dim": -1},
        {"k": 0},
        {"repeats": 4},
        {"head_dim": 20},
    ],
)
def test_wrong_settings(wrong):
    with pytest.raises(ConfigError):
        BenchSettings(**{"shapes": (Shape(Kind.DECODE, 1, 1, 1),)} | wrong)
