"""The compressors: pooling, positions, visibility and the rings between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.mutants.mutant import Patch, everywhere, holding, mutant
from tetrad.geometry import BLOCK_SIZE, entry_slots, pooled_tokens
from tetrad.models import compressor
from tetrad.models.rotary import angles
from tetrad.models.step import CompressedMetadata, Rotation, Rows

COMPRESSOR = "tetrad.models.compressor:Compressor.forward"
COMPRESS = "tetrad.models.compressor:compress"
UPDATE = "tetrad.models.compressor:update_state"
ENTRIES = "tetrad.models.step:CompressedMetadata.build"


# ---- position bias ----


def bias_on_the_value(*, on_the_gate: bool) -> Any:
    def make(forward: Any) -> Any:
        def wrong(self, x, rows, entries, state):
            bias, project = self.ape.data[rows.position % self.ratio], self.wkv.forward
            with (
                mock.patch.object(self.wkv, "forward", lambda x: project(x) + bias),
                holding(self.ape, self.ape.data * on_the_gate),
            ):
                return forward(self, x, rows, entries, state)

        return wrong

    return make


def bias(change: Callable[[Tensor], Tensor]) -> Any:
    def make(forward: Any) -> Any:
        def wrong(self, *arguments):
            with holding(self.ape, change(self.ape.data)):
                return forward(self, *arguments)

        return wrong

    return make


# ---- pooling ----


def of_tokens(change: Callable[[Tensor, bool], Tensor]) -> Any:
    """``change(tokens [..., 2, width], overlap)`` of the step's tokens and of the ring's."""

    def make(compress: Any) -> Any:
        def wrong(step, state, *rows, ratio, overlap):
            return compress(change(step, overlap), change(state, overlap), *rows, ratio=ratio, overlap=overlap)

        return wrong

    return make


def halves_swapped(tokens: Tensor, overlap: bool) -> Tensor:
    return tokens.roll(tokens.shape[-1] // 2, -1) if overlap else tokens


def first_half_twice(tokens: Tensor, overlap: bool) -> Tensor:
    half = tokens[..., : tokens.shape[-1] // 2]
    return torch.cat((half, half), -1) if overlap else tokens


def one_gate(tokens: Tensor, overlap: bool) -> Tensor:
    tokens = tokens.clone()
    for part in tokens[..., 1, :].chunk(2 if overlap else 1, dim=-1):
        part.copy_(part.mean(-1, keepdim=True).expand_as(part))
    return tokens


def without_overlap(compress: Any) -> Any:
    def wrong(step, state, *rows, ratio, overlap):
        own = slice(step.shape[-1] // 2 if overlap else 0, None)
        return compress(step[..., own], state[..., own].contiguous(), *rows, ratio=ratio, overlap=False)

    return wrong


def early_rows(compress: Any, shift: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Rows of a request's first entry pool what they would pool ``shift`` rings later, from a ring that is changed."""

    def wrong(step, state, request, position, first, *, ratio, overlap):
        right = compress(step, state, request, position, first, ratio=ratio, overlap=overlap)
        moved = (request, position + shift, first + shift)
        other = compress(step, change(state), *moved, ratio=ratio, overlap=overlap)
        return torch.where((position < ratio).unsqueeze(1), other, right)

    return wrong


def missing_with_a_gate_of_zero(compress: Any) -> Any:
    def make(step, state, request, position, first, *, ratio, overlap):
        def zeros_before(state: Tensor) -> Tensor:
            moved = state.roll(ratio, 1)
            moved[:, :ratio] = 0
            return moved

        rows = early_rows(compress, ratio, zeros_before)
        return rows(step, state, request, position, first, ratio=ratio, overlap=overlap)

    return make


def last_owners_tokens(compress: Any) -> Any:
    def wrong(step, state, request, position, first, *, ratio, overlap):
        rings = early_rows(compress, ratio * state.shape[1], lambda state: state)
        return rings(step, state, request, position, first, ratio=ratio, overlap=overlap)

    return wrong


def sources_early(compress: Any) -> Any:
    """The entry of row p pools the tokens up to p - 1."""

    def wrong(step, state, request, position, first, *, ratio, overlap):
        moved = state.roll(1, 1)
        # there is no token before the first
        cut = moved.clone()
        cut[:, 0, 0], cut[:, 0, 1] = 0, -1e30
        rows = (request, position, first + 1)
        early = compress(step.roll(1, 0), cut, *rows, ratio=ratio, overlap=overlap)
        late = compress(step.roll(1, 0), moved, *rows, ratio=ratio, overlap=overlap)
        return torch.where((position < 2 * ratio).unsqueeze(1), early, late)

    return wrong


# ---- entries ----


def on_entries(change: Callable[[CompressedMetadata, Rows, Tensor], dict[str, Any]]) -> Any:
    """``change(metadata, rows, frequencies)`` names the fields that are wrong."""

    def make(build: Any) -> Any:
        def wrong(rows: Rows, ratio: int, frequencies: Tensor) -> CompressedMetadata:
            right = build(rows, ratio, frequencies)
            return dataclasses.replace(right, **change(right, rows, frequencies))

        return wrong

    return make


def rotated_to(position: Callable[[Tensor, int], Tensor]) -> Any:
    def change(entries: CompressedMetadata, rows: Rows, frequencies: Tensor) -> dict[str, Any]:
        return {"rotation": Rotation(*angles(position(rows.position, entries.ratio), frequencies))}

    return on_entries(change)


def visible(shift: int, *, csa: bool) -> Any:
    def change(entries: CompressedMetadata, rows: Rows, _: Tensor) -> dict[str, Any]:
        if csa is not (entries.ratio == 4):
            return {}
        return {"visible": ((rows.position + shift) // entries.ratio * (rows.request >= 0)).int()}

    return on_entries(change)


def stored_a_row_late(entries: CompressedMetadata, rows: Rows, frequencies: Tensor) -> dict[str, Any]:
    ratio, position = entries.ratio, rows.position
    made = (rows.request >= 0) & (position % ratio == 0) & (position > 0)
    entry = (position // ratio - 1).clamp_min(0)
    slot = entry_slots(rows.block_table, rows.request.clamp_min(0), entry, BLOCK_SIZE // ratio)
    return {"entry_slot": slot.where(made, -1), "rotation": Rotation(*angles(entry * ratio, frequencies))}


def pooled_a_row_late(compress: Any) -> Any:
    def wrong(step, state, request, position, first, *, ratio, overlap):
        rows = (request.where(position > 0, -1), position - 1, first)
        return compress(step.roll(1, 0), state, *rows, ratio=ratio, overlap=overlap)

    return wrong


# ---- rings ----


def written_one_off(update: Any) -> Any:
    def wrong(step, state, slots, **checkpoints):
        ring = state.shape[1]
        update(step, state, (slots // ring * ring + (slots + 1) % ring).where(slots >= 0, -1), **checkpoints)

    return wrong


def too_few_remembered(entries: CompressedMetadata, rows: Rows, _: Tensor) -> dict[str, Any]:
    # a ring has one place to spare: the oldest of its 2m or m tokens is never asked for
    kept = rows.first + rows.count - rows.position <= pooled_tokens(entries.ratio) - 2
    return {"state_slot": entries.state_slot.where(kept, -1)}


def written_before_it_is_read(forward: Any) -> Any:
    def wrong(self, x, rows, entries, state):
        pool, update = compressor.compress, compressor.update_state

        def after_the_update(step, state, *arguments, **options):
            update(step, state, entries.state_slot)
            return pool(step, state, *arguments, **options)

        with mock.patch.object(compressor, "compress", after_the_update):
            return forward(self, x, rows, entries, state)

    return wrong


def one_ring(compress: Any) -> Any:
    def wrong(step, state, request, *rows, **options):
        return compress(step, state, request.clamp_max(0), *rows, **options)

    return wrong


def written_into_one_ring(update: Any) -> Any:
    def wrong(step, state, slots, **checkpoints):
        update(step, state, (slots % state.shape[1]).where(slots >= 0, -1), **checkpoints)

    return wrong


MUTANTS = (
    mutant(
        "position bias added to the value, not to the gate", Patch(COMPRESSOR, bias_on_the_value(on_the_gate=False))
    ),
    mutant("position bias added to both", Patch(COMPRESSOR, bias_on_the_value(on_the_gate=True))),
    mutant("no position bias", Patch(COMPRESSOR, bias(torch.zeros_like))),
    mutant("position bias one off", Patch(COMPRESSOR, bias(lambda ape: ape.roll(-1, 0)))),
    mutant("overlap halves swapped", Patch(COMPRESS, of_tokens(halves_swapped))),
    mutant("one half of the channels for both blocks", Patch(COMPRESS, of_tokens(first_half_twice))),
    mutant("no overlap", Patch(COMPRESS, without_overlap)),
    mutant("tokens before the first weigh as a gate of 0", Patch(COMPRESS, missing_with_a_gate_of_zero)),
    mutant("one gate for all channels", Patch(COMPRESS, of_tokens(one_gate))),
    mutant("compressed position m*j + m - 1", Patch(ENTRIES, rotated_to(lambda position, ratio: position))),
    mutant(
        "compressed position j",
        Patch(ENTRIES, rotated_to(lambda position, ratio: ((position + 1) // ratio - 1).clamp_min(0))),
    ),
    mutant("CSA entries visible a token late", Patch(ENTRIES, visible(0, csa=True))),
    mutant("HCA entries visible a token late", Patch(ENTRIES, visible(0, csa=False))),
    mutant("HCA entries visible a token early", Patch(ENTRIES, visible(2, csa=False))),
    mutant(
        "entries made a token late",
        Patch(ENTRIES, on_entries(stored_a_row_late)),
        Patch(COMPRESS, pooled_a_row_late),
    ),
    mutant("sources one token early", Patch(COMPRESS, sources_early)),
    mutant(
        "state read one off",
        Patch(
            COMPRESS, lambda compress: lambda step, state, *rows, **how: compress(step, state.roll(-1, 1), *rows, **how)
        ),
    ),
    mutant("state written one off", Patch(UPDATE, written_one_off)),
    mutant("too few tokens remembered", Patch(ENTRIES, on_entries(too_few_remembered))),
    mutant("state written before it is read", Patch(COMPRESSOR, written_before_it_is_read)),
    mutant(
        "one state for all requests",
        Patch(COMPRESS, one_ring),
        Patch(UPDATE, written_into_one_ring),
        test="tests/models/test_compressor.py::test_requests_keep_their_states_apart",
    ),
    mutant(
        "tokens of the slot's last owner in the first entry",
        Patch(COMPRESS, last_owners_tokens),
        test="tests/models/test_compressor.py::test_a_state_that_another_sequence_left",
    ),
    mutant(
        "no room for drafts in a compressor's ring",
        everywhere("tetrad.geometry.sizes:compressor_ring", lambda _: pooled_tokens),
        test="tests/models/test_compressor.py::test_rejected_drafts",
    ),
)

CONTROLS = (mutant("tokens as they are", Patch(COMPRESS, of_tokens(lambda tokens, overlap: tokens.clone()))),)
