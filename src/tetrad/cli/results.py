"""Where the results of ``tetrad generate`` go, so that none is lost when the command ends early.

A file gets them at the end, in the order of the prompts. Until then they are in a partial file beside it, each as soon
as it is done, and the same command takes up from there. Standard output, a pipe or a device gets each result when those
of the prompts before it are written.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import stat
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

from tetrad.cli.streams import require_output, say, write_line
from tetrad.errors import ConfigError

try:
    import fcntl
except ImportError:  # only where there are no such locks
    fcntl = None

Record = dict[str, Any]
Render = Callable[[TextIO, Record], None]
_RESUME = "resume_key"
_HEAD = b'{"request_id": '
"""What each line of a partial file begins with."""


class Results(Protocol):
    """Takes the result of each prompt once, in any order."""

    def has(self, place: int) -> bool:
        """Whether an earlier run has done the prompt."""
        ...

    def add(self, place: int, record: Record) -> None:
        """Keep a result. ``place``: of the prompt, from 0."""
        ...


class OrderedStream:
    """Writes results in the order of the prompts; those that come early wait, and are written when the command ends."""

    def __init__(self, out: TextIO, render: Render) -> None:
        self._out, self._render = out, render
        self._waiting: dict[int, Record] = {}
        self._next = 0
        self.written = 0

    def has(self, place: int) -> bool:
        return False

    def add(self, place: int, record: Record) -> None:
        self._waiting[place] = record
        while self._next in self._waiting:
            self._write(self._next)
            self._next += 1

    def release(self) -> None:
        """Write what waits for a prompt that will have no result."""
        for place in sorted(self._waiting):
            self._write(place)

    def _write(self, place: int) -> None:
        self._render(self._out, self._waiting.pop(place))
        self.written += 1


class PartialFile:
    """Results as lines of JSON in ``NAME.partial``, each with the key of its prompt. Failures are not in it.

    Args:
        target: the file that the results are for.
        keys: what the result of each prompt depends on.
        restart: throw away what an earlier run left.

    Raises:
        ConfigError: it cannot be written, another run writes it, or it holds results of something else.
    """

    def __init__(self, target: Path, keys: list[str], *, restart: bool) -> None:
        self.path = target.with_name(f"{target.name}.partial")
        self._keys, self._spans = keys, dict[int, tuple[int, int]]()
        self._failures: dict[int, Record] = {}
        self._end = 0
        self._file = self._open(target)
        try:
            if restart:
                self._file.truncate(0)
            self._read()
        except BaseException:
            self.close()
            raise

    def _open(self, target: Path) -> BinaryIO:
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"cannot write {self.path}: it is no ordinary file; give --output another file")
        while True:
            file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
            try:
                _lock(file, self.path)
                if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    _take_over(target, self.path, or_else=stat.S_IRUSR | stat.S_IWUSR)
                    return file
            except FileNotFoundError:
                pass
            except BaseException:
                file.close()  # and no more: it is another run's
                raise
            file.close()  # a run that ended between the two calls took the file away

    def __len__(self) -> int:
        return len(self._spans)

    def _read(self) -> None:
        """Find the results of an earlier run, whose last line may be torn."""
        places = {key: place for place, key in enumerate(self._keys)}
        with open(os.dup(self._file.fileno()), "rb") as reader:
            for line in reader:
                if not line.endswith(b"\n") and line.startswith(_HEAD[: len(line)]):
                    break
                key = _key_of(line, self.path)
                if key not in places:
                    raise ConfigError(
                        f"{self.path} holds results of other prompts, another model or other flags; give --restart to "
                        "throw them away, or another --output"
                    )
                self._spans[places[key]] = (self._end, len(line))
                self._end += len(line)
        self._file.truncate(self._end)

    def has(self, place: int) -> bool:
        return place in self._spans

    def add(self, place: int, record: Record) -> None:
        if record["error"] is not None:
            self._failures[place] = record  # the next run tries it again
            return
        line = json.dumps(record | {_RESUME: self._keys[place]}).encode() + b"\n"
        try:
            self._file.seek(self._end)
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:
            self._file.truncate(self._end)  # no half line
            raise
        self._spans[place] = (self._end, len(line))
        self._end += len(line)

    def records(self) -> Iterator[Record]:
        """All results, in the order of the prompts."""
        for place in sorted(self._spans.keys() | self._failures.keys()):
            if place in self._failures:
                yield self._failures[place]
                continue
            start, length = self._spans[place]
            self._file.seek(start)
            record = json.loads(_read_all(self._file, length))
            del record[_RESUME]
            yield record

    def close(self) -> None:
        """Close it; it stays only if it holds something."""
        if not os.fstat(self._file.fileno()).st_size:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def remove(self) -> None:
        """Close it when the results are where they belong."""
        self.path.unlink(missing_ok=True)
        self._file.close()


def _read_all(file: BinaryIO, length: int) -> bytes:
    parts = []
    while length and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _key_of(line: bytes, path: Path) -> str:
    try:
        return json.loads(line)[_RESUME]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no partial file of ours; give --restart to overwrite it, or another --output"
        ) from error


def _lock(file: BinaryIO, path: Path) -> None:
    """Two runs that wrote the same file would double its results."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"another run writes {path}; wait for it, or give another --output") from error
    except OSError:
        pass  # this file system has no locks


def _take_over(existing: Path, new: Path, or_else: int = 0) -> None:
    """Give a new file the permissions, and where it may be the group, of the file that it is for; and ``or_else``."""
    with contextlib.suppress(OSError):
        status = existing.stat()
        with contextlib.suppress(OSError, AttributeError):
            os.chown(new, -1, status.st_gid)
        new.chmod(stat.S_IMODE(status.st_mode) | or_else)


@contextlib.contextmanager
def opened(path: Path | None, keys: list[str], render: Render, *, restart: bool) -> Iterator[Results]:
    """Where results go: ``path``, or standard output where it is None.

    keys: what the result of each prompt depends on. render: writes one result as the user wants it.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        require_output()
        yield from _streamed(sys.stdout, len(keys), render)
        return
    is_file = path.is_file() or not path.exists()
    target = Path(os.path.realpath(path))
    if restart and not is_file:
        raise ConfigError(f"--restart: {path} is no ordinary file, so no partial file is beside it; leave it out")
    try:
        # a pipe or a device cannot be replaced
        goal = PartialFile(target, keys, restart=restart) if is_file else path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give --output another file") from error
    if isinstance(goal, PartialFile):
        yield from _collected(goal, target, len(keys), render)
    else:
        with goal:
            yield from _streamed(goal, len(keys), render)


def _streamed(out: TextIO, total: int, render: Render) -> Iterator[OrderedStream]:
    stream = OrderedStream(out, render)
    try:
        yield stream
    except OSError:
        raise  # nothing more can be written
    except BaseException:
        stream.release()
        if total > 1:
            say(f"tetrad: {stream.written} of {total} results were written; with --output FILE a run can be taken up")
        raise


def _collected(partial: PartialFile, target: Path, total: int, render: Render) -> Iterator[PartialFile]:
    if len(partial):
        say(f"{partial.path} has {len(partial)} of {total} results; going on with the rest")
    try:
        yield partial
        _deliver(partial, target, render)
    except BaseException:
        if len(partial):
            say(
                f"tetrad: {len(partial)} of {total} results are kept in {partial.path}; the same command goes on "
                "with the rest"
            )
        partial.close()
        raise
    partial.remove()


def _deliver(partial: PartialFile, target: Path, render: Render) -> None:
    """Write the results to a hidden file and move it into place."""
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("x", encoding="utf-8") as out:
            _take_over(target, unfinished)
            for record in partial.records():
                render(out, record)
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_json(out: TextIO, record: Record) -> None:
    """One line of JSON, in characters that the output has."""
    utf8 = codecs.lookup(out.encoding or "utf-8").name == "utf-8"
    write_line(out, json.dumps(record, ensure_ascii=not utf8))


@dataclass
class Text:
    """Writes the text of each choice (the ids, where there is no text), under a heading where there are several."""

    several: bool
    has_text: bool = True

    def __call__(self, out: TextIO, record: Record) -> None:
        choices, name = record["outputs"], record["request_id"]
        for choice in choices:
            if self.several or len(choices) > 1:
                write_line(out, f"--- prompt {name}, choice {choice['index']} ({choice['finish_reason']})")
            write_line(out, choice["text"] if self.has_text else " ".join(map(str, choice["token_ids"])))
