"""Bytes, operations and floors against numbers that were worked out by hand."""

from __future__ import annotations

import itertools
import json

import pytest

from tetrad.bench.cases import Case, Kind, Op, Shape
from tetrad.bench.costs import Ceilings, Cost, Rate, cost_of, floor_of
from tetrad.bench.measurement import BenchResult, BenchSettings, Result, Status
from tetrad.bench.report import from_dict, table, to_dict
from tetrad.bench.roofline import _LEAST_APART, _spread, draw, picture
from tetrad.bench.timing import Timing
from tetrad.cli.main import main
from tetrad.errors import ConfigError
from tetrad.geometry import IndexDtype

CEILINGS = Ceilings(read=Rate(4.3e12, "read"), fp8=Rate(1.5e15, "fp8"), bf16=Rate(0.75e15, "bf16"))
SMALL = Shape(Kind.DECODE, 3, 100, 2)
PREFILL = Shape(Kind.PREFILL, 1, 10, 4)


def case(op: Op, shape: Shape, dtype: str | None = None, *, heads: int = 64, head_dim: int = 128, k: int = 512) -> Case:
    return Case(op, shape, dtype and IndexDtype(dtype), heads, head_dim, k)


@pytest.mark.parametrize(
    ("dtype", "vector"), [("fp4", 32 + 2), ("fp8", 64 + 4), ("bf16", 128), ("fp32", 256)], ids=lambda x: str(x)
)
def test_score(dtype, vector):
    """3 requests of 100 keys; 6 rows of 5 heads with a weight of 4 bytes each; 600 scores."""
    assert cost_of(case(Op.SCORE, SMALL, dtype, heads=5, head_dim=64)) == Cost(
        300 * vector + 6 * 5 * (vector + 4) + 600 * 4, 2 * 5 * 64 * 600
    )


def test_total_has_places_instead_of_scores():
    assert cost_of(case(Op.TOTAL, SMALL, "fp4", heads=5, head_dim=64, k=7)) == Cost(
        300 * 34 + 6 * 5 * 38 + 6 * 7 * 4, 2 * 5 * 64 * 600
    )


def test_topk():
    assert cost_of(case(Op.TOPK, SMALL, k=7)) == Cost(600 * 4 + 6 * 7 * 4, 0)


def test_plan():
    assert cost_of(case(Op.PLAN, SMALL)) == Cost(6 * 8 + 512 * 16, 0)
    assert cost_of(case(Op.PLAN, Shape(Kind.DECODE, 600, 9, 1))) == Cost(600 * 8 + 600 * 16, 0)


def test_prefill_counts_what_is_visible():
    """4 rows see 7, 8, 9 and 10 of 10 entries, whose keys are read once."""
    assert cost_of(case(Op.SCORE, PREFILL, "fp8", heads=2, head_dim=32)) == Cost(
        10 * 36 + 4 * 2 * 40 + 34 * 4, 2 * 2 * 32 * 34
    )
    assert cost_of(case(Op.TOPK, PREFILL, k=3)) == Cost(34 * 4 + 4 * 3 * 4, 0)


@pytest.mark.parametrize(
    ("dtype", "rows", "microseconds", "bound"),
    [
        # 64 * 32768 keys of 68 (fp4), 132 (fp8) or 256 bytes, as many scores of 4, and the queries, at 4.3 TB/s
        ("fp4", 1, 35.184, "memory"),
        ("fp8", 1, 66.460, "memory"),
        ("bf16", 1, 127.053, "memory"),
        # 2 * 64 * 128 * 64 * 32768 * 4 operations at 1.5 and at 0.75 PFLOP/s
        ("fp4", 4, 91.626, "matrix"),
        ("fp8", 4, 91.626, "matrix"),
        ("bf16", 4, 183.252, "matrix"),
    ],
)
def test_floors(dtype, rows, microseconds, bound):
    """A floor of the wrong ceiling would call a slow kernel fast."""
    floor = floor_of(case(Op.SCORE, Shape(Kind.DECODE, 64, 32768, rows), dtype), CEILINGS)
    assert floor.microseconds == pytest.approx(microseconds, rel=1e-4)
    assert floor.bound == bound


def test_floor_of_topk_is_bytes_only():
    floor = floor_of(case(Op.TOPK, Shape(Kind.DECODE, 64, 32768, 1)), CEILINGS)
    assert floor.microseconds == pytest.approx((64 * 32768 * 4 + 64 * 512 * 4) / 4.3e6)
    assert floor.bound == "memory"


@pytest.fixture
def finished() -> BenchResult:
    """Two contenders on one case that takes 100 us and 250 us, and a top-k of one of them."""
    score = case(Op.SCORE, Shape(Kind.DECODE, 64, 32768, 1), "fp4")
    topk = case(Op.TOPK, Shape(Kind.DECODE, 64, 32768, 1))

    def timing(microseconds: float) -> Timing:
        return Timing(microseconds, microseconds - 1, microseconds + 1, "graph", 30)

    results = [
        Result(topk, "ours", "fast", Status.OK, "", timing(20.0), cold=True),
        Result(topk, "theirs", "theirs", Status.REFUSED, "no such call"),
        Result(score, "ours", "fast", Status.OK, "", timing(100.0), cold=True),
        Result(score, "theirs", "theirs", Status.OK, "contiguous keys", timing(250.0), cold=False),
    ]
    versions = {"device": "a GPU", "arch": "sm_00", "tetrad": "1", "torch": "2", "triton": None, "cuda": "12.8"}
    return BenchResult(
        BenchSettings(shapes=(score.shape,)),
        versions | {"driver": "570.1", "date": "2026-01-02"},
        "cuda",
        ["ours", "theirs"],
        [],
        CEILINGS,
        results,
    )


def test_every_column(finished):
    """The columns of the table, from the numbers behind them."""
    size, flops = 64 * 32768 * 72 + 64 * 64 * 72, 16384 * 64 * 32768
    ours, theirs = finished.results[2:]
    assert ours.terabytes_per_second == pytest.approx(size / 100e-6 / 1e12)
    assert ours.teraflops == pytest.approx(flops / 100e-6 / 1e12)
    assert ours.percent_of_floor(CEILINGS) == pytest.approx(100 * size / 4.3e12 / 100e-6)
    assert theirs.percent_of_floor(CEILINGS) == pytest.approx(100 * size / 4.3e12 / 250e-6)
    assert (finished.ratio(ours), finished.ratio(theirs)) == (None, 2.5)
    assert finished.results[0].teraflops is None
    assert finished.results[0].terabytes_per_second == pytest.approx((64 * 32768 + 64 * 512) * 4 / 20e-6 / 1e12)


def test_table(finished):
    text = table(finished)
    lines = text.splitlines()
    assert lines[0] == "a GPU (sm_00), tetrad 1, torch 2, cuda 12.8, driver 570.1, 2026-01-02"
    assert "timed by CUDA graphs" in lines
    at = lines.index("decode 64x32768x1")
    assert [" ".join(line.split()) for line in lines[at + 1 :]] == [
        "op index by us TB/s TFLOP/s floor us bound % ratio note",
        "topk fast 20.00 0.426 1.98 memory 9.9",
        "score fp4 fast 100.00 1.51 343.6 35.18 memory 35.2",
        "score fp4 theirs 250.00 0.605 137.4 35.18 memory 14.1 2.50x contiguous keys, warm cache",
        "not timed: theirs topk: no such call",
    ]


def test_json(finished):
    document = to_dict(finished)
    slow = document["results"][3]
    assert (slow["op"], slow["dtype"], slow["requests"], slow["entries"], slow["rows"]) == (
        "score",
        "fp4",
        64,
        32768,
        1,
    )
    assert (slow["microseconds"], slow["least_microseconds"], slow["most_microseconds"]) == (250.0, 249.0, 251.0)
    assert (slow["ratio"], slow["bound"], slow["method"], slow["calls"], slow["cold"]) == (
        2.5,
        "memory",
        "graph",
        30,
        False,
    )
    assert document["results"][1]["status"] == "refused"
    assert document["results"][1]["microseconds"] is None
    assert document["ceilings"]["read"] == {"per_second": 4.3e12, "what": "read"}


def test_json_read_again(finished, tmp_path, capsys):
    """A measurement on a rented device can be drawn at home: the table and the JSON are the same."""
    document = json.loads(json.dumps(to_dict(finished)))
    assert to_dict(from_dict(document)) == document
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(document))
    flags = ["bench", "indexer", "--from-json", str(path)]
    assert main(flags) == 0
    assert capsys.readouterr().out.strip() == table(finished)
    assert main([*flags, "--png", str(tmp_path / "bench.png"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    assert (tmp_path / "bench.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main([*flags, "--decode", "1x100"]) == 2
    assert "--decode has no meaning beside it" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["[]", "{}", '{"settings": {"shapes": ["decode 5"]}}', "no JSON"])
def test_json_that_is_no_result(tmp_path, capsys, wrong):
    """An error that says so, no traceback."""
    path = tmp_path / "bench.json"
    path.write_text(wrong)
    assert main(["bench", "indexer", "--from-json", str(path)]) == 2
    assert "is no" in capsys.readouterr().err


def test_what_the_picture_says(finished):
    """Two lines of the legend were equal, and no point said which case it was."""
    figure = draw(finished)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(set(names)) == len(names)
    assert {"ours", "theirs", "index fp4", "4.3 TB/s: read", "1500 TFLOP/s: fp8", "750 TFLOP/s: bf16"} <= set(names)
    axes = figure.axes
    assert [axis.get_title() for axis in axes[:2]] == ["score", "top-k"]
    assert [text.get_text() for text in axes[0].get_yticklabels()] == ["decode 64x32768x1  (1)"]
    assert [text.get_text() for text in axes[-1].texts] == ["1"]


def test_picture_that_cannot_be_written(finished, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        picture(finished, tmp_path / "nowhere" / "bench.png")


def test_numbers_of_points_do_not_cover_one_another():
    """Points that are apart keep their places; those that touch are spread around their mean."""
    assert _spread([0.1, 0.5, 0.9]) == pytest.approx([0.1, 0.5, 0.9])
    places = _spread([0.1, 0.5, 0.5, 0.5001])
    assert places[0] == pytest.approx(0.1)
    assert all(b - a > 0.999 * _LEAST_APART for a, b in itertools.pairwise(places))
    assert sum(places[1:]) == pytest.approx(1.5001)
