"""A step's window and entries against what every row must see, said one position at a time."""

from __future__ import annotations

import pytest
import torch
from tests.models.steps import Segment, block_tables, step_rows

from tetrad.geometry import DRAFT_ROWS, window_ring
from tetrad.models.step import WindowMetadata

FREQUENCIES = torch.tensor([1.0, 0.25])
REQUESTS = 4
RING_ROWS = 1 + DRAFT_ROWS


def window_of(segments: list[Segment], window: int, more: int = 0):
    rows = step_rows(segments, block_tables(REQUESTS, 1024), more)
    return rows, WindowMetadata.build(rows, window, FREQUENCIES)


@pytest.mark.parametrize("window", [1, 8, 11, 128])
@pytest.mark.parametrize("start", [0, 3, 127, 128, 300])
@pytest.mark.parametrize("count", [1, RING_ROWS, RING_ROWS + 1, 137])
def test_where_keys_lie(window, start, count):
    """Up to 9 rows are in the ring before any row reads; more lie in the step's slots, and only older keys in the ring.

    The others of the step are a decode row and a chunk. What a row sees is by position, and behind it -1.
    """
    ring = window_ring(window)
    segments = [Segment(2, start, count), Segment(0, 77, 1), Segment(3, 5, RING_ROWS + 2)]
    rows, metadata = window_of(segments, window, more=8)
    behind_rings = REQUESTS * ring
    row = 0
    for segment in segments:
        chunk = segment.count > RING_ROWS
        first_row = row
        for position in range(segment.start, segment.context):
            in_ring = segment.request * ring + position % ring
            assert metadata.own[row] == (behind_rings + row if chunk else in_ring)
            seen = [
                behind_rings + first_row + place - segment.start
                if chunk and place >= segment.start
                else segment.request * ring + place % ring
                for place in range(max(0, position - window + 1), position + 1)
            ]
            assert metadata.visible[row].tolist() == seen + [-1] * (window - len(seen))
            kept = chunk and position >= segment.context - ring
            assert metadata.kept_from[row] == (behind_rings + row if kept else -1)
            assert metadata.kept_to[row] == (in_ring if kept else -1)
            row += 1
    for padding in (metadata.own, metadata.visible, metadata.kept_from, metadata.kept_to):
        assert len(padding) == rows.shape.rows > row
        assert (padding[row:] == -1).all()


def test_no_slot_has_two_writers():
    """Of all rows and copies of a step, whatever its segments."""
    segments = [Segment(0, 40, RING_ROWS), Segment(1, 500, 1), Segment(2, 0, 300), Segment(3, 9, RING_ROWS + 1)]
    _, metadata = window_of(segments, 128)
    for slots in (metadata.own, metadata.kept_to):
        used = [slot for slot in slots.tolist() if slot >= 0]
        assert len(used) == len(set(used))
    assert not {*metadata.own.tolist()} & {*metadata.kept_to.tolist()} - {-1}


def test_a_step_without_chunks_copies_nothing():
    """Nor does it look for rows of chunks: such steps are a bucket of their own."""
    rows, metadata = window_of([Segment(1, 60, RING_ROWS), Segment(2, 0, 3)], 16)
    assert not rows.shape.chunks
    assert (metadata.kept_from == -1).all()
    assert (metadata.kept_to == -1).all()
    assert (metadata.own < REQUESTS * window_ring(16)).all()
