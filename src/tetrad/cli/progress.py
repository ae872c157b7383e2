"""How far a command is, on standard error: one line that is rewritten on a terminal, a line a minute elsewhere.

A thread of its own writes it, so that the line comes whatever the command is busy with.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from tetrad.cli.streams import is_terminal

TERMINAL_SECONDS = 0.5
SILENT_SECONDS = 50.0
"""Less than a minute, so that none passes without a word."""
_ERASE = "\r\x1b[K"


class Progress:
    """Shows a text that changes while a command works.

    Args:
        state: gives the text; it is called from the thread, so it only reads.
        rewrite: False keeps a terminal quiet, where something else shows progress there.
        stream: standard error, if it is None.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        state: Callable[[], str],
        *,
        rewrite: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._stream, self._clock = state, stream or sys.stderr, clock
        self._terminal = is_terminal(self._stream)
        self._hidden = self._terminal and not rewrite
        self._shown = False
        self._start = clock()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._start = self._clock()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self.hide()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._end.wait(TERMINAL_SECONDS if self._terminal else SILENT_SECONDS):
            self.show()

    def show(self) -> None:
        """Write the line now."""
        with self._lock:
            if self._hidden or self._end.is_set():
                return
            text = f"{self._state()}, {minutes(self._clock() - self._start)}"
            if self._terminal:
                text = _ERASE + text[: self._columns() - 1]
            self._stream.write(text if self._terminal else f"{text}\n")
            self._stream.flush()
            self._shown = True

    def hide(self) -> None:
        """Erase the line from a terminal and write it there no more: results follow."""
        with self._lock:
            if self._terminal:
                if self._shown:
                    self._stream.write(_ERASE)
                    self._stream.flush()
                self._shown, self._hidden = False, True

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80


def minutes(seconds: float) -> str:
    """Elapsed time as 0:07, 12:30 or 1:02:03."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    tail = f"{rest % 60:02}"
    return f"{hours}:{rest // 60:02}:{tail}" if hours else f"{rest // 60}:{tail}"
