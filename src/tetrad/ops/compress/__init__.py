"""The compressor's pooling: several source tokens become one entry, with a softmax gate per channel."""

from __future__ import annotations

from torch import Tensor

from tetrad.ops.compress import reference
from tetrad.torch_settings import without_autocast

__all__ = ["compress", "update_state"]


@without_autocast
def compress(step: Tensor, state: Tensor, source_rows: Tensor, source_places: Tensor, *, overlap: bool) -> Tensor:
    """Pool K source tokens into each entry: e = sum_t softmax_t(g_t) * u_t, a softmax of its own for every channel.

    Without overlap K is the ratio and all channels of a token take part. With overlap K is twice the ratio and a
    token has two halves of channels: the older ``ratio`` tokens give their first half, the newer ones their second.

    step: fp32 [R, 2, c * e], u and g of the rows of this step (g with the position bias added);
    state: fp32 [places, 2, c * e], the same for earlier tokens; source_rows: int64 [E, K], the row of a source token
    in ``step`` or -1; source_places: int64 [E, K], its place in ``state`` or -1. Both -1: before the first token, of
    weight zero. Returns fp32 [E, e]. Must run before ``update_state`` of the same step.
    Source: the token-level compressor of DeepSeek-V4 (overlapping at ratio 4).
    """
    return reference.compress(step, state, source_rows, source_places, overlap=overlap)


@without_autocast
def update_state(step: Tensor, state: Tensor, rows: Tensor, places: Tensor) -> None:
    """state[places] = step[rows]: remember the tokens that a later entry needs. rows, places: int64 [W]."""
    reference.update_state(step, state, rows, places)
