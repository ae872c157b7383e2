"""What is measured: shapes of decode and prefill, and the indexer's ops on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tetrad.errors import ConfigError
from tetrad.geometry import IndexDtype, IndexLayout


class Op(StrEnum):
    """What is timed: each op alone, and the three together, as a step of an engine runs them."""

    PLAN = "plan"
    SCORE = "score"
    TOPK = "topk"
    TOTAL = "total"

    @property
    def reads_keys(self) -> bool:
        """Whether the dtype of the index cache matters."""
        return self in (Op.SCORE, Op.TOTAL)


class Kind(StrEnum):
    """Decode: every row of a request sees all its entries. Prefill: row t of one request sees entries - rows + 1 + t.

    Rows of a decode request are its last token and what speculation adds to it.
    """

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Shape:
    """``requests`` requests of ``entries`` index entries and ``rows`` query rows each.

    Raises:
        ConfigError: a size is not positive, or a prefill has several requests or more rows than entries.
    """

    kind: Kind
    requests: int
    entries: int
    rows: int

    def __post_init__(self) -> None:
        if min(self.requests, self.entries, self.rows) < 1:
            raise ConfigError(f"{self}: every size must be at least 1")
        if self.kind is Kind.PREFILL and self.requests != 1:
            raise ConfigError(f"{self}: a prefill has one request")
        if self.kind is Kind.PREFILL and self.rows > self.entries:
            raise ConfigError(f"{self}: a prefill has at most as many rows as entries; write ROWSxENTRIES")
        if self.entries >= 1 << 31:
            raise ConfigError(f"{self}: there may be at most {(1 << 31) - 1} entries")

    def __str__(self) -> str:
        if self.kind is Kind.PREFILL:
            return f"prefill {self.rows}x{self.entries}"
        return f"decode {self.requests}x{self.entries}x{self.rows}"

    @property
    def total_rows(self) -> int:
        """Query rows of all requests."""
        return self.requests * self.rows

    @property
    def keys(self) -> int:
        """Keys that must be read: each entry of each request once, however many rows see it."""
        return self.requests * self.entries

    @property
    def scores(self) -> int:
        """Visible (row, entry) pairs."""
        hidden = self.rows * (self.rows - 1) // 2 if self.kind is Kind.PREFILL else 0
        return self.total_rows * self.entries - hidden


def parse_shapes(text: str, kind: Kind) -> tuple[Shape, ...]:
    """Shapes as they stand on a command line.

    text: decode ``64x32768x1,8x32768`` is REQUESTSxENTRIESxROWS, 1 row if left out; prefill ``4096x16384`` is
    ROWSxENTRIES.

    Raises:
        ConfigError: it is written otherwise, or a shape cannot be.
    """
    return tuple(_parse_shape(part.strip(), kind) for part in text.split(","))


def _parse_shape(text: str, kind: Kind) -> Shape:
    allowed, form = ((2, 3), "64x32768x1") if kind is Kind.DECODE else ((2,), "4096x16384")
    # int() would also take signs, spaces and underscores
    if not re.fullmatch(r"[0-9]+(x[0-9]+)+", text) or text.count("x") + 1 not in allowed:
        what = "requests x entries x rows" if kind is Kind.DECODE else "rows x entries"
        raise ConfigError(f"--{kind} {text!r} is not a shape; write {what}, as in {form}")
    sizes = [int(part) for part in text.split("x")]
    if kind is Kind.PREFILL:
        return Shape(kind, 1, sizes[1], sizes[0])
    return Shape(kind, sizes[0], sizes[1], sizes[2] if len(sizes) > 2 else 1)


def default_shapes(device_type: str) -> tuple[Shape, ...]:
    """What is measured where no shape is named: seconds' worth on a CPU, minutes' on a GPU."""
    if device_type == "cpu":
        return (*parse_shapes("1x512x1,4x1024x1,4x1024x2", Kind.DECODE), *parse_shapes("64x512", Kind.PREFILL))
    decode = ",".join(f"{requests}x{entries}" for requests in (1, 8, 64, 256) for entries in (2048, 8192, 32768))
    return (
        *parse_shapes(decode, Kind.DECODE),
        *parse_shapes("64x32768x2,64x32768x4,1x131072,1x262144", Kind.DECODE),
        *parse_shapes("4096x4096,4096x16384,16384x65536", Kind.PREFILL),
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One op on one shape. ``dtype`` is that of the index cache, None where the op never sees it."""

    op: Op
    shape: Shape
    dtype: IndexDtype | None
    heads: int
    head_dim: int
    k: int

    @property
    def layout(self) -> IndexLayout:
        """The layout of the index cache's pages; of an op that reads keys."""
        if self.dtype is None:
            raise ValueError(f"{self.op} reads no keys")
        # random bytes are stored as they are: no key is rotated
        return IndexLayout(self.dtype, self.head_dim, hadamard=False)

    def __str__(self) -> str:
        return " ".join((str(self.shape), *([str(self.dtype)] if self.dtype else []), str(self.op)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What to measure. ``repeats``: measurements of a case, of which the median counts.

    Raises:
        ConfigError: nothing to measure, or a number out of range.
    """

    shapes: tuple[Shape, ...]
    dtypes: tuple[IndexDtype, ...] = (IndexDtype.FP4, IndexDtype.FP8, IndexDtype.BF16)
    ops: tuple[Op, ...] = tuple(Op)
    heads: int = 64
    head_dim: int = 128
    k: int = 512
    repeats: int = 7

    def __post_init__(self) -> None:
        for name, value, least in (("heads", self.heads, 1), ("head-dim", self.head_dim, 1), ("k", self.k, 1)):
            if value < least:
                raise ConfigError(f"--{name} must be at least {least}, got {value}")
        if self.repeats < 5:
            raise ConfigError(
                f"--repeats must be at least 5, so that one disturbed run does not count; got {self.repeats}"
            )
        if not self.shapes or not self.dtypes or not self.ops:
            raise ConfigError("there is nothing to measure: name at least one shape, dtype and op")
        for dtype in self.dtypes:
            IndexLayout(dtype, self.head_dim, hadamard=False)  # refuses what cannot be stored

    def cases(self) -> Iterator[Case]:
        """Every case, shape by shape; what does not depend on the dtype comes once and first."""
        for shape in dict.fromkeys(self.shapes):
            for op in (op for op in Op if op in self.ops and not op.reads_keys):
                yield Case(op, shape, None, self.heads, self.head_dim, self.k)
            for dtype in dict.fromkeys(self.dtypes):
                for op in (op for op in Op if op in self.ops and op.reads_keys):
                    yield Case(op, shape, dtype, self.heads, self.head_dim, self.k)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "shapes": [str(shape) for shape in self.shapes],
            "dtypes": [str(dtype) for dtype in self.dtypes],
            "ops": [str(op) for op in self.ops],
            "heads": self.heads,
            "head_dim": self.head_dim,
            "k": self.k,
            "repeats": self.repeats,
        }
