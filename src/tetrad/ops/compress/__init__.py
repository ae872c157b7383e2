"""The compressor's pooling: several source tokens become one entry, with a softmax gate per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.ops.arguments import check_switch, check_tensor
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

    :raises ValueError: for a wrong shape, or with ``overlap`` an odd K or width
    :raises TypeError: for a wrong type or dtype
    """
    _check_rows(step, state)
    check_tensor("source_rows", source_rows, torch.int64, (None, None), "entries, tokens", step.device)
    check_tensor("source_places", source_places, torch.int64, tuple(source_rows.shape), "entries, tokens", step.device)
    check_switch("overlap", overlap)
    if overlap and (source_rows.shape[1] % 2 or step.shape[2] % 2):
        raise ValueError(
            f"with overlap there are two halves of tokens and of channels; got {source_rows.shape[1]} tokens and "
            f"{step.shape[2]} channels"
        )
    return reference.compress(step, state, source_rows, source_places, overlap=overlap)


@without_autocast
def update_state(step: Tensor, state: Tensor, rows: Tensor, places: Tensor) -> None:
    """state[places] = step[rows]: remember the tokens that a later entry needs. rows, places: int64 [W].

    Errors as for :func:`compress`.
    """
    _check_rows(step, state)
    check_tensor("rows", rows, torch.int64, (None,), "tokens", step.device)
    check_tensor("places", places, torch.int64, tuple(rows.shape), "tokens", step.device)
    reference.update_state(step, state, rows, places)


def _check_rows(step: Tensor, state: Tensor) -> None:
    check_tensor("step", step, torch.float32, (None, 2, None), "rows, u and g, channels", strided=True)
    shape = (None, 2, step.shape[2])
    check_tensor("state", state, torch.float32, shape, "places, u and g, channels", step.device, strided=True)
