"""The compressor over many steps against its formula over the whole sequence.

The state begins as NaN: what is read without having been written shows. Padding rows are NaN as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.models.formulas import pooled_entries
from tests.models.steps import block_tables, lengths, padded, step_inputs
from torch import Tensor

from tetrad.geometry import state_ring
from tetrad.models.compressor import Compressor
from tetrad.models.step import CompressPlan, Segment

HIDDEN, DIM = 12, 6
FREQUENCIES = torch.tensor([1.0, 0.25, 0.01])
REQUESTS = 3


def make_compressor(ratio: int) -> Compressor:
    compressor = Compressor(HIDDEN, DIM, ratio)
    generator = torch.Generator().manual_seed(ratio)
    for parameter in compressor.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return compressor


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def empty_state(compressor: Compressor) -> Tensor:
    width = compressor.ape.shape[1]
    return torch.full((REQUESTS * state_ring(compressor.ratio), 2, width), float("nan"))


def feed(
    compressor: Compressor, state: Tensor, x: Tensor, segments: list[Segment]
) -> Iterator[tuple[CompressPlan, Tensor]]:
    """One sequence, a segment a step: the plan and the entries of every step."""
    tables = block_tables(REQUESTS, len(x))
    for segment in segments:
        inputs = step_inputs([segment], tables)
        plan = CompressPlan.build(inputs, compressor.ratio, FREQUENCIES)
        yield plan, compressor(padded(x[segment.start : segment.context]), inputs.positions, plan, state)


def all_entries(compressor: Compressor, x: Tensor, chunks: list[int]) -> Tensor:
    steps = feed(compressor, empty_state(compressor), x, lengths(len(x), chunks))
    return torch.cat([entries for _, entries in steps])


@pytest.mark.parametrize(
    ("ratio", "length", "first", "second"),
    [
        (4, 29, range(1, 10), range(1, 10)),
        (16, 70, (1, 7, 15, 16, 17, 31), (1, 5, 15, 16, 17, 33)),
        (128, 400, (1, 127, 128, 255), (2, 128, 129)),
    ],
)
def test_every_split(ratio, length, first, second):
    """Any two chunks, then steps of one token or three: the formula's entries, and the bits of one prefill.

    The tokens of an unfinished block, and at ratio 4 those of the block before it, must be remembered at every residue.
    """
    compressor, x = make_compressor(ratio), tokens(length)
    whole = all_entries(compressor, x, [length])
    torch.testing.assert_close(whole.double(), pooled_entries(compressor, x.double()), rtol=1e-5, atol=1e-5)
    for one in first:
        for two in second:
            got = all_entries(compressor, x, [one, two, 1 if (one + two) % 2 and ratio < 128 else 3])
            assert torch.equal(got, whole), f"chunks {one} and {two}"


@pytest.mark.parametrize("ratio", [4, 16, 128])
def test_emission(ratio):
    """Entry j is made by token ratio * (j + 1) - 1, turned to position ratio * j, stored in the request's blocks."""
    compressor, x = make_compressor(ratio), tokens(521)
    table = block_tables(REQUESTS, len(x))[0]
    per_block = 256 // ratio
    made = 0
    for position, (plan, entries) in enumerate(feed(compressor, empty_state(compressor), x, lengths(len(x), [1]))):
        assert len(entries) == len(plan.entry_slots) == ((position + 1) % ratio == 0)
        if len(entries):
            assert plan.entry_slots.item() == int(table[made // per_block]) * per_block + made % per_block
            angle = torch.tensor([float(ratio * made)]) * FREQUENCIES
            torch.testing.assert_close(plan.rotation.cos[0], angle.cos())
            torch.testing.assert_close(plan.rotation.sin[0], angle.sin())
            made += 1
    assert made == 521 // ratio


@pytest.mark.parametrize("ratio", [4, 16])
def test_requests_keep_their_states_apart(ratio):
    """Three requests of different lengths in a step, in changing order: each gets the entries that it gets alone."""
    compressor, state = make_compressor(ratio), empty_state(make_compressor(ratio))
    x = [tokens(80, seed) for seed in range(REQUESTS)]
    tables = block_tables(REQUESTS, 80)
    found: list[list[Tensor]] = [[] for _ in x]
    place = [0] * REQUESTS
    for step in range(18):
        order = [(step + request) % REQUESTS for request in range(REQUESTS - step % 2)]
        counts = {request: min(1 + (5 * step + 3 * request) % 7, 80 - place[request]) for request in order}
        segments = [Segment(request, place[request], counts[request]) for request in order if counts[request]]
        inputs = step_inputs(segments, tables)
        plan = CompressPlan.build(inputs, ratio, FREQUENCIES)
        rows = torch.cat([x[part.state_slot][part.start : part.context] for part in segments])
        entries = compressor(padded(rows), inputs.positions, plan, state)
        for part in segments:
            count = part.context // ratio - part.start // ratio
            found[part.state_slot].append(entries[:count])
            entries = entries[count:]
            place[part.state_slot] = part.context
        assert not len(entries)
    for request in range(REQUESTS):
        got = torch.cat(found[request])
        assert len(got) > 2
        assert torch.equal(got, all_entries(compressor, x[request], [80])[: len(got)]), f"request {request}"


@pytest.mark.parametrize("ratio", [4, 16])
def test_a_state_that_another_sequence_left(ratio):
    """A slot is not cleaned before it is given to the next sequence: its first entry must not see the old tokens."""
    compressor, state = make_compressor(ratio), empty_state(make_compressor(ratio))
    for seed in (1, 2):
        x = tokens(35, seed)
        got = torch.cat([entries for _, entries in feed(compressor, state, x, lengths(35, [3]))])
        assert torch.equal(got, all_entries(compressor, x, [35])), f"sequence {seed}"


def test_inputs_in_bf16_are_not_rounded_again():
    """The projections and the pooling are fp32 whatever the compute dtype; DeepSeek trained them so."""
    compressor, x = make_compressor(4), tokens(16).bfloat16()
    got = all_entries(compressor, x, [16])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), pooled_entries(compressor, x.double()), rtol=1e-5, atol=1e-5)
