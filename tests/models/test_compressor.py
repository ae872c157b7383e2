"""The compressor over many steps against its formula over the whole sequence.

The state begins as NaN: what is read without having been written shows. Padding rows are NaN as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.models.formulas import pooled_entries
from tests.models.steps import Segment, block_tables, lengths, padded, step_rows
from torch import Tensor

from tetrad.geometry import DRAFT_ROWS, compressor_ring
from tetrad.models.compressor import Compressor
from tetrad.models.step import CompressedMetadata, Rows

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
    return torch.full((REQUESTS, compressor_ring(compressor.ratio), 2, width), float("nan"))


def completed(entries: Tensor, rows: Rows, ratio: int) -> Tensor:
    """The entries of the rows that complete one; all others, padding among them, must be zero."""
    completes = (rows.request >= 0) & ((rows.position + 1) % ratio == 0)
    assert entries.shape == (rows.shape.rows, DIM)
    assert not entries[~completes].any()
    return entries[completes]


def feed(
    compressor: Compressor, state: Tensor, x: Tensor, segments: list[Segment]
) -> Iterator[tuple[CompressedMetadata, Tensor]]:
    """One sequence, a segment a step: the metadata and the completed entries of every step."""
    tables = block_tables(REQUESTS, len(x))
    for number, segment in enumerate(segments):
        # some steps are of a larger bucket than they need
        rows = step_rows([segment], tables, more=8 * (number % 3 == 1))
        metadata = CompressedMetadata.build(rows, compressor.ratio, FREQUENCIES)
        values = compressor(padded(x[segment.start : segment.context], rows), rows, metadata, state)
        yield metadata, completed(values, rows, compressor.ratio)


def all_entries(compressor: Compressor, x: Tensor, chunks: list[int]) -> Tensor:
    steps = feed(compressor, empty_state(compressor), x, lengths(len(x), chunks))
    return torch.cat([entries for _, entries in steps])


@pytest.mark.parametrize(
    ("ratio", "length", "first", "second"),
    [
        (4, 29, range(1, 10), range(1, 10)),
        (4, 45, (7, 15, 16, 17, 18), (9, 10, 15, 16, 17)),
        (16, 70, (1, 7, 15, 16, 17, 31), (1, 5, 15, 16, 17, 33)),
        (128, 400, (1, 127, 128, 135, 136, 137, 255), (2, 128, 129, 137)),
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
    """Entry j is made by row ratio * (j + 1) - 1, rotated to position ratio * j, stored in the request's blocks.

    A row sees the entries that it and the rows before it have completed.
    """
    compressor, x = make_compressor(ratio), tokens(521)
    table = block_tables(REQUESTS, len(x))[0]
    per_block = 256 // ratio
    made = 0
    for position, (metadata, entries) in enumerate(feed(compressor, empty_state(compressor), x, lengths(521, [1]))):
        completes = (position + 1) % ratio == 0
        assert len(entries) == completes
        assert (metadata.entry_slot[1:] == -1).all()
        if completes:
            assert metadata.entry_slot[0] == int(table[made // per_block]) * per_block + made % per_block
            angle = torch.tensor([float(ratio * made)]) * FREQUENCIES
            torch.testing.assert_close(metadata.rotation.cos[0], angle.cos())
            torch.testing.assert_close(metadata.rotation.sin[0], angle.sin())
            made += 1
        else:
            assert metadata.entry_slot[0] == -1
        assert metadata.visible.tolist() == [made] + [0] * (len(metadata.visible) - 1)
        assert made <= metadata.width
    assert made == 521 // ratio


@pytest.mark.parametrize("ratio", [4, 16, 128])
@pytest.mark.parametrize("extra", [-1, 0, 1, 40])
def test_what_is_remembered(ratio, extra):
    """Each place of a ring gets the last of the step's tokens that belong there, and no place is written twice."""
    ring = compressor_ring(ratio)
    segments = [Segment(2, 5, ring + extra), Segment(0, 3, 1)]
    rows = step_rows(segments, block_tables(REQUESTS, 600))
    slots = CompressedMetadata.build(rows, ratio, FREQUENCIES).state_slot
    kept = [slot for slot in slots.tolist() if slot >= 0]
    assert len(kept) == len(set(kept)) == min(ring, ring + extra) + 1
    end = segments[0].context
    for row, slot in enumerate(slots[: ring + extra].tolist()):
        position = 5 + row
        assert slot == (2 * ring + position % ring if position >= end - ring else -1)
    assert slots[ring + extra :].tolist() == [3] + [-1] * (len(slots) - ring - extra - 1)


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
        rows = step_rows(segments, tables)
        metadata = CompressedMetadata.build(rows, ratio, FREQUENCIES)
        values = torch.cat([x[part.request][part.start : part.context] for part in segments])
        entries = completed(compressor(padded(values, rows), rows, metadata, state), rows, ratio)
        for part in segments:
            count = part.context // ratio - part.start // ratio
            found[part.request].append(entries[:count])
            entries = entries[count:]
            place[part.request] = part.context
        assert not len(entries)
    for request in range(REQUESTS):
        got = torch.cat(found[request])
        assert len(got) > 2
        assert torch.equal(got, all_entries(compressor, x[request], [80])[: len(got)]), f"request {request}"


@pytest.mark.parametrize("ratio", [4, 16])
def test_rejected_drafts(ratio):
    """Every step computes the next token and 8 drafts, of which some other number is right each time.

    With a ring of the pooled tokens alone the rejected drafts would lie where the next entry still reads.
    """
    compressor, x = make_compressor(ratio), tokens(90)
    wrong, state = tokens(90, seed=7), empty_state(compressor)
    tables, found, start = block_tables(REQUESTS, 200), [], 0
    step = 0
    while start < 80:
        right = step % (DRAFT_ROWS + 1)
        rows = step_rows([Segment(0, start, 1 + DRAFT_ROWS)], tables)
        end = start + 1 + right
        values = torch.cat((x[start:end], wrong[: DRAFT_ROWS - right]))
        metadata = CompressedMetadata.build(rows, ratio, FREQUENCIES)
        entries = compressor(padded(values, rows), rows, metadata, state)
        found += [entries[row] for row in range(1 + right) if (start + row + 1) % ratio == 0]
        start, step = end, step + 1
    whole = all_entries(compressor, x, [90])
    assert torch.equal(torch.stack(found), whole[: len(found)])
    assert len(found) >= 80 // ratio


@pytest.mark.parametrize("ratio", [4, 16])
def test_a_state_that_another_sequence_left(ratio):
    """A ring is not cleaned before the next sequence gets it: its first entry must not see the old tokens."""
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
