"""What one forward pass is given: rows with a request, a position and a visible end.

A row is one new token of one request. Prefill rows and decode rows do not differ. Real rows come first; padding rows
(request -1, visible end 0) fill the tensors up to a multiple of 8 so that every matrix product rounds alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tetrad.geometry import BLOCK_SIZE, CSA_RATIO, entry_slots, state_ring
from tetrad.models.config import ModelConfig
from tetrad.models.rotary import angles
from tetrad.ops import IndexerPlan, plan_indexer


@dataclass(frozen=True, slots=True)
class Segment:
    """The new tokens of one request, as the host knows them: its state slot, first position and token count."""

    state_slot: int
    start: int
    count: int

    @property
    def context(self) -> int:
        """Tokens of the request once this step is done."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A batch as flat tensors at fixed addresses. R rows of which the first ``rows`` are real.

    input_ids, positions: int64 [R]; row_request: int32 [R], -1 for padding; block_tables, window_tables: int32
    [requests, blocks]; logits_rows: int64 [S], the rows whose next token is wanted; segments: one per request, in the
    order of the rows.
    """

    rows: int
    input_ids: Tensor
    positions: Tensor
    row_request: Tensor
    block_tables: Tensor
    window_tables: Tensor
    logits_rows: Tensor
    segments: tuple[Segment, ...]


class Rotation(NamedTuple):
    """cos and sin, fp32 [N, rope / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class CompressPlan:
    """Which entries of one ratio this step completes, and where their sources lie.

    entry_slots: int64 [E], where the entry is stored; rotation: of position ``ratio * j``, the first token of its own
    block; source_rows, source_places: int64 [E, K], see ``tetrad.ops.compress``; state_rows, state_places: int64 [W],
    the rows that later entries will need and their places in the state.
    """

    ratio: int
    entry_slots: Tensor
    rotation: Rotation
    source_rows: Tensor
    source_places: Tensor
    state_rows: Tensor
    state_places: Tensor

    @classmethod
    def build(cls, inputs: StepInputs, ratio: int, frequencies: Tensor) -> CompressPlan:
        """Plan one ratio from the host's segments. Entry j is complete when token ``ratio * (j + 1) - 1`` is here."""
        ring = state_ring(ratio)
        slot, start, count = np.array(
            [(segment.state_slot, segment.start, segment.count) for segment in inputs.segments], dtype=np.int64
        ).T.reshape(3, -1)
        context, first_row = start + count, np.cumsum(count) - count

        completed = context // ratio - start // ratio
        request, place = _ragged(completed)
        entry = start[request] // ratio + place
        source = entry[:, None] * ratio + np.arange(ratio - ring, ratio)
        here = source >= start[request, None]
        source_rows = np.where(here, source + (first_row - start)[request, None], -1)
        source_places = np.where(here | (source < 0), -1, slot[request, None] * ring + source % ring)

        kept, place = _ragged(np.minimum(count, ring))
        position = (context - np.minimum(count, ring))[kept] + place
        state_rows = position + (first_row - start)[kept]
        state_places = slot[kept] * ring + position % ring

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(inputs.positions.device)

        entries = tensor(entry)
        return cls(
            ratio,
            entry_slots(inputs.block_tables, tensor(request), entries, BLOCK_SIZE // ratio),
            Rotation(*angles(entries * ratio, frequencies)),
            tensor(source_rows),
            tensor(source_places),
            tensor(state_rows),
            tensor(state_places),
        )


def _ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(owner, place among the owner's) of every item, where owner i has ``counts[i]`` items; int64 [sum of counts]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Everything that the layers share, worked out once per step.

    window_slots: int64 [rows], where each real row's own key goes; window_start: int32 [rows], the first position that
    a row sees; visible_csa, visible_hca: int32 [R], entries that a row sees, 0 for padding: min((position + 1) //
    ratio, entries of the request); index_width, hca_width: the most that any row can see, plain ints.
    """

    inputs: StepInputs
    window_rotation: Rotation
    compress_rotation: Rotation
    window_slots: Tensor
    window_start: Tensor
    visible_csa: Tensor
    visible_hca: Tensor
    index_width: int
    hca_width: int
    csa: CompressPlan | None
    hca: CompressPlan | None
    indexer_plan: IndexerPlan | None

    @classmethod
    def build(
        cls, inputs: StepInputs, config: ModelConfig, window_frequencies: Tensor, compress_frequencies: Tensor
    ) -> AttentionMetadata:
        """Work out the step's metadata. The frequencies are those of ``models.rotary.inverse_frequencies``."""
        rows = inputs.rows
        real = inputs.row_request >= 0
        positions = inputs.positions
        hca_ratio = config.hca_ratio
        context = max((segment.context for segment in inputs.segments), default=0)
        visible_csa = ((positions + 1) // CSA_RATIO * real).int()
        visible_hca = ((positions + 1) // hca_ratio * real).int() if hca_ratio else torch.zeros_like(visible_csa)
        index_width = context // CSA_RATIO
        has_csa = CSA_RATIO in config.compress_ratios
        return cls(
            inputs=inputs,
            window_rotation=Rotation(*angles(positions, window_frequencies)),
            compress_rotation=Rotation(*angles(positions, compress_frequencies)),
            window_slots=entry_slots(inputs.window_tables, inputs.row_request[:rows], positions[:rows], BLOCK_SIZE),
            window_start=(positions[:rows] - config.sliding_window + 1).clamp_min(0).int(),
            visible_csa=visible_csa,
            visible_hca=visible_hca,
            index_width=index_width,
            hca_width=context // hca_ratio if hca_ratio else 0,
            csa=CompressPlan.build(inputs, CSA_RATIO, compress_frequencies) if has_csa else None,
            hca=CompressPlan.build(inputs, hca_ratio, compress_frequencies) if hca_ratio else None,
            indexer_plan=(
                plan_indexer(inputs.row_request, visible_csa, width=index_width)
                if has_csa and index_width > config.index_topk
                else None
            ),
        )
