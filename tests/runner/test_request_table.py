"""The request table against one of plain lists: rows, lengths, last tokens and block tables after any plans."""

from __future__ import annotations

import random

import pytest
import torch

from tetrad.core.messages import Sampling
from tetrad.core.plan import NEXT, Admission, BlockDelta, Segment, StepPlan
from tetrad.geometry import DRAFT_ROWS, blocks_for, width_blocks
from tetrad.models.step import Rows
from tetrad.runner.request_table import RequestTable, step_shape

REQUESTS, MAX_BLOCKS, STEP_ROWS = 5, 7, 24


class Listed:
    """The same table as lists, beside the real one."""

    def __init__(self, step_rows: int = STEP_ROWS) -> None:
        self.table = RequestTable(
            requests=REQUESTS, max_model_len_blocks=MAX_BLOCKS, step_rows=step_rows, device=torch.device("cpu")
        )
        self.blocks = [[0] * MAX_BLOCKS for _ in range(REQUESTS)]
        self.length, self.last_token = [0] * REQUESTS, [0] * REQUESTS

    def apply(self, plan: StepPlan) -> Rows:
        """Apply a plan to both; the rows, compared with what the plan says."""
        rows = self.table.apply(plan)
        for request, index, block in plan.blocks:
            self.blocks[request][index] = block
        for admission in plan.admissions:
            self.length[admission.request] = admission.computed
        expected = []
        for request, count, start, tokens, _ in plan.segments:
            first = self.length[request] if start == NEXT else start
            known = (self.last_token[request], *tokens) if start == NEXT else tokens
            expected += [(known[i], request, first + i, first, count) for i in range(count)]
        expected += [(0, -1, 0, 0, 0)] * (rows.shape.rows - len(expected))
        fields = (rows.token, rows.request, rows.position, rows.first, rows.count)
        assert list(zip(*(field.tolist() for field in fields), strict=True)) == expected
        self.check_wanted(plan, rows)
        self.check_table()
        return rows

    def check_wanted(self, plan: StepPlan, rows: Rows) -> None:
        wanted, end = [], 0
        for segment in plan.segments:
            end += segment.count
            wanted += range(end - segment.wanted, end)
        assert rows.wanted.tolist() == wanted + [-1] * (rows.shape.wanted - len(wanted))
        assert rows.shape == step_shape(plan, "cpu")

    def check_table(self) -> None:
        assert self.table.block_table.tolist() == self.blocks
        assert self.table.length[:REQUESTS].tolist() == self.length
        assert self.table.last_token[:REQUESTS].tolist() == self.last_token

    def advance(self, plan: StepPlan, rows: Rows, accepted: list[int] | None) -> None:
        """Count all rows, or so many of each segment."""
        counts = [segment.count for segment in plan.segments] if accepted is None else accepted
        each = [count for count, part in zip(counts, plan.segments, strict=True) for _ in range(part.count)]
        padded = torch.tensor(each + [9] * (rows.shape.rows - len(each)), dtype=torch.int64)
        self.table.advance(rows, None if accepted is None else padded)
        for segment, count in zip(plan.segments, counts, strict=True):
            self.length[segment.request] = rows.first[rows.request == segment.request][0].item() + count
        self.check_table()

    def draw(self, drawn: list[tuple[int, int]]) -> None:
        self.table.draw(drawn)
        for request, token in drawn:
            self.last_token[request] = token
        self.check_table()


def admission(request: int, computed: int = 0) -> Admission:
    return Admission(request, computed, (), (), Sampling(), 0)


@pytest.mark.parametrize("seed", range(12))
def test_any_history(seed):
    """Chunks, decode rows and drafts of which some are rejected, rows that change owners, at any lengths."""
    rng = random.Random(seed)
    listed, running = Listed(), set[int]()
    for _ in range(60):
        segments, admissions, blocks = [], [], []
        room = STEP_ROWS
        for request in rng.sample(range(REQUESTS), rng.randint(1, REQUESTS)):
            new = request not in running or rng.random() < 0.1 or listed.length[request] > 1500
            start = rng.choice([0, 0, 256, 300]) if new else listed.length[request]
            if new:  # the row is another sequence's from here on; computed > 0 is a fork
                admissions.append(admission(request, start))
                blocks += [BlockDelta(request, index, rng.randrange(99)) for index in range(blocks_for(start + 30))]
            decodes = not new and rng.random() < 0.6
            count = rng.randint(1, min(room - REQUESTS, 1 + DRAFT_ROWS if decodes else 17))
            tokens = tuple(rng.randrange(1, 500) for _ in range(count - decodes))
            wanted = rng.randint(0, count)
            segments.append(Segment(request, count, NEXT if decodes else start, tokens, wanted))
            running.add(request)
            room -= count
            if room <= REQUESTS:
                break
        plan = StepPlan(tuple(segments), width_blocks(1600), tuple(admissions), tuple(blocks))
        rows = listed.apply(plan)
        accepted = [rng.randint(0, segment.count) for segment in segments] if rng.random() < 0.5 else None
        listed.advance(plan, rows, accepted)
        listed.draw([(segment.request, rng.randrange(500)) for segment in segments])


@pytest.mark.parametrize(("counts", "rows"), [((8,), 8), ((9,), 16), ((3, 5), 8), ((3, 5, 1), 16), ((24,), 24)])
def test_edges_of_a_bucket(counts, rows):
    """A full bucket has no padding row; one row more begins the next bucket, whose padding touches no request."""
    listed = Listed()
    plan = StepPlan(
        tuple(Segment(request, count, 0, tuple(range(1, count + 1)), 1) for request, count in enumerate(counts)),
        admissions=tuple(admission(request) for request in range(len(counts))),
    )
    given = listed.apply(plan)
    assert given.shape.rows == rows
    listed.advance(plan, given, None)
    assert listed.length[: len(counts)] == list(counts)


def test_more_changes_than_the_buffer_had_room_for():
    """All requests start at once as forks of a long prefix; later steps use the larger buffer."""
    listed = Listed(step_rows=REQUESTS)
    full = tuple(BlockDelta(request, index, 7 * request + index) for request in range(REQUESTS) for index in range(7))
    segments = tuple(Segment(request, 1, 0, (request + 1,), 1) for request in range(REQUESTS))
    plan = StepPlan(segments, 8, tuple(admission(request) for request in range(REQUESTS)), full)
    listed.advance(plan, listed.apply(plan), None)
    listed.draw([(request, 40 + request) for request in range(REQUESTS)])
    plan = StepPlan(tuple(Segment(request, 1, NEXT, (), 1) for request in range(REQUESTS)), 8)
    listed.advance(plan, listed.apply(plan), None)
    assert listed.length == [2] * REQUESTS


@pytest.mark.parametrize("step_rows", [1, 5, 24, 300])
def test_the_buffer_stays_where_it_is(step_rows):
    """In small steps it once moved with the first one, since the rows that only fill a bucket were not counted."""
    listed = Listed(step_rows)
    before = listed.table._buffer._target.data_ptr()
    starting = min(step_rows, REQUESTS)
    counts = [1] * (starting - 1) + [step_rows - starting + 1]
    segments = [Segment(request, count, 255, tuple(range(count)), count) for request, count in enumerate(counts)]
    deltas = [
        BlockDelta(request, index, index)
        for request, count in enumerate(counts)
        for index in range(blocks_for(255 + count) - (count > 1))
    ]
    listed.apply(
        StepPlan(tuple(segments), 2, tuple(admission(request, 255) for request in range(starting)), tuple(deltas))
    )
    assert listed.table._buffer._target.data_ptr() == before


def test_drafts_go_on_behind_what_was_accepted():
    """The row behind a rejected draft has that draft's position, and the token that was drawn in its place."""
    listed = Listed()
    plan = StepPlan((Segment(2, 5, 0, (1, 2, 3, 4, 5), 1),), admissions=(admission(2),))
    listed.advance(plan, listed.apply(plan), None)
    listed.draw([(2, 6)])
    drafts = StepPlan((Segment(2, 4, NEXT, (7, 8, 9), 4),))
    rows = listed.apply(drafts)
    assert (rows.token[:4].tolist(), rows.position[:4].tolist()) == ([6, 7, 8, 9], [5, 6, 7, 8])
    listed.advance(drafts, rows, [2])
    listed.draw([(2, 88)])
    rows = listed.apply(StepPlan((Segment(2, 1, NEXT, (), 1),)))
    assert (rows.token[0].item(), rows.position[0].item()) == (88, 7)
