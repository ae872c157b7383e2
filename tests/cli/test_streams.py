"""Standard streams that are closed, unwritable or left by their reader: results are never lost to them."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tetrad.cli import signals, streams
from tetrad.cli.main import main

RUN = ("--load-dummy", "--device=cpu", "--max-model-len=128", "--max-num-seqs=2", "--kv-cache-memory-gb=0.5")
FLAGS = (*RUN, "--temperature=0", "--max-tokens=5", "--ignore-eos")


class Failing(io.StringIO):
    """A stream of which every write fails, and of which a flush may."""

    def __init__(self, number: int, *, buffered: bool = False) -> None:
        super().__init__()
        self.number, self.buffered = number, buffered

    def write(self, text: str) -> int:
        return len(text) if self.buffered else self.flush()  # type: ignore[return-value]

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream",
    [None, Failing(errno.ENOSPC), Failing(errno.ENOSPC, buffered=True), Failing(errno.EPIPE), closed()],
    ids=["none", "full", "full-buffered", "no-reader", "closed"],
)
def test_standard_error_may_fail(model, monkeypatch, capsys, stream):
    """``2>&-``, ``2>/dev/full`` and a reader that left each cost the results, although standard output works."""
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["generate", str(model), *FLAGS, "--prompt", "x"]) == 0
    assert capsys.readouterr().out
    with pytest.raises(SystemExit) as leaving:
        main(["generate", "--wrong"])
    assert leaving.value.code == 2
    assert sys.stderr is stream, "the caller's own again"


COMMANDS = [
    ("generate", "m", "--prompt=x"),
    ("generate", "m", "--prompt=x", "--output=-"),
    ("inspect", "m"),
    ("demo",),
    ("eval", "recall"),
    ("bench", "indexer"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_closed_standard_output_is_said_before_the_work(monkeypatch, capsys, arguments):
    """``>&-``: the results of all the work went nowhere, or the end was a traceback."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(arguments) == 2
    assert "standard output is closed" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(errno.EPIPE, 141), (errno.ENOSPC, 1)], ids=["no-reader", "full"])
@pytest.mark.parametrize("buffered", [False, True])
def test_standard_output_may_fail(model, monkeypatch, capsys, number, code, buffered):
    """A reader that left ends the command quietly; a full disk is said. Neither is a traceback."""
    monkeypatch.setattr(sys, "stdout", Failing(number, buffered=buffered))
    assert main(["generate", str(model), *FLAGS, "--prompt", "x"]) == code
    said = "No space left on device" in (err := capsys.readouterr().err)
    assert said == (code == 1)
    assert "Traceback" not in err


@pytest.mark.parametrize("given", [(), ("--prompt-file=-",), ("--input-jsonl=-",)], ids=str)
def test_closed_standard_input(model, monkeypatch, capsys, given):
    """``<&-`` without a prompt was a traceback."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as leaving:
        main(["generate", str(model), *FLAGS, *given])
    assert leaving.value.code == 2
    assert "there is no prompt; give --prompt" in capsys.readouterr().err


def test_unreadable_standard_input(model, monkeypatch, capsys):
    """``0>file``, or closed by whoever called us."""
    for stream in (closed(), open(os.devnull, "w")):  # noqa: SIM115
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["generate", str(model), *FLAGS]) == 2
        assert "cannot read standard input: " in capsys.readouterr().err
        stream.close()


@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
def test_utf16_is_named(tetrad, model, tmp_path, mark):
    """What an editor of Windows may write: every line would fail on its own."""
    file = tmp_path / "in"
    file.write_bytes(mark + '{"prompt": "x"}\n'.encode("utf-16-le"))
    for flag in ("--input-jsonl", "--prompt-file"):
        run = tetrad("generate", model, *FLAGS, flag, file)
        assert run.code == 2
        assert f"cannot read {file}: it is UTF-16; convert it to UTF-8" in run.err


@pytest.mark.parametrize(
    ("flag", "data", "code"),
    [
        ("--input-jsonl", b'{"prompt": "a\xe4"}\n{"prompt": "b\\r\\n"}\r\n', 1),
        ("--prompt-file", b"\xef\xbb\xbfa\r\nb", 0),
    ],
)
def test_a_file_and_standard_input_are_read_alike(model, monkeypatch, capsys, tmp_path, flag, data, code):
    """One line of invalid UTF-8 refused a whole file, and not standard input; the line ends of the two differed."""
    file = tmp_path / "in"
    file.write_bytes(data)
    found = []
    for name in (str(file), "-"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        assert main(["generate", str(model), *FLAGS, "--json", flag, name]) == code
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        found.append([(record["prompt"], record["outputs"], record["error"]) for record in records])
    assert found[0] == found[1]
    assert found[0][-1][0] == ("b\r\n" if code else "a\r\nb")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_descriptors_that_cannot_be_used(model, tmp_path):
    """The whole way, with real descriptors: two closed, and standard error on a full disk, for which the interpreter
    ended with 120 after the results."""
    out = tmp_path / "out.txt"
    arguments = shlex.join([sys.executable, "-m", "tetrad.cli.main", "generate", str(model), *FLAGS, "--prompt=x"])
    script = f"{arguments} --output {shlex.quote(str(out))} <&- >&- 2>/dev/full"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    assert subprocess.run(["sh", "-c", script], env=buffered, timeout=120).returncode == 0
    assert out.read_bytes().endswith(b"\n")
    assert os.listdir(tmp_path) == ["out.txt"]


def test_closed_descriptors_are_filled(monkeypatch):
    """The next file that was opened took the place of a closed stream, and got what C writes there."""
    opened: list[str] = []

    def status(descriptor: int) -> None:
        if descriptor == 2:
            raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(streams.os, "fstat", status)
    monkeypatch.setattr(streams.os, "open", lambda path, flags: opened.append(path))
    streams._fill_descriptors()
    monkeypatch.undo()
    assert opened == [os.devnull]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_a_stream_still_holds_is_thrown_away(tmp_path):
    """The interpreter writes it as it ends, fails again, and ends with 120."""
    with open("/dev/full", "w") as stream:
        stream.write("x")
        streams.discard(stream)
    file = open(tmp_path / "f", "w")  # noqa: SIM115
    file.close()
    streams.discard(file)  # nothing to do, and no error


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signals_end_like_ctrl_c(name):
    """The handlers are the caller's own again afterwards, and a signal that is ignored stays so."""
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with signals.caught() as caught:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            assert (caught.exit_code(130), caught.exit_code(1)) == (128 + number, 1)
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with signals.caught():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


def test_status_lines_in_any_encoding():
    """A character that the terminal lacks never ends a command."""
    raw = io.BytesIO()
    stream = streams.StatusStream(io.TextIOWrapper(raw, encoding="ascii"))
    print("漢 ok", file=stream, flush=True)
    assert raw.getvalue() == b"\\u6f22 ok\n"
    with pytest.raises(OSError, match="closed"):
        streams.StatusStream(None).fileno()
