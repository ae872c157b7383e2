"""The token-level compressor: one entry for every 4 (CSA, and its indexer) or 128 (HCA) tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tetrad.geometry import CSA_RATIO
from tetrad.models.linear import Linear, Norm
from tetrad.models.step import CompressPlan
from tetrad.ops.compress import compress, update_state


class Compressor(nn.Module):
    """u_t = W_kv x_t and g_t = W_gate x_t + ape[t mod ratio], pooled by a softmax over g (fp32 throughout).

    At ratio 4 entries overlap: an entry pools eight tokens, the first channel half of the four before its block and
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

    def forward(self, x: Tensor, positions: Tensor, plan: CompressPlan, state: Tensor) -> Tensor:
        """Pool the entries that this step completes, then remember the tokens that later entries need.

        x: [R, D]; positions: int64 [R]; state: fp32 [places, 2, width], changed in place. Returns fp32 [E, dim].
        """
        gate = self.wgate(x.float()) + self.ape[positions % self.ratio]
        step = torch.stack((self.wkv(x.float()), gate), dim=1)
        # entries read the state as the previous step left it
        pooled = compress(step, state, plan.source_rows, plan.source_places, overlap=self.overlap)
        update_state(step, state, plan.state_rows, plan.state_places)
        return pooled
