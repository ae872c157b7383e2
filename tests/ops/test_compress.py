"""The compressor's pooling against its formula in fp64, one channel at a time."""

from __future__ import annotations

import math

import pytest
import torch
from tests.row_splits import ROWS, assert_row_invariant
from torch import Tensor

from tetrad.ops.compress import compress, update_state

NAN = float("nan")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pool(tokens: list[Tensor | None], overlap: bool) -> list[float]:
    """One entry of the source tokens [2, c * e], oldest first; None is before the first token."""
    width = next(token for token in tokens if token is not None).shape[1]
    dim = width // 2 if overlap else width
    entry = []
    for channel in range(dim):
        gates, values = [], []
        for place, token in enumerate(tokens):
            if token is not None:
                # the newer half of the tokens give the second half of their channels
                half = dim if overlap and place >= len(tokens) // 2 else 0
                values.append(float(token[0, half + channel]))
                gates.append(float(token[1, half + channel]))
        weights = [math.exp(gate - max(gates)) for gate in gates]
        entry.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    return entry


class Step:
    """Rows of several requests, each (request, first position, rows), and rings that hold what the entries need.

    Everything else is NaN: the rest of the rings, and padding rows, whose positions are such that they would complete
    an entry.
    """

    def __init__(
        self, segments: list[tuple[int, int, int]], *, ratio: int, overlap: bool, dim: int, ring: int, padding: int = 3
    ) -> None:
        self.ratio, self.overlap = ratio, overlap
        self.pooled = 2 * ratio if overlap else ratio
        width = 2 * dim if overlap else dim
        self.tokens = {request: normal(first + count, 2, width, seed=request) * 3 for request, first, count in segments}
        self.state = torch.full((4, ring, 2, width), NAN)
        rows, requests, positions, firsts = [], [], [], []
        for request, first, count in segments:
            # the entry that the next row may complete begins here
            for position in range(max(first + 1 - self.pooled, 0), first):
                self.state[request, position % ring] = self.tokens[request][position]
            rows.append(self.tokens[request][first:])
            requests += [request] * count
            positions += range(first, first + count)
            firsts += [first] * count
        self.step = torch.cat([*rows, torch.full((padding, 2, width), NAN)])
        self.request = torch.tensor([*requests, *[-1] * padding], dtype=torch.int32)
        self.position = torch.tensor([*positions, *[ratio - 1] * padding], dtype=torch.int64)
        self.first = torch.tensor([*firsts, *[0] * padding], dtype=torch.int64)

    def compress(self) -> Tensor:
        rows = (self.request, self.position, self.first)
        return compress(self.step, self.state, *rows, ratio=self.ratio, overlap=self.overlap)

    def expected(self, row: int) -> list[float] | None:
        """The entry that a row completes, None if there is none."""
        request, end = int(self.request[row]), int(self.position[row]) + 1
        if request < 0 or end % self.ratio:
            return None
        sources = [self.tokens[request][at] if at >= 0 else None for at in range(end - self.pooled, end)]
        return pool(sources, self.overlap)


@pytest.mark.parametrize(("ratio", "overlap", "ring"), [(4, True, 16), (4, True, 8), (4, False, 4), (6, False, 14)])
@pytest.mark.parametrize(
    "segments",
    [
        [(0, 0, 4)],
        [(2, 0, 1), (0, 3, 1), (3, 7, 1)],
        [(1, 5, 1), (0, 11, 1), (3, 23, 1)],
        [(3, 2, 9), (1, 0, 13), (0, 31, 2)],
        [(0, 46, 2), (2, 3, 30), (1, 18, 10)],
        [(1, 4, 1)],
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [6, 1])
def test_against_the_formula(segments, ratio, overlap, ring, dim):
    """Sources from the step, from the ring, or before the first token, in any mixture. The rest of the ring is NaN.

    A mask multiplied on would turn unwritten memory into NaN in the first entry of a request, and padding into NaN in
    every entry. A row that completes nothing, and padding, give zeros.
    """
    step = Step(segments, ratio=ratio, overlap=overlap, dim=dim, ring=ring)
    before = step.state.clone()
    got = step.compress()
    assert got.shape == (len(step.request), dim)
    assert got.dtype == torch.float32
    assert torch.equal(step.state.nan_to_num(), before.nan_to_num())
    for row, entry in enumerate(got):
        expected = step.expected(row)
        want = torch.zeros(dim).double() if expected is None else torch.tensor(expected).double()
        torch.testing.assert_close(entry.double(), want, rtol=1e-5, atol=1e-6)


def test_large_gates_are_finite():
    """Gates are not bounded: the largest of a channel has to be taken off before exp."""
    step = torch.tensor([[[1.0], [2000.0]], [[3.0], [2000.0]], [[5.0], [-2000.0]]])
    request, position = torch.zeros(3, dtype=torch.int32), torch.arange(3)
    rows = (request, position, torch.zeros_like(position))
    got = compress(step, torch.full((1, 3, 2, 1), NAN), *rows, ratio=3, overlap=False)
    assert got.tolist() == [[0.0], [0.0], [2.0]]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_ring_that_another_request_left(overlap):
    """Tokens before position 0 have no weight, whatever finite numbers stand where they would lie."""
    step = Step([(1, 2, 2)], ratio=4, overlap=overlap, dim=5, ring=16)
    step.state[step.state.isnan()] = 7.0
    torch.testing.assert_close(step.compress()[1].double(), torch.tensor(step.expected(1)).double())


@pytest.mark.parametrize("overlap", [True, False])
def test_rejected_drafts_are_not_read(overlap):
    """A ring with a lookahead holds tokens of positions that were computed and rejected: none of them is pooled."""
    step = Step([(0, 13, 1), (2, 15, 1)], ratio=4, overlap=overlap, dim=5, ring=16)
    pooled = 8 if overlap else 4
    for request, first in ((0, 13), (2, 15)):
        for position in range(first, first + 16 - pooled):
            step.state[request, position % 16] = 1e6
    got = step.compress()
    assert not got[0].any()
    torch.testing.assert_close(got[1].double(), torch.tensor(step.expected(1)).double(), rtol=1e-5, atol=1e-6)


def test_no_entry():
    """A step that completes nothing, one of padding alone, and one without rows."""
    step = Step([(0, 1, 2), (1, 4, 3)], ratio=4, overlap=True, dim=6, ring=16)
    assert torch.equal(step.compress(), torch.zeros(8, 6))
    padding = Step([(0, 0, 0)], ratio=4, overlap=True, dim=6, ring=16)
    assert torch.equal(padding.compress(), torch.zeros(3, 6))
    assert Step([(0, 0, 0)], ratio=4, overlap=True, dim=6, ring=16, padding=0).compress().shape == (0, 6)


def test_update_state_writes_nothing_else():
    """Only the named slots change; other requests' rings are beside them. A slot of -1 is nowhere, not the last."""
    step, state = normal(5, 2, 6, seed=0), torch.full((3, 4, 2, 6), NAN)
    step[[0, 2, 3]] = NAN
    update_state(step, state, torch.tensor([-1, 9, -1, -1, 2]))
    assert torch.equal(state[2, 1], step[1])
    assert torch.equal(state[0, 2], step[4])
    assert state.flatten(0, 1)[[0, 1, 3, 4, 5, 6, 7, 8, 10, 11]].isnan().all()
    before = state.clone()
    update_state(step, state, torch.full((5,), -1))
    update_state(step[:0], state, torch.empty(0, dtype=torch.int64))
    assert torch.equal(state.nan_to_num(), before.nan_to_num())


def test_update_state_into_a_checkpoint():
    """A row may go to a checkpoint besides its ring, or alone, or to neither; checkpoints have places of their own."""
    step, state = normal(4, 2, 6, seed=0), torch.full((2, 16, 2, 6), NAN)
    checkpoints = torch.full((3, 4, 2, 6), NAN)
    slots, kept = torch.tensor([17, -1, 5, -1]), torch.tensor([11, 0, -1, -1])
    update_state(step, state, slots, checkpoints=checkpoints, checkpoint_slots=kept)
    for memory, written in ((state, {17: 0, 5: 2}), (checkpoints, {11: 0, 0: 1})):
        for slot, value in enumerate(memory.flatten(0, 1)):
            assert torch.equal(value, step[written[slot]]) if slot in written else value.isnan().all()


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (16, False), (128, False)])
@pytest.mark.parametrize("in_step", [1, 3])
def test_entries_do_not_depend_on_each_other(ratio, overlap, in_step):
    """torch's softmax over a middle dimension rounds the last channels of a tensor in another way."""
    width, ring = 22, 2 * ratio if overlap else ratio
    state = normal(ROWS, ring, 2, width, seed=1)
    generator = torch.Generator().manual_seed(2)
    end = ratio * torch.randint(1, 4, (ROWS,), generator=generator)

    def last_rows(tokens: Tensor, request: Tensor, end: Tensor) -> Tensor:
        """Every request has ``in_step`` rows; the last completes an entry."""
        first = (end - in_step).repeat_interleave(in_step)
        position = first + torch.arange(in_step).repeat(len(end))
        rows = (request.repeat_interleave(in_step), position, first)
        return compress(tokens.flatten(0, 1), state, *rows, ratio=ratio, overlap=overlap)[in_step - 1 :: in_step]

    tokens = normal(ROWS, in_step, 2, width, seed=0)
    assert_row_invariant(last_rows, tokens, torch.arange(ROWS).int(), end)
