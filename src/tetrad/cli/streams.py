"""The standard streams as they really are: closed, on a full disk, left by their reader, or without our characters.

``guarded`` makes three promises to all commands. A status line on standard error never fails. Standard output that is
closed is an error before the work. A reader of standard output that left ends the command without a complaint.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tetrad.errors import ConfigError

READER_LEFT = 141
"""The exit code where the reader of our output left: a shell's for SIGPIPE."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_CLOSED = "standard output is closed, so results have nowhere to go; open it, or give --output FILE where there is one"


class StatusStream(io.TextIOBase):
    """Standard error for status lines. What cannot be written is lost, and the work goes on.

    stream: the real standard error; None where it is closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the real stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("standard error is closed")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Characters that the stream lacks are written as escapes."""
        if self._stream is not None:
            with self._forgiving(self._stream):
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with self._forgiving(self._stream):
                self._stream.flush()

    @contextmanager
    def _forgiving(self, stream: TextIO) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):
            self._stream = None
            discard(stream)


class _ClosedOutput(io.TextIOBase):
    """Standard output where there is none: writing to it is an error that says so."""

    encoding = "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise ConfigError(_CLOSED)


@contextmanager
def guarded() -> Iterator[None]:
    """Replace what is wrong with the standard streams while a command runs."""
    _fill_descriptors()
    out, err = sys.stdout, sys.stderr
    errors = out.errors if isinstance(out, io.TextIOWrapper) else None
    if errors is not None:
        out.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stderr = StatusStream(err)
    if out is None:
        sys.stdout = _ClosedOutput()  # type: ignore[assignment]
    try:
        yield
    finally:
        if out is not None:
            try:
                out.flush()
            except (OSError, ValueError):
                discard(out)  # or the interpreter would try again as it ends, and complain
            if errors is not None:
                with suppress(OSError, ValueError):
                    out.reconfigure(errors=errors)  # type: ignore[union-attr]
        sys.stderr.flush()
        sys.stdout, sys.stderr = out, err


def _fill_descriptors() -> None:
    """A closed descriptor 0, 1 or 2 would be given to the next file that is opened: messages of C would go there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def discard(stream: TextIO) -> None:
    """Send what a stream still holds nowhere, since it cannot be written."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


def say(text: str) -> None:
    """A status line on standard error."""
    print(text, file=sys.stderr, flush=True)


def is_terminal(stream: Any) -> bool:
    """Whether somebody watches the stream; False where it is closed or None."""
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def require_output() -> None:
    """Called before the work of a command that prints its results.

    Raises:
        ConfigError: standard output is closed.
    """
    if sys.stdout is None or isinstance(sys.stdout, _ClosedOutput):
        raise ConfigError(_CLOSED)


def read_bytes(path: Path) -> bytes:
    """A file as it is; ``-`` is standard input, of which nothing comes where it is closed.

    Raises:
        ConfigError: it cannot be read, or it is UTF-16.
    """
    try:
        data = path.read_bytes() if str(path) != "-" else _read_input()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # the name is there once
        raise ConfigError(f"cannot read {name_of(path)}: {reason}") from error
    if data.startswith(_UTF16):
        raise ConfigError(f"cannot read {name_of(path)}: it is UTF-16; convert it to UTF-8")
    return data


def name_of(path: Path) -> str:
    """For messages."""
    return "standard input" if str(path) == "-" else str(path)


def _read_input() -> bytes:
    if sys.stdin is None:
        return b""
    if is_terminal(sys.stdin):
        say("reading from the terminal; Ctrl-D ends it")
    raw = getattr(sys.stdin, "buffer", None)
    return raw.read() if raw is not None else sys.stdin.read().encode("utf-8", "surrogatepass")


def write_line(out: TextIO, text: str, end: str = "\n") -> None:
    """Print and flush. Characters that the output's encoding lacks are written as escapes."""
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "backslashreplace").decode(encoding) + end)
    out.flush()
