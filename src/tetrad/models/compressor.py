"""The token-level compressor: one entry for every 4 (CSA, and its indexer) or 128 (HCA) tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tetrad.geometry import CSA_RATIO
from tetrad.models.linear import Linear, Norm
from tetrad.models.step import CompressedMetadata, Rows
from tetrad.ops.compress import compress, update_state


class Compressor(nn.Module):
    """u_t = W_kv x_t and g_t = W_gate x_t + ape[t mod ratio], pooled by a softmax over g (fp32 throughout).

    At ratio 4 entries overlap: an entry pools eight tokens, the first channel half of the four before its group and
    the second half of its own four, so both projections are twice as wide.
    """

    def __init__(self, hidden_size: int, dim: int, ratio: int) -> None:
        super().__init__()
        self.ratio, self.overlap = ratio, ratio == CSA_RATIO
        width = dim * (2 if self.overlap else 1)
        self.wkv = Linear(hidden_size, width, torch.float32)
        self.wgate = Linear(hidden_size, width, torch.float32)
        self.ape = nn.Parameter(torch.empty((ratio, width), dtype=torch.float32), requires_grad=False)
        self.norm = Norm(dim)

    def forward(self, x: Tensor, rows: Rows, entries: CompressedMetadata, state: Tensor) -> Tensor:
        """Pool the entry that each row completes, then remember the tokens that later entries need.

        x: [R, D]; state: fp32 [requests, ring, 2, width], changed in place. Returns fp32 [R, dim], zeros where a row
        completes nothing.
        """
        x = x.float()
        gate = self.wgate(x) + self.ape[rows.position % self.ratio]
        step = torch.stack((self.wkv(x), gate), dim=1)
        # entries read the ring as the previous step left it
        pooled = compress(step, state, rows.request, rows.position, rows.first, ratio=self.ratio, overlap=self.overlap)
        update_state(step, state, entries.state_slot)
        return pooled
