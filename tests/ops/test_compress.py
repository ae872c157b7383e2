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


def sources(places: list[list[str]]) -> tuple[Tensor, Tensor]:
    """(source_rows, source_places) of places such as "r3" (row 3 of the step), "s7" (place 7 of the state) and "-"."""
    rows = [[int(name[1:]) if name[0] == "r" else -1 for name in entry] for entry in places]
    state = [[int(name[1:]) if name[0] == "s" else -1 for name in entry] for entry in places]
    return torch.tensor(rows), torch.tensor(state)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "places",
    [
        [["r0", "r1", "r2", "r3"]],
        [["s5", "s6", "s2", "r0"], ["r0", "r3", "r1", "r4"]],
        [["-", "-", "r0", "r1"], ["-", "-", "s5", "r2"], ["r1", "r2", "r3", "r4"]],
        [["s2", "s5", "s6", "s8"]],
        [["-", "-", "-", "s6", "s8", "r2"]],
    ],
    ids=lambda places: "+".join("".join(entry) for entry in places),
)
@pytest.mark.parametrize("dim", [6, 1])
def test_against_the_formula(places, overlap, dim):
    """Sources from the step, from the state, or before the first token, in any mixture. The rest of the state is NaN.

    A mask multiplied on would turn unwritten memory into NaN in the first entry of a request.
    """
    width = 2 * dim if overlap else dim
    step, state = normal(5, 2, width, seed=0) * 3, torch.full((9, 2, width), NAN)
    written = [2, 5, 6, 8]
    state[written] = normal(4, 2, width, seed=1) * 3
    got = compress(step, state, *sources(places), overlap=overlap)
    assert got.shape == (len(places), dim)
    assert got.dtype == torch.float32
    for entry, names in zip(got, places, strict=True):
        tokens = [None if name == "-" else (step if name[0] == "r" else state)[int(name[1:])] for name in names]
        torch.testing.assert_close(entry.double(), torch.tensor(pool(tokens, overlap)).double(), rtol=1e-5, atol=1e-6)


def test_large_gates_are_finite():
    """Gates are not bounded: the largest of a channel has to be taken off before exp."""
    step = torch.tensor([[[1.0], [2000.0]], [[3.0], [2000.0]], [[5.0], [-2000.0]]])
    got = compress(step, torch.full((1, 2, 1), NAN), *sources([["r0", "r1", "r2"]]), overlap=False)
    assert got.tolist() == [[2.0]]


def test_no_entry():
    """A step that completes nothing."""
    none = torch.empty((0, 8), dtype=torch.int64)
    assert compress(normal(3, 2, 12, seed=0), normal(4, 2, 12, seed=1), none, none, overlap=True).shape == (0, 6)


def test_update_state_writes_nothing_else():
    """Only the named places change; other requests' places are beside them."""
    step, state = normal(5, 2, 6, seed=0), torch.full((9, 2, 6), NAN)
    update_state(step, state, torch.tensor([4, 1]), torch.tensor([7, 0]))
    assert torch.equal(state[7], step[4])
    assert torch.equal(state[0], step[1])
    assert state[[1, 2, 3, 4, 5, 6, 8]].isnan().all()
    update_state(step, state, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert torch.equal(state[7], step[4])


@pytest.mark.parametrize(("overlap", "count"), [(True, 8), (False, 16), (False, 128)])
def test_entries_do_not_depend_on_each_other(overlap, count):
    """torch's softmax over a middle dimension rounds the last channels of a tensor in another way."""
    step, state = normal(60, 2, 22, seed=0), normal(70, 2, 22, seed=1)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(-1, 60, (ROWS, count), generator=generator)
    places = torch.where(rows < 0, torch.randint(-1, 70, (ROWS, count), generator=generator), -1)
    rows[:, -1] = 5  # every entry has a source
    places[:, -1] = -1
    assert_row_invariant(lambda *entry: compress(step, state, *entry, overlap=overlap), rows, places)
