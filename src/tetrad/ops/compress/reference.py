"""The compressor's pooling in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.ops.row_invariant import middle_sum


def compress(
    step: Tensor, state: Tensor, row_request: Tensor, position: Tensor, first: Tensor, *, ratio: int, overlap: bool
) -> Tensor:
    """See ``tetrad.ops.compress.compress``. Pools only for the rows that complete an entry."""
    width = step.shape[-1]
    entries = step.new_zeros((step.shape[0], width // 2 if overlap else width))
    rows = ((row_request >= 0) & ((position + 1) % ratio == 0)).nonzero().squeeze(1)
    if len(rows):
        entries[rows] = _pool(step, state, rows, row_request[rows].long(), position[rows], first[rows], ratio, overlap)
    return entries


def _pool(
    step: Tensor,
    state: Tensor,
    rows: Tensor,
    request: Tensor,
    position: Tensor,
    first: Tensor,
    ratio: int,
    overlap: bool,
) -> Tensor:
    tokens = 2 * ratio if overlap else ratio
    back = torch.arange(tokens - 1, -1, -1, dtype=torch.int64, device=step.device)
    source = position.unsqueeze(1) - back
    in_step = source >= first.unsqueeze(1)
    exists = source >= 0
    ring = state.shape[1]
    # what does not exist, and unwritten places of the ring, may hold anything, NaN included: select, never multiply
    from_step = step[(rows.unsqueeze(1) - back).where(in_step, 0)]
    from_ring = state.flatten(0, 1)[(request.unsqueeze(1) * ring + source % ring).where(~in_step & exists, 0)]
    taken = torch.where(in_step[..., None, None], from_step, from_ring)
    missing = ~exists.unsqueeze(-1)
    value = taken[..., 0, :].masked_fill(missing, 0.0)
    gate = taken[..., 1, :].masked_fill(missing, float("-inf"))
    if overlap:
        value, gate = _halves(value), _halves(gate)
    # softmax over a middle dimension by hand: torch's own rounds differently at the end of a tensor
    weight = torch.exp(gate - gate.amax(1, keepdim=True))
    weight = weight / middle_sum(weight).unsqueeze(1)
    return middle_sum(weight * value)


def _halves(x: Tensor) -> Tensor:
    ratio, dim = x.shape[1] // 2, x.shape[2] // 2
    return torch.cat((x[:, :ratio, :dim], x[:, ratio:, dim:]), dim=1)


def update_state(step: Tensor, state: Tensor, slots: Tensor) -> None:
    """See ``tetrad.ops.compress.update_state``."""
    rows = (slots >= 0).nonzero().squeeze(1)
    state.flatten(0, 1).index_copy_(0, slots[rows], step[rows])
