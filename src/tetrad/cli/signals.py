"""Signals that end a command: each ends it as Ctrl-C does, so that what is finished is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a command that a user ended."""

_NAMES = ("SIGTERM", "SIGHUP")


class Caught:
    """Which signal came, if one did."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        raise KeyboardInterrupt

    def exit_code(self, code: int) -> int:
        """The code of the command, with the signal's own in the place of Ctrl-C's: 143 for SIGTERM."""
        return 128 + self.number if code == INTERRUPTED and self.number is not None else code


@contextmanager
def caught() -> Iterator[Caught]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt. A signal that is ignored already, as under nohup, stays so."""
    handler, previous = Caught(), {}
    if threading.current_thread() is threading.main_thread():
        for name in _NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, handler)
    try:
        yield handler
    finally:
        for number, former in previous.items():
            signal.signal(number, former)
