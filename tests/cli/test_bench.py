"""``tetrad bench indexer`` as it is typed."""

from __future__ import annotations

import json
import re
import sys
import textwrap

import pytest

SMALL = ("--device=cpu", "--heads=4", "--head-dim=64", "--k=30", "--repeats=5")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Fewer calls together, and less to read for the ceiling."""
    monkeypatch.setattr("tetrad.bench.timing._SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr("tetrad.bench.ceilings._CPU_READ_BYTES", 1 << 20)
    monkeypatch.setattr("tetrad.bench.ceilings._CPU_SIZE", 64)


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """Two peers: one that is our own ops, one that confuses two rows."""
    (tmp_path / "right_peer.py").write_text("from tetrad.ops import indexer_logits, plan_indexer, topk_indices\n")
    wrong = """
        import tetrad.ops

        def indexer_logits(q, q_scale, weights, *others, width, plan, out):
            return tetrad.ops.indexer_logits(q, q_scale, weights.flip(0), *others, width=width, plan=plan, out=out)
        """
    (tmp_path / "wrong_peer.py").write_text(textwrap.dedent(wrong))
    monkeypatch.syspath_prepend(tmp_path)


def test_json_and_png(tetrad, tmp_path, peers):
    png = tmp_path / "roof.png"
    shapes = ("--decode", "3x100x1,2x130x2", "--prefill", "20x77", "--dtypes", "fp4,bf16")
    run = tetrad("bench", "indexer", *SMALL, *shapes, "--peer", "right_peer", "--json", "--png", png)
    assert run.code == 0, run.err
    assert f"wrote {png}" in run.err
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    document = json.loads(run.out)
    assert document["versions"]["torch"]
    assert document["settings"]["shapes"] == ["decode 3x100x1", "decode 2x130x2", "prefill 20x77"]
    assert document["contenders"] == ["tetrad", "right_peer"]
    assert not document["interrupted"]
    # plan, topk, and score and total for two dtypes; two contenders; three shapes
    assert len(document["results"]) == 6 * 2 * 3
    for result in document["results"]:
        assert result["status"] == "ok"
        assert result["method"] == "host"
        assert result["microseconds"] > 0
        assert result["terabytes_per_second"] == pytest.approx(result["bytes"] / result["microseconds"] / 1e6)
        assert result["percent_of_floor"] == pytest.approx(100 * result["floor_microseconds"] / result["microseconds"])
        assert (result["ratio"] is None) == (result["contender"] == "tetrad")
        if result["flops"]:
            assert result["teraflops"] == pytest.approx(result["flops"] / result["microseconds"] / 1e6)


def test_table(tetrad):
    """The device, the back ends with their reasons and the shapes are in it; so is what a CPU's figures are worth."""
    run = tetrad(
        "bench", "indexer", *SMALL, "--decode=3x100", "--only=score,topk", "--dtypes=fp8", "--backend=reference"
    )
    assert run.code == 0, run.err
    lines = run.out.splitlines()
    assert "(cpu), tetrad" in lines[0]
    assert any("absolute figures mean little" in line for line in lines)
    assert "reference: indexer_logits of fp8 by reference: plain torch runs on every device" in lines
    at = lines.index("decode 3x100x1")
    assert [line.split()[:2] for line in lines[at + 2 :]] == [["topk", "reference"], ["score", "fp8"]]


def test_chosen_back_ends_and_refusals(tetrad):
    run = tetrad("bench", "indexer", *SMALL, "--decode=1x10", "--only=score", "--dtypes=fp4")
    assert "    not sm90: written for sm_90, not for cpu" in run.out.splitlines()


def test_default_set_on_a_cpu(tetrad):
    run = tetrad("bench", "indexer", "--device=cpu", "--only=topk", "--repeats=5")
    assert run.code == 0, run.err
    blocks = [line for line in run.out.splitlines() if line.startswith(("decode", "prefill"))]
    assert blocks == ["decode 1x512x1", "decode 4x1024x1", "decode 4x1024x2", "prefill 64x512"]


def test_a_wrong_peer_is_refused(tetrad, peers):
    """Exit code 1 and no figure for it; ours beside it is timed."""
    run = tetrad("bench", "indexer", *SMALL, "--decode=3x100", "--only=score", "--dtypes=fp4", "--peer=wrong_peer")
    assert run.code == 1
    ours, wrong = run.out.splitlines()[-2:]
    assert ours.split()[:3] == ["score", "fp4", "reference"]
    assert wrong.split()[:4] == ["score", "fp4", "wrong_peer", "WRONG"]
    assert "differ from fp64 by" in wrong


def test_too_little_memory(tetrad):
    """A case that does not fit is no failure. Four times 40 TB of scores, 340 TB of keys, 2.5 TB of block tables."""
    run = tetrad("bench", "indexer", *SMALL, "--decode=100000x100000000,1x10", "--only=score", "--dtypes=fp4")
    assert run.code == 0, run.err
    assert re.search(r"SKIPPED  needs 50[23]\d{12} bytes of memory, \d+ are free", run.out)
    assert run.out.splitlines()[-1].split()[:3] == ["score", "fp4", "reference"]


WRONG = [
    (("--decode", "4x"), "--decode '4x' is not a shape; write requests x entries x rows, as in 64x32768x1"),
    (("--prefill", "5x4"), "prefill 5x4: a prefill has at most as many rows as entries"),
    (("--dtypes", "fp4,fp5"), "--dtypes 'fp5' is unknown; choose among fp4, fp8, bf16, fp32"),
    (("--only", "scores"), "--only 'scores' is unknown; choose among plan, score, topk, total"),
    (("--heads", "0"), "--heads must be at least 1, got 0"),
    (("--k", "-1"), "--k must be at least 1, got -1"),
    (("--repeats", "2"), "--repeats must be at least 5"),
    (("--head-dim", "20"), "20 is not a multiple of 32"),
    (("--device", "cuda:99"), "--device cuda:99: torch sees"),
    (("--device", "meta"), "only cuda and cpu can be timed"),
    (("--device", "abacus"), "--device 'abacus' is unknown"),
    (("--backend", "fast"), "no op has a back end 'fast'; there are"),
    (("--backend", "sm90"), "sm90 computes none of these cases: the back end sm90 does not compute plan_indexer here"),
    (("--backend", "reference,reference"), "reference is named twice"),
    (("--peer", "no_such_module"), "the peer no_such_module cannot be imported"),
    (("--peer", "json"), "the peer json has none of"),
    (("--peer", "deep_gemm"), "--peer deep_gemm needs"),
    (("--png", "no/such/folder/roof.png"), "there is no folder"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_flags(tetrad, arguments, message):
    """One line on standard error, exit code 2, and nothing is measured."""
    run = tetrad("bench", "indexer", "--device=cpu", *arguments)
    assert (run.code, run.out) == (2, "")
    assert message in run.err
    assert len(run.err.splitlines()) == 1


def test_unknown_flag(tetrad):
    run = tetrad("bench", "indexer", "--dtype", "fp4")
    assert run.code == 2
    assert "unknown flag --dtype; did you mean --dtypes?" in run.err


def test_without_matplotlib(tetrad, monkeypatch, tmp_path):
    """Said before minutes of measuring, not after."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = tetrad("bench", "indexer", *SMALL, "--png", tmp_path / "roof.png")
    assert (run.code, run.out) == (2, "")
    assert "a picture needs matplotlib" in run.err


def test_an_interrupt(tetrad, monkeypatch):
    """Ctrl-C prints the results so far."""
    from tetrad.bench import measurement

    clock, made = measurement.time_calls, []

    def interrupted(*arguments):
        made.append(arguments)
        if len(made) > 1:
            raise KeyboardInterrupt
        return clock(*arguments)

    monkeypatch.setattr(measurement, "time_calls", interrupted)
    run = tetrad("bench", "indexer", *SMALL, "--decode=3x100", "--dtypes=fp4")
    assert run.code == 130
    assert run.out.splitlines()[-1].split()[:2] == ["plan", "reference"]
    assert "interrupted after 1 results" in run.err
