"""The compressor's pooling: several tokens become one entry, with a softmax gate per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.errors import check_whole
from tetrad.ops.arguments import check_switch, check_tensor
from tetrad.ops.backends import Problem, backend_module
from tetrad.ops.checked import check_slots, check_step_rows
from tetrad.torch_settings import without_autocast

__all__ = ["compress", "update_state"]


@without_autocast
def compress(
    step: Tensor, state: Tensor, row_request: Tensor, position: Tensor, first: Tensor, *, ratio: int, overlap: bool
) -> Tensor:
    """The entry that each row completes: e = sum_t softmax_t(g_t) * u_t, a softmax of its own for every channel.

    Row p completes entry (p + 1) / ratio - 1 iff (p + 1) % ratio == 0. It pools the ``ratio`` tokens up to p. With
    ``overlap`` it pools twice as many, and a token has two halves of channels: the older ``ratio`` tokens give their
    first half, the newer ones their second. Tokens before position 0 have weight zero. A token at ``first`` or later is
    taken from the rows of this step, an earlier one from the request's ring. Runs before ``update_state`` of the same
    step. It waits for the device, to learn which rows complete an entry, so it cannot be captured into a CUDA graph.

    Source: the token-level compressor of DeepSeek-V4 (overlapping at ratio 4).

    Args:
        step: fp32 [R, 2, c * e], u and g of the rows of this step (g with the position bias added)
        state: fp32 [requests, ring, 2, c * e], the same for earlier tokens: position t of a request at ``t % ring``
        row_request: int32 [R], -1 for padding; rows of one request are adjacent and ascending
        position: int64 [R]
        first: int64 [R], the position of the request's first row in this step

    Returns:
        fp32 [R, e], zeros where a row completes nothing

    Raises:
        ValueError: for a wrong shape or ratio, a ring shorter than what an entry pools, or with ``overlap`` an odd
            width; inside of :func:`tetrad.ops.checked` also for requests and positions that are not as above
        TypeError: for a wrong type or dtype
    """
    _check_rows(step, state)
    check_whole("ratio", ratio, 1)
    check_switch("overlap", overlap)
    check_tensor("row_request", row_request, torch.int32, (step.shape[0],), "rows", step.device)
    check_tensor("position", position, torch.int64, (step.shape[0],), "rows", step.device)
    check_tensor("first", first, torch.int64, (step.shape[0],), "rows", step.device)
    if overlap and step.shape[2] % 2:
        raise ValueError(f"with overlap there are two halves of channels; got {step.shape[2]} channels")
    pooled = 2 * ratio if overlap else ratio
    if state.shape[1] < pooled:
        raise ValueError(f"an entry pools {pooled} tokens, but the rings of state have {state.shape[1]} places")
    check_step_rows(row_request, position, first, state.shape[0])
    backend = backend_module("compress", step.device, Problem())
    return backend.compress(step, state, row_request, position, first, ratio=ratio, overlap=overlap)


@without_autocast
def update_state(
    step: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    checkpoints: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> None:
    """Remember the tokens that a later entry needs: state slot ``slots[r]`` becomes row r; -1 is not remembered.

    It waits for the device, to learn which slots are negative, so it cannot be captured into a CUDA graph.

    Args:
        step: fp32 [R, 2, width]
        state: fp32 [requests, ring, 2, width], changed in place; slot s is place ``s % ring`` of request ``s // ring``
        slots: int64 [R]; two rows must not share one
        checkpoints: fp32 [checkpoints, places, 2, width], a second destination, changed in place
        checkpoint_slots: int64 [R], slots in ``checkpoints``

    Raises:
        ValueError: for a wrong shape, or one of ``checkpoints`` and ``checkpoint_slots`` without the other
        TypeError: for a wrong type or dtype
        IndexError: for a slot behind the last ring, on a CPU; :func:`tetrad.ops.checked` looks everywhere
    """
    _check_rows(step, state)
    check_tensor("slots", slots, torch.int64, (step.shape[0],), "rows", step.device)
    check_slots("slots", slots, state.shape[0] * state.shape[1], distinct=True)
    backend = backend_module("compress", step.device, Problem())
    if (checkpoints is None) != (checkpoint_slots is None):
        raise ValueError("checkpoints and checkpoint_slots go together; give both or neither")
    if checkpoints is not None and checkpoint_slots is not None:
        _check_rows(step, checkpoints, "checkpoints")
        check_tensor("checkpoint_slots", checkpoint_slots, torch.int64, (step.shape[0],), "rows", step.device)
        check_slots("checkpoint_slots", checkpoint_slots, checkpoints.shape[0] * checkpoints.shape[1], distinct=True)
        backend.update_state(step, checkpoints, checkpoint_slots)
    backend.update_state(step, state, slots)


def _check_rows(step: Tensor, state: Tensor, name: str = "state") -> None:
    check_tensor("step", step, torch.float32, (None, 2, None), "rows, u and g, channels", strided=True)
    shape = (None, None, 2, step.shape[2])
    check_tensor(name, state, torch.float32, shape, "requests, places, u and g, channels", step.device, contiguous=True)
