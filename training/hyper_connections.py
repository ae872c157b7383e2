"""Manifold-constrained hyper-connections: how the four residual streams feed a sub-block and take its output."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from shape import Shape


def stream_mixes(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """(fn . x) / rms(x) over the flattened streams [N, 4, D], fp32."""
    if streams.is_cuda:
        from kernels import StreamMixes  # Triton exists only where there is a GPU

        return StreamMixes.apply(streams.flatten(1), fn, eps)
    x = streams.flatten(1).float()
    return F.linear(x, fn) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def hyper_weights(streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, shape: Shape):
    """pre [N, 4], post [N, 4] and the doubly stochastic mix [N, 4, 4] of one sub-block, fp32."""
    count = shape.hc_mult
    mixes = stream_mixes(streams, fn, shape.rms_norm_eps)
    pre = torch.sigmoid(mixes[:, :count] * scale[0] + base[:count]) + shape.hc_eps
    post = 2 * torch.sigmoid(mixes[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = (mixes[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(1, (count, count))
    return pre, post, sinkhorn(logits, shape.hc_sinkhorn_iters, shape.hc_eps)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Softmax over rows, then alternating column and row normalisation, ending on columns; [N, 4, 4] fp32."""
    if logits.is_cuda:
        from kernels import Sinkhorn  # Triton exists only where there is a GPU

        return Sinkhorn.apply(logits, iterations, eps)
    mix = logits.softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


def gather_streams(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_j pre_j * streams_j: [N, D] in the streams' dtype."""
    if streams.is_cuda:
        from kernels import GatherStreams  # Triton exists only where there is a GPU

        return GatherStreams.apply(streams, pre)
    return torch.einsum("nj,njd->nd", pre, streams.float()).to(streams.dtype)


def scatter_streams(streams: torch.Tensor, update: torch.Tensor, post: torch.Tensor, mix: torch.Tensor):
    """post_k * update + sum_j mix_jk * streams_j: [N, 4, D] in the streams' dtype."""
    if streams.is_cuda:
        from kernels import ScatterStreams  # Triton exists only where there is a GPU

        return ScatterStreams.apply(streams, update, post, mix)
    mixed = torch.einsum("njk,njd->nkd", mix, streams.float())
    return (mixed + post.unsqueeze(-1) * update.float().unsqueeze(1)).to(streams.dtype)
