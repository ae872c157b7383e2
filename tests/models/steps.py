"""Steps built by hand: rows of several sequences, as an engine's stager would tell them to the model."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.geometry import blocks_for
from tetrad.models.step import Segment, StepInputs


def block_tables(requests: int, tokens: int, seed: int = 0) -> Tensor:
    """int32 [requests, blocks]: distinct blocks in a scattered order."""
    blocks = blocks_for(tokens)
    ids = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(seed))
    return ids.view(requests, blocks).int()


def step_inputs(segments: list[Segment], tables: Tensor) -> StepInputs:
    """The inputs of a step. ``segments``: new tokens of the sequences, whose number is their state slot.

    ``tables``: the blocks of every sequence [sequences, blocks], which serve for the window as well.
    """
    rows = sum(segment.count for segment in segments)
    missing = -rows % 8
    positions = torch.cat([torch.arange(segment.start, segment.context) for segment in segments])
    request = torch.cat([torch.full((segment.count,), place) for place, segment in enumerate(segments)])
    used = tables[[segment.state_slot for segment in segments]]
    return StepInputs(
        rows=rows,
        input_ids=torch.zeros(rows + missing, dtype=torch.int64),
        positions=torch.nn.functional.pad(positions, (0, missing)),
        row_request=torch.nn.functional.pad(request, (0, missing), value=-1).int(),
        block_tables=used,
        window_tables=used,
        logits_rows=torch.empty(0, dtype=torch.int64),
        segments=tuple(segments),
    )


def padded(rows: Tensor) -> Tensor:
    """Rows [R, D] with NaN behind them up to a multiple of 8: padding must reach nothing."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 8), value=float("nan"))


def lengths(total: int, chunks: list[int]) -> list[Segment]:
    """One sequence (state slot 0) in steps; the last chunk size repeats."""
    segments, start = [], 0
    while start < total:
        count = min(chunks[min(len(segments), len(chunks) - 1)], total - start)
        segments.append(Segment(0, start, count))
        start += count
    return segments
