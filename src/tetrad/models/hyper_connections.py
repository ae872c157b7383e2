"""Manifold-constrained hyper-connections (mHC): four residual streams instead of one.

Before a sub-layer the streams are mixed into one input (weights ``pre``); after it, its output is added to every
stream (weights ``post``) and the streams are mixed among themselves by a doubly stochastic matrix ``comb``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tetrad.ops.row_invariant import linear, mean_square, ordered_sum, sigmoid


class MixWeights(NamedTuple):
    """The mixing weights of R rows: pre and post fp32 [R, N], comb fp32 [R, N, N]."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def _mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """(fn . x) / rms(x) over all N * D channels of a row, fp32 [R, outputs]."""
    flat = streams.flatten(1).float()
    return linear(flat, fn) * torch.rsqrt(mean_square(flat) + norm_eps)


def mix_weights(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, norm_eps: float, hc_eps: float, sinkhorn_iters: int
) -> MixWeights:
    """The weights of one sub-layer from the streams themselves.

    pre = sigmoid(m_pre scale_0 + base) + eps, post = 2 sigmoid(m_post scale_1 + base), comb = Sinkhorn(m_comb scale_2
    + base). streams: [R, N, D]; fn: fp32 [2N + N^2, N D]; scale: fp32 [3]; base: fp32 [2N + N^2].
    """
    count = streams.shape[1]
    mixes = _mixes(streams, fn, norm_eps) * scale[_scale_of_mix(count, scale.device)] + base
    gates, comb = mixes.split((2 * count, count * count), dim=1)
    pre, post = sigmoid(gates).split(count, dim=1)
    comb = sinkhorn(comb.unflatten(1, (count, count)), hc_eps, sinkhorn_iters)
    return MixWeights(pre + hc_eps, 2.0 * post, comb)


@functools.cache
def _scale_of_mix(count: int, device: torch.device) -> Tensor:
    """int64 [2N + N^2]: which of the three scales a mix is multiplied by."""
    return torch.tensor([0] * count + [1] * count + [2] * count**2, dtype=torch.int64, device=device)


def sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """Row softmax, then alternate column and row normalisation, ending on columns; fp32 [R, N, N].

    ``iterations`` counts the column normalisations. Every denominator has ``eps`` added, the softmax ``eps`` as well.
    """
    # In place, for a step spends more launches here than anywhere else. Each normalisation reads one buffer and writes
    # the other, transposed, so that it always sums over the middle dimension; the last term of every sum is eps, which
    # stands in a row below the matrices.
    count = logits.shape[-1]
    sums = logits.new_empty((2, logits.shape[0], 1, count))
    buffers = logits.new_full((2, logits.shape[0], count + 1, count), eps)
    by_row, by_column = buffers.unbind()
    row_sum, column_sum = sums.unbind()
    rows, columns = by_row[:, :count].mT, by_column[:, :count]
    row_divisor = row_sum.mT
    torch.exp(logits - logits.amax(-1, keepdim=True), out=columns)
    columns.div_(columns.sum(-1, keepdim=True)).add_(eps)
    torch.sum(by_column, -2, keepdim=True, out=column_sum)
    for _ in range(iterations - 1):
        torch.div(columns, column_sum, out=rows)
        torch.sum(by_row, -2, keepdim=True, out=row_sum)
        torch.div(rows, row_divisor, out=columns)
        torch.sum(by_column, -2, keepdim=True, out=column_sum)
    return columns.div_(column_sum)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """The sub-layer's input: sum_j pre_j X_j in fp32, cast to the dtype of the streams; [R, D]."""
    terms = pre.unsqueeze(-1) * streams.float()
    return ordered_sum(terms.unbind(1)).to(streams.dtype)


def expand(streams: Tensor, output: Tensor, weights: MixWeights) -> Tensor:
    """The new streams: X'_k = post_k o + sum_j comb_jk X_j (over the *first* index), in fp32; [R, N, D]."""
    result = weights.post.unsqueeze(-1) * output.float().unsqueeze(1)
    terms = zip(weights.comb.unsqueeze(-1).unbind(1), streams.float().unsqueeze(2).unbind(1), strict=True)
    for comb, stream in terms:
        result = result + comb * stream
    return result.to(streams.dtype)


def head_collapse(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """The final collapse before the norm and the head: pre-weights only. fn: fp32 [N, N D]; scale [1]; base [N]."""
    pre = sigmoid(_mixes(streams, fn, norm_eps) * scale[0] + base) + hc_eps
    return collapse(streams, pre)
