"""The compressor's pooling in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.ops.row_invariant import middle_sum


def compress(step: Tensor, state: Tensor, source_rows: Tensor, source_places: Tensor, *, overlap: bool) -> Tensor:
    """See ``tetrad.ops.compress.compress``."""
    in_step = (source_rows >= 0)[..., None, None]
    in_state = (source_places >= 0)[..., None, None]
    # unwritten places of the state may hold anything, NaN included: select, never multiply by a mask
    source = torch.where(in_step, step[source_rows.clamp_min(0)], state[source_places.clamp_min(0)])
    exists = in_step | in_state
    value = source[..., 0, :].masked_fill(~exists[..., 0], 0.0)
    gate = source[..., 1, :].masked_fill(~exists[..., 0], float("-inf"))
    if overlap:
        value, gate = _halves(value), _halves(gate)
    # softmax over a middle dimension by hand: torch's own rounds differently at the end of a tensor
    weight = torch.exp(gate - gate.amax(1, keepdim=True))
    weight = weight / middle_sum(weight).unsqueeze(1)
    return middle_sum(weight * value)


def _halves(x: Tensor) -> Tensor:
    ratio, dim = x.shape[1] // 2, x.shape[2] // 2
    return torch.cat((x[:, :ratio, :dim], x[:, ratio:, dim:]), dim=1)


def update_state(step: Tensor, state: Tensor, rows: Tensor, places: Tensor) -> None:
    """See ``tetrad.ops.compress.update_state``."""
    state.index_copy_(0, places, step.index_select(0, rows))
