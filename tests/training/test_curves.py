"""The picture of a run's log."""

from pathlib import Path

import pytest
from curves import changes, draw, main, read

LOG = Path(__file__).resolve().parents[2] / "training" / "log.jsonl"


def test_what_the_picture_says() -> None:
    """The legend covered a curve; now it stands outside, and every line has a style of its own."""
    figure = draw(read(LOG), "a run")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["answer bytes", "other bytes", "indexers' divergence"]
    assert all(axis.get_legend() is None for axis in figure.axes)
    curves = [line for line in figure.axes[0].lines if len(line.get_xdata()) > 2]
    assert len({line.get_linestyle() for line in curves}) == len({line.get_marker() for line in curves}) == 3


def test_stages_are_marked_where_they_begin() -> None:
    lines = read(LOG)
    assert changes(lines)[:3] == [(0, "256"), (400, "512 to 1024"), (900, "1024 to 2048")]
    assert [step for step, _ in changes(lines)][-1] == 4900


@pytest.mark.parametrize("text", ["", "words", "[1]", '{"step": 3}'])
def test_no_log(tmp_path: Path, text: str) -> None:
    """A line that names the file, and no picture."""
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    said = main([str(path), str(tmp_path / "curves.png")])
    assert said is not None
    assert str(path) in said
    assert not (tmp_path / "curves.png").exists()
    assert "nowhere" in (main([str(tmp_path / "nowhere"), "x.png"]) or "")
    assert "name the log" in (main([]) or "")
