"""The partial file, whatever moment a run ends at."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tetrad.cli import results
from tetrad.cli.results import OrderedStream, PartialFile

KEYS = ["one", "two", "three"]


def record(name: str, error: str | None = None) -> dict[str, Any]:
    return {"request_id": name, "outputs": ["äöü\u2028"], "error": error}


def filled(target: Path) -> PartialFile:
    partial = PartialFile(target, KEYS, restart=False)
    for place in (2, 0, 1):
        if not partial.has(place):
            partial.add(place, record(KEYS[place]))
    return partial


def test_a_run_that_ended_at_any_byte(tmp_path):
    """Also one that had no time to clean up: what is whole is kept, and the rest is written behind it."""
    target = tmp_path / "out"
    partial = filled(target)
    partial.close()
    whole = partial.path.read_bytes()
    for length in range(len(whole)):
        partial.path.write_bytes(whole[:length])
        taken_up = PartialFile(target, KEYS, restart=False)
        assert len(taken_up) == whole[:length].count(b"\n")
        taken_up.close()
        finished = filled(target)
        assert list(finished.records()) == [record(name) for name in KEYS]
        finished.close()
        assert len(partial.path.read_bytes()) == len(whole)


def test_a_result_that_cannot_be_written_leaves_no_half_line(tmp_path):
    """A full disk, or a signal between two writes."""

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if len(data) > 20:
                return super().write(bytes(data[:20]))
            raise OSError(28, "No space left on device")

    partial = PartialFile(tmp_path / "out", KEYS, restart=False)
    partial.add(0, record("one"))
    held, real = partial.path.read_bytes(), partial._file
    partial._file = Full(os.dup(real.fileno()), "r+b")  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        partial.add(1, record("two"))
    partial._file.close()
    partial._file = real
    assert partial.path.read_bytes() == held
    partial.close()


def test_failures_are_not_kept(tmp_path):
    """They are results of this run, and the next tries again; a file without any result goes away."""
    partial = PartialFile(tmp_path / "out", KEYS, restart=False)
    partial.add(1, record("two", "a reason"))
    assert [entry["error"] for entry in partial.records()] == ["a reason"]
    partial.close()
    assert os.listdir(tmp_path) == []


def test_a_folder_in_the_way(tmp_path):
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(ValueError, match=r"out\.partial: it is no ordinary file"):
        PartialFile(tmp_path / "out", KEYS, restart=True)


def test_a_run_that_ends_while_the_next_begins(tmp_path, monkeypatch):
    """It removes the file that the next one has opened, whose results would then be in no folder."""
    lock, calls = results._lock, []

    def late(file: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            path.unlink()
        lock(file, path)

    monkeypatch.setattr(results, "_lock", late)
    partial = filled(tmp_path / "out")
    assert len(calls) == 2
    partial.close()
    assert len(partial.path.read_bytes().splitlines()) == 3


def test_results_in_the_order_of_the_prompts():
    """What comes early waits for those before it, and is written in any case."""
    out = io.StringIO()
    stream = OrderedStream(out, lambda to, entry: to.write(json.dumps(entry)))
    stream.add(1, {"place": 1})
    assert out.getvalue() == ""
    stream.add(0, {"place": 0})
    stream.add(3, {"place": 3})
    assert out.getvalue() == '{"place": 0}{"place": 1}'
    stream.release()
    assert out.getvalue().endswith('{"place": 3}')
    assert stream.written == 3
