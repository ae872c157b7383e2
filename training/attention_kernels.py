"""Triton kernels of the attention: its softmax with a sink, and the index scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax_forward(
    near, far, sink, near_hidden, far_hidden, near_out, far_out, sink_out, near_period, far_period, K,
    HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, CP)[None, :]
    hide = tl.load(near_hidden + (n % near_period) * C + c, mask=c < C, other=1)
    near_at = (n * HEADS + h) * C + c
    s = tl.load(near + near_at, mask=(h >= 0) & (c < C), other=0.0).to(tl.float32)
    s = tl.where(hide != 0, float("-inf"), s)
    bias = tl.load(sink + tl.arange(0, HEADS))
    top = tl.maximum(tl.max(s, 1), bias)
    if KP > 0:
        k = tl.arange(0, KP)[None, :]
        hide_far = tl.load(far_hidden + (n % far_period) * K + k, mask=k < K, other=1)
        far_at = (n * HEADS + h) * K + k
        f = tl.load(far + far_at, mask=(h >= 0) & (k < K), other=0.0).to(tl.float32)
        f = tl.where(hide_far != 0, float("-inf"), f)
        top = tl.maximum(top, tl.max(f, 1))
    s = tl.exp(s - top[:, None])
    bias = tl.exp(bias - top)
    total = tl.sum(s, 1) + bias
    if KP > 0:
        f = tl.exp(f - top[:, None])
        total += tl.sum(f, 1)
        tl.store(far_out + far_at, (f / total[:, None]).to(far_out.dtype.element_ty), mask=(h >= 0) & (k < K))
    tl.store(near_out + near_at, (s / total[:, None]).to(near_out.dtype.element_ty), mask=(h >= 0) & (c < C))
    tl.store(sink_out + n * HEADS + tl.arange(0, HEADS), bias / total)


@triton.jit
def _softmax_backward(
    near, far, near_grad, far_grad, near_out, far_out, dots, K,
    HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, CP)[None, :]
    near_at = (n * HEADS + h) * C + c
    inside = (h >= 0) & (c < C)
    p = tl.load(near + near_at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(near_grad + near_at, mask=inside, other=0.0).to(tl.float32)
    dot = tl.sum(p * g, 1)
    if KP > 0:
        k = tl.arange(0, KP)[None, :]
        far_at = (n * HEADS + h) * K + k
        inside_far = (h >= 0) & (k < K)
        pf = tl.load(far + far_at, mask=inside_far, other=0.0).to(tl.float32)
        gf = tl.load(far_grad + far_at, mask=inside_far, other=0.0).to(tl.float32)
        dot += tl.sum(pf * gf, 1)
        tl.store(far_out + far_at, (pf * (gf - dot[:, None])).to(far_out.dtype.element_ty), mask=inside_far)
    tl.store(near_out + near_at, (p * (g - dot[:, None])).to(near_out.dtype.element_ty), mask=inside)
    tl.store(dots + n * HEADS + tl.arange(0, HEADS), dot)


def _pad(count: int) -> int:
    return triton.next_power_of_2(count) if count else 0


class SinkSoftmax(torch.autograd.Function):
    """Softmax over window scores, far scores and a sink that has no value.

    near [N, H, C] and far [N, H, K] in the compute dtype, sink fp32 [H]; near_hidden uint8 [P, C] and far_hidden uint8
    [Q, K] hold 1 where a score does not count, for token n their rows n % P and n % Q. Returns both shares.
    """

    @staticmethod
    def forward(ctx, near, far, sink, near_hidden, far_hidden):  # pyright: ignore[reportIncompatibleMethodOverride]
        near, far = near.contiguous(), far.contiguous()
        count, heads, width = near.shape
        reach = far.shape[-1]
        near_share, far_share = torch.empty_like(near), torch.empty_like(far)
        sink_share = torch.empty(count, heads, device=near.device)
        _softmax_forward[(count,)](
            near, far, sink, near_hidden, far_hidden, near_share, far_share, sink_share,
            near_hidden.shape[0], max(1, far_hidden.shape[0]), reach, heads, width, _pad(width), _pad(reach),
            num_warps=2 if reach <= 128 else 4,
        )  # fmt: skip
        ctx.save_for_backward(near_share, far_share, sink_share)
        return near_share, far_share

    @staticmethod
    def backward(ctx, near_grad, far_grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        near_share, far_share, sink_share = ctx.saved_tensors
        count, heads, width = near_share.shape
        reach = far_share.shape[-1]
        near_out, far_out = torch.empty_like(near_share), torch.empty_like(far_share)
        dots = torch.empty_like(sink_share)
        _softmax_backward[(count,)](
            near_share, far_share, near_grad.contiguous(), far_grad.contiguous(), near_out, far_out, dots, reach,
            heads, width, _pad(width), _pad(reach), num_warps=2 if reach <= 128 else 4,
        )  # fmt: skip
        return near_out, far_out, -(sink_share * dots).sum(0), None, None


@triton.jit
def _scores_kernel(
    q, k, weights, visible, out, rows, entries, k_batch,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    d = tl.arange(0, WIDTH)
    live = r < rows
    end = tl.load(visible + batch * rows + r, mask=live, other=0)
    out_at = out + (batch * rows + r[:, None].to(tl.int64)) * entries + t[None, :]
    inside = live[:, None] & (t < entries)[None, :]
    total = tl.zeros([ROWS, ENTRIES], tl.float32)
    if tl.max(end, 0) > tl.program_id(1) * ENTRIES:
        keys = tl.load(
            k + batch * k_batch + t[None, :].to(tl.int64) * WIDTH + d[:, None], mask=(t < entries)[None, :], other=0.0
        )
        base = (batch * rows + r.to(tl.int64)) * HEADS
        for head in range(HEADS):
            queries = tl.load(q + (base + head)[:, None] * WIDTH + d[None, :], mask=live[:, None], other=0.0)
            weight = tl.load(weights + base + head, mask=live, other=0.0)
            total += weight[:, None] * tl.maximum(tl.dot(queries, keys), 0.0)
    tl.store(out_at, tl.where(t[None, :] < end[:, None], total, float("-inf")), mask=inside)


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """sum_h weights[b, r, h] * relu(q[b, r, h] . k[b, t]), -inf where t >= visible[b, r]; fp32 [B, R, T].

    q [B, R, H, D] and k [B, T, D] (or [1, T, D], shared) in bf16, weights [B, R, H] fp32, visible [B, R] int32.
    """
    batch, rows, heads, width = q.shape
    entries = k.shape[1]
    k_batch = 0 if k.shape[0] == 1 else k.contiguous().stride(0)
    out = torch.empty(batch, rows, entries, device=q.device)
    grid = (triton.cdiv(rows, 64), triton.cdiv(entries, 128), batch)
    _scores_kernel[grid](
        q.contiguous(), k.contiguous(), weights.contiguous(), visible.contiguous(), out, rows, entries, k_batch,
        heads, width, 64, 128,
    )  # fmt: skip
    return out
