"""What one forward pass is given: rows with a request and a position, and what follows from them.

A row is one new token of one request. Prefill rows, decode rows and draft rows do not differ. All tensors of a step
have the shapes of its bucket; rows of request -1 fill them, and every op takes such a row as "nothing here". Everything
in this file is elementwise on the device, so it can be captured: no number of a step is read by the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tetrad.geometry import (
    BLOCK_SIZE,
    CSA_RATIO,
    DRAFT_ROWS,
    compressor_ring,
    entry_slots,
    ring_slots,
    window_ring,
)
from tetrad.models.config import ModelConfig
from tetrad.models.rotary import angles
from tetrad.ops import IndexerPlan, plan_indexer


class StepShape(NamedTuple):
    """A bucket: all that the shapes of a step depend on.

    rows: of the step, padding included; wanted: rows whose logits are computed, padding included; width: blocks that
    hold the longest context; chunks: whether some request has more rows than one and its drafts.
    """

    rows: int
    wanted: int
    width: int
    chunks: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows. Those of one request are adjacent and ascending.

    token: int64 [R]; request: int32 [R], its row in the block table, -1 for padding; position: int64 [R], 0 for
    padding; first: int64 [R], the position of the request's first row in this step; count: int32 [R], its rows in this
    step; wanted: int64 [S], rows whose logits are computed, -1 for padding; block_table: int32 [requests, width].
    """

    token: Tensor
    request: Tensor
    position: Tensor
    first: Tensor
    count: Tensor
    wanted: Tensor
    block_table: Tensor
    shape: StepShape


class Rotation(NamedTuple):
    """cos and sin, fp32 [R, rope / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class WindowMetadata:
    """The window of every row, for all layers alike.

    A request's ring lies at ``request * ring``; behind the rings of all requests lies one slot for each row of the
    step. A request with at most ``1 + DRAFT_ROWS`` rows writes into its ring and reads from there. One with more, a
    chunk of a prompt, writes step entries and reads both, and its last keys are copied into the ring after attention.

    own: int64 [R], the slot of the row's own key; visible: int64 [R, window], the slots of the keys that the row sees,
    by position, -1 behind them; kept_from, kept_to: int64 [R], the copies into the ring, -1 for none; rotation: of the
    row's position, in layers without compressed keys.
    """

    own: Tensor
    visible: Tensor
    kept_from: Tensor
    kept_to: Tensor
    rotation: Rotation

    @classmethod
    def build(cls, rows: Rows, window: int, frequencies: Tensor) -> WindowMetadata:
        """Work out the window of every row."""
        ring, position = window_ring(window), rows.position.unsqueeze(1)
        real = rows.request >= 0
        row = torch.arange(rows.shape.rows, dtype=torch.int64, device=position.device)
        step_slot = rows.block_table.shape[0] * ring + row
        start = (position - (window - 1)).clamp_min(0)
        seen = start + torch.arange(window, dtype=torch.int64, device=position.device)
        visible = ring_slots(rows.request.unsqueeze(1), seen, ring)
        own = ring_slots(rows.request, rows.position, ring)
        kept_from = kept_to = torch.full_like(own, -1)
        if rows.shape.chunks:
            in_chunk = real & (rows.count > 1 + DRAFT_ROWS)
            in_step = in_chunk.unsqueeze(1) & (seen >= rows.first.unsqueeze(1))
            visible = torch.where(in_step, step_slot.unsqueeze(1) - (position - seen), visible)
            kept = in_chunk & (rows.first + rows.count - rows.position <= ring)
            kept_from, kept_to = step_slot.where(kept, -1), own.where(kept, -1)
            own = torch.where(in_chunk, step_slot, own)
        return cls(
            own=own.where(real, -1),
            visible=visible.where((seen <= position) & real.unsqueeze(1), -1),
            kept_from=kept_from,
            kept_to=kept_to,
            rotation=Rotation(*angles(rows.position, frequencies)),
        )


@dataclass(frozen=True, slots=True)
class CompressedMetadata:
    """The compressed entries of one ratio, for all layers of it alike.

    An entry belongs to the row that completes it: row p completes entry (p + 1) / ratio - 1 iff (p + 1) % ratio == 0.

    entry_slot: int64 [R], where the entry that the row completes is stored, -1 if it completes none; rotation: of
    position p + 1 - ratio, the first token of the entry's own group; state_slot: int64 [R], where the compressor's ring
    remembers the row, -1 if a later row of the step takes its place; visible: int32 [R], entries that the row sees, 0
    for padding; width: the most entries that a row of this bucket can see.
    """

    ratio: int
    entry_slot: Tensor
    rotation: Rotation
    state_slot: Tensor
    visible: Tensor
    width: int

    @classmethod
    def build(cls, rows: Rows, ratio: int, frequencies: Tensor) -> CompressedMetadata:
        """Work out the entries of one ratio."""
        real = rows.request >= 0
        ring, per_block = compressor_ring(ratio), BLOCK_SIZE // ratio
        ends = rows.position + 1
        visible = ends // ratio
        completes = real & (ends % ratio == 0)
        slot = entry_slots(rows.block_table, rows.request.clamp_min(0), (visible - 1).clamp_min(0), per_block)
        remembered = real & (rows.first + rows.count - rows.position <= ring)
        return cls(
            ratio=ratio,
            entry_slot=slot.where(completes, -1),
            rotation=Rotation(*angles((ends - ratio).clamp_min(0), frequencies)),
            state_slot=ring_slots(rows.request, rows.position, ring).where(remembered, -1),
            visible=(visible * real).int(),
            width=rows.shape.width * per_block,
        )


@dataclass(frozen=True, slots=True)
class Metadata:
    """Everything that the layers share, worked out once per step.

    rotation: of the row's position in layers with compressed keys; csa, hca: None in a model without such layers;
    indexer_plan: None where every visible entry is chosen anyway.
    """

    rows: Rows
    rotation: Rotation
    window: WindowMetadata
    csa: CompressedMetadata | None
    hca: CompressedMetadata | None
    indexer_plan: IndexerPlan | None

    @classmethod
    def build(
        cls, rows: Rows, config: ModelConfig, window_frequencies: Tensor, frequencies: Tensor, *, plan: bool = True
    ) -> Metadata:
        """Work out a step's metadata. The frequencies are those of ``models.rotary.inverse_frequencies``.

        plan: whether the scorer's back end makes use of the indexer's plan.
        """
        csa = CompressedMetadata.build(rows, CSA_RATIO, frequencies) if CSA_RATIO in config.compress_ratios else None
        hca = CompressedMetadata.build(rows, config.hca_ratio, frequencies) if config.hca_ratio else None
        indexer_plan = None
        if plan and csa is not None and csa.width > config.index_topk:
            indexer_plan = plan_indexer(rows.request, csa.visible, width=csa.width)
        return cls(
            rows=rows,
            rotation=Rotation(*angles(rows.position, frequencies)),
            window=WindowMetadata.build(rows, config.sliding_window, window_frequencies),
            csa=csa,
            hca=hca,
            indexer_plan=indexer_plan,
        )
