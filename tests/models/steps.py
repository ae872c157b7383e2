"""Steps built by hand: rows of several requests, as a runner would give them to the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.geometry import DRAFT_ROWS, width_blocks
from tetrad.models.step import Rows, StepShape


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent rows of one request, from position ``start`` on."""

    request: int
    start: int
    count: int

    @property
    def context(self) -> int:
        """Tokens of the request once this step is done."""
        return self.start + self.count


def block_tables(requests: int, tokens: int, seed: int = 0) -> Tensor:
    """int32 [requests, blocks]: distinct blocks in a scattered order."""
    blocks = width_blocks(tokens)
    ids = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(seed))
    return ids.view(requests, blocks).int()


def step_rows(segments: list[Segment], tables: Tensor, more: int = 0) -> Rows:
    """The rows of a step. ``tables``: the blocks of every request; ``more``: rows of padding beyond what is needed."""
    real = sum(segment.count for segment in segments)
    missing = -real % 8 + more

    def rows(values: list[Tensor], padding: int) -> Tensor:
        return torch.nn.functional.pad(torch.cat(values), (0, missing), value=padding)

    def of_segment(name: str) -> list[Tensor]:
        return [torch.full((segment.count,), getattr(segment, name)) for segment in segments]

    width = width_blocks(max(segment.context for segment in segments))
    chunks = any(segment.count > 1 + DRAFT_ROWS for segment in segments)
    return Rows(
        token=torch.zeros(real + missing, dtype=torch.int64),
        request=rows(of_segment("request"), -1).int(),
        position=rows([torch.arange(segment.start, segment.context) for segment in segments], 0),
        first=rows(of_segment("start"), 0),
        count=rows(of_segment("count"), 0).int(),
        wanted=torch.empty(0, dtype=torch.int64),
        block_table=tables[:, :width],
        shape=StepShape(real + missing, 0, width, chunks),
    )


def padded(values: Tensor, rows: Rows) -> Tensor:
    """Values [.., D] of the real rows with NaN behind them: padding must reach nothing."""
    return torch.nn.functional.pad(values, (0, 0, 0, rows.shape.rows - len(values)), value=float("nan"))


def lengths(total: int, chunks: list[int]) -> list[Segment]:
    """One request (number 0) in steps; the last chunk size repeats."""
    segments, start = [], 0
    while start < total:
        count = min(chunks[min(len(segments), len(chunks) - 1)], total - start)
        segments.append(Segment(0, start, count))
        start += count
    return segments
