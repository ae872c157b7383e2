"""Cache groups: what a model keeps, for how long, and how many bytes that takes. Computed from layouts, never guessed.

A model declares its groups; this package allocates, sizes, copies and poisons them without knowing their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tetrad.geometry import BLOCK_SIZE, PageLayout, ceil_div, page_stride

_FP32_BYTES = 4


class Lifetime(StrEnum):
    """How long an entry is kept, and so what it is addressed by."""

    CONTEXT = "whole context"
    """As long as its request: in the pages of the request's blocks."""

    WINDOW = "window ring"
    """Until the window has passed it: in a page per request; behind those, a slot for each row of a step."""

    COMPRESSOR = "compressor ring"
    """Until the entry that pools it is complete: in a ring of fp32 values per request."""


@dataclass(frozen=True, slots=True)
class RingLayout:
    """A compressor's ring of one request: ``places`` tokens of u and g, fp32 [places, 2, width]."""

    places: int
    width: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one request's ring."""
        return self.places * 2 * self.width * _FP32_BYTES


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """How many of everything: blocks, requests at once, rows in a step."""

    blocks: int
    requests: int
    step_rows: int


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The caches of some layers that are alike. ``tokens_per_entry``: original tokens behind one entry."""

    name: str
    layers: tuple[int, ...]
    lifetime: Lifetime
    tokens_per_entry: int
    layout: PageLayout | RingLayout

    @property
    def page_stride(self) -> int:
        """Bytes from one layer's page (or ring) to its next."""
        return self.layout.page_bytes if isinstance(self.layout, RingLayout) else page_stride(self.layout)

    def pages(self, sizes: CacheSizes) -> int:
        """Pages of one layer: one for each block, or for each request and the rows of a step."""
        if self.lifetime is Lifetime.CONTEXT:
            return sizes.blocks
        if self.lifetime is Lifetime.COMPRESSOR or isinstance(self.layout, RingLayout):
            return sizes.requests
        return sizes.requests + ceil_div(sizes.step_rows, self.layout.entries)

    def bytes(self, sizes: CacheSizes) -> int:
        """Bytes of the whole group."""
        return len(self.layers) * self.pages(sizes) * self.page_stride


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """All groups of a model."""

    groups: tuple[CacheGroup, ...]

    def __iter__(self) -> Iterator[CacheGroup]:
        return iter(self.groups)

    def __getitem__(self, name: str) -> CacheGroup:
        return next(group for group in self.groups if group.name == name)

    def __contains__(self, name: str) -> bool:
        return any(group.name == name for group in self.groups)

    @property
    def block_bytes(self) -> dict[str, int]:
        """Bytes that one block takes over all layers, by group."""
        kept = [group for group in self.groups if group.lifetime is Lifetime.CONTEXT]
        return {group.name: len(group.layers) * group.page_stride for group in kept}

    @property
    def bytes_per_entry(self) -> dict[str, int]:
        """Bytes of one entry in one layer, with its scales, by group of the whole context."""
        layouts = {group.name: group.layout for group in self.groups if not isinstance(group.layout, RingLayout)}
        return {name: layout.data_row_bytes + layout.scale_row_bytes for name, layout in layouts.items()}

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Bytes by which each group grows with one more token of context."""
        return {name: size / BLOCK_SIZE for name, size in self.block_bytes.items()}

    def request_bytes(self, lifetime: Lifetime) -> int:
        """Bytes that one request takes whatever its length, over all groups of a lifetime."""
        rings = [group for group in self.groups if group.lifetime is lifetime is not Lifetime.CONTEXT]
        return sum(len(group.layers) * group.page_stride for group in rings)

    def step_bytes(self, step_rows: int) -> int:
        """Bytes of the slots for the rows of a step."""
        none = CacheSizes(0, 0, 0)
        step = CacheSizes(0, 0, step_rows)
        return sum(group.bytes(step) - group.bytes(none) for group in self.groups)

    def total_bytes(self, sizes: CacheSizes) -> int:
        """Bytes of all groups."""
        return sum(group.bytes(sizes) for group in self.groups)


@dataclass(frozen=True, slots=True)
class CacheDemand:
    """What an engine asks of its caches, by number and by bytes over all layers."""

    requests: int
    step_rows: int
    window_bytes: int  # of one request
    ring_bytes: int  # of one request's compressors
    step_bytes: int  # of all rows of a step
    block_bytes: int
    blocks_per_request: int  # of a request of the greatest length

    @classmethod
    def of(cls, groups: CacheGroups, *, requests: int, step_rows: int, blocks_per_request: int) -> CacheDemand:
        """The demand of so many requests at once, and so many rows in a step."""
        return cls(
            requests=requests,
            step_rows=step_rows,
            window_bytes=groups.request_bytes(Lifetime.WINDOW),
            ring_bytes=groups.request_bytes(Lifetime.COMPRESSOR),
            step_bytes=groups.step_bytes(step_rows),
            block_bytes=sum(groups.block_bytes.values()),
            blocks_per_request=blocks_per_request,
        )

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are there however long the requests are: rings and the slots of a step's rows."""
        return self.requests * (self.window_bytes + self.ring_bytes) + self.step_bytes

    def describe_fixed(self) -> str:
        """The arithmetic of ``fixed_bytes``, for a reader."""
        one = self.window_bytes + self.ring_bytes
        return (
            f"{self.requests} requests x {format_bytes(one)} of window and compressor rings = "
            f"{format_bytes(self.requests * one)}, {self.step_rows} rows of a step = {format_bytes(self.step_bytes)}"
        )

    def total_bytes(self, requests: int) -> int:
        """Bytes with which this many requests of the greatest length fit."""
        return self.fixed_bytes + requests * self.blocks_per_request * self.block_bytes

    def sizes(self, blocks: int) -> CacheSizes:
        """The sizes with so many blocks."""
        return CacheSizes(blocks, self.requests, self.step_rows)


def format_bytes(count: float) -> str:
    """``count`` bytes for a reader: "4352 B", "3.4 GiB"."""
    if count < 1024:
        return f"{count:g} B"
    power = min(int(math.log2(count) // 10), 4)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
