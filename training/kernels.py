"""Triton kernels that make a training step fast: hyper-connections, RoPE, FP4 rounding.

Each has a plain torch counterpart in `hyper_connections.py`, `parts.py` or `quantise.py`; the tests compare the two.
`attention_kernels.py` has the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

STREAMS = 4


@triton.jit
def _sinkhorn_forward(logits, out, sums, rows, eps, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, 4)
    at = n[:, None, None] * 16 + j[None, :, None] * 4 + j[None, None, :]
    live = (n < rows)[:, None, None]
    c = tl.load(logits + at, mask=live, other=0.0)
    c = tl.exp(c - tl.max(c, 2)[:, :, None])
    c = c / tl.sum(c, 2)[:, :, None] + eps
    sums_at = n[:, None] * (ROUNDS * 4) + j[None, :]
    for step in tl.static_range(ROUNDS):
        if step % 2 == 0:
            total = tl.sum(c, 1) + eps
            c = c / total[:, None, :]
        else:
            total = tl.sum(c, 2) + eps
            c = c / total[:, :, None]
        tl.store(sums + sums_at + step * 4, total, mask=(n < rows)[:, None])
    tl.store(out + at, c, mask=live)


@triton.jit
def _sinkhorn_backward(out, sums, grad_out, grad_logits, rows, eps, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, 4)
    at = n[:, None, None] * 16 + j[None, :, None] * 4 + j[None, None, :]
    live = (n < rows)[:, None, None]
    y = tl.load(out + at, mask=live, other=0.0)
    g = tl.load(grad_out + at, mask=live, other=0.0)
    sums_at = n[:, None] * (ROUNDS * 4) + j[None, :]
    for back in tl.static_range(ROUNDS):
        step = ROUNDS - 1 - back
        total = tl.load(sums + sums_at + step * 4, mask=(n < rows)[:, None], other=1.0)
        if step % 2 == 0:
            g = (g - tl.sum(g * y, 1)[:, None, :]) / total[:, None, :]
            y = y * total[:, None, :]
        else:
            g = (g - tl.sum(g * y, 2)[:, :, None]) / total[:, :, None]
            y = y * total[:, :, None]
    p = y - eps
    tl.store(grad_logits + at, p * (g - tl.sum(g * p, 2)[:, :, None]), mask=live)


class Sinkhorn(torch.autograd.Function):
    """[N, 4, 4] fp32 logits to the doubly stochastic matrices of mHC; `iterations` column normalisations."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        logits = logits.contiguous()
        rows, rounds = logits.shape[0], 2 * iterations - 1
        out = torch.empty_like(logits)
        sums = torch.empty(rows, rounds, 4, device=logits.device)
        _sinkhorn_forward[(triton.cdiv(rows, 32),)](logits, out, sums, rows, eps, rounds, 32)
        ctx.save_for_backward(out, sums)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        out, sums = ctx.saved_tensors
        grad_logits = torch.empty_like(out)
        rows, rounds = sums.shape[:2]
        _sinkhorn_backward[(triton.cdiv(rows, 32),)](
            out, sums, grad.contiguous(), grad_logits, rows, ctx.eps, rounds, 32
        )
        return grad_logits, None, None


@triton.jit
def _gather_forward(streams, pre, out, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    live = (n < rows)[:, None]
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for j in tl.static_range(4):
        x = tl.load(streams + n[:, None] * (4 * WIDTH) + j * WIDTH + d[None, :], mask=live, other=0.0).to(tl.float32)
        total += tl.load(pre + n * 4 + j, mask=n < rows, other=0.0)[:, None] * x
    tl.store(out + n[:, None] * WIDTH + d[None, :], total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _gather_backward(streams, pre, grad, grad_streams, grad_pre, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    live = (n < rows)[:, None]
    g = tl.load(grad + n[:, None] * WIDTH + d[None, :], mask=live, other=0.0).to(tl.float32)
    for j in tl.static_range(4):
        at = n[:, None] * (4 * WIDTH) + j * WIDTH + d[None, :]
        x = tl.load(streams + at, mask=live, other=0.0).to(tl.float32)
        p = tl.load(pre + n * 4 + j, mask=n < rows, other=0.0)
        tl.store(grad_streams + at, (p[:, None] * g).to(grad_streams.dtype.element_ty), mask=live)
        tl.store(grad_pre + n * 4 + j, tl.sum(x * g, 1), mask=n < rows)


class GatherStreams(torch.autograd.Function):
    """sum_j pre[n, j] * streams[n, j, :]; streams [N, 4, D] in the compute dtype, pre [N, 4] fp32; D a power of two."""

    @staticmethod
    def forward(ctx, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        streams, pre = streams.contiguous(), pre.contiguous()
        rows, _, width = streams.shape
        out = streams.new_empty(rows, width)
        _gather_forward[(triton.cdiv(rows, 8),)](streams, pre, out, rows, width, 8)
        ctx.save_for_backward(streams, pre)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        streams, pre = ctx.saved_tensors
        rows, _, width = streams.shape
        grad_streams, grad_pre = torch.empty_like(streams), torch.empty_like(pre)
        _gather_backward[(triton.cdiv(rows, 8),)](
            streams, pre, grad.contiguous(), grad_streams, grad_pre, rows, width, 8
        )
        return grad_streams, grad_pre


@triton.jit
def _scatter_forward(streams, update, post, mix, out, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    live = (n < rows)[:, None]
    o = tl.load(update + n[:, None] * WIDTH + d[None, :], mask=live, other=0.0).to(tl.float32)
    for k in tl.static_range(4):
        total = tl.load(post + n * 4 + k, mask=n < rows, other=0.0)[:, None] * o
        for j in tl.static_range(4):
            at = n[:, None] * (4 * WIDTH) + j * WIDTH + d[None, :]
            x = tl.load(streams + at, mask=live, other=0.0).to(tl.float32)
            total += tl.load(mix + n * 16 + j * 4 + k, mask=n < rows, other=0.0)[:, None] * x
        at = n[:, None] * (4 * WIDTH) + k * WIDTH + d[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _scatter_backward(
    streams, update, post, mix, grad, grad_streams, grad_update, grad_post, grad_mix, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    live = (n < rows)[:, None]
    o = tl.load(update + n[:, None] * WIDTH + d[None, :], mask=live, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for k in tl.static_range(4):
        at = n[:, None] * (4 * WIDTH) + k * WIDTH + d[None, :]
        g = tl.load(grad + at, mask=live, other=0.0).to(tl.float32)
        total += tl.load(post + n * 4 + k, mask=n < rows, other=0.0)[:, None] * g
        tl.store(grad_post + n * 4 + k, tl.sum(o * g, 1), mask=n < rows)
    tl.store(grad_update + n[:, None] * WIDTH + d[None, :], total.to(grad_update.dtype.element_ty), mask=live)
    for j in tl.static_range(4):
        at = n[:, None] * (4 * WIDTH) + j * WIDTH + d[None, :]
        x = tl.load(streams + at, mask=live, other=0.0).to(tl.float32)
        total = tl.zeros([BLOCK, WIDTH], tl.float32)
        for k in tl.static_range(4):
            g = tl.load(grad + n[:, None] * (4 * WIDTH) + k * WIDTH + d[None, :], mask=live, other=0.0).to(tl.float32)
            total += tl.load(mix + n * 16 + j * 4 + k, mask=n < rows, other=0.0)[:, None] * g
            tl.store(grad_mix + n * 16 + j * 4 + k, tl.sum(x * g, 1), mask=n < rows)
        tl.store(grad_streams + at, total.to(grad_streams.dtype.element_ty), mask=live)


class ScatterStreams(torch.autograd.Function):
    """out[n, k] = post[n, k] * update[n] + sum_j mix[n, j, k] * streams[n, j]; streams [N, 4, D], update [N, D]."""

    @staticmethod
    def forward(
        ctx, streams: torch.Tensor, update: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        streams, update, post, mix = (t.contiguous() for t in (streams, update, post, mix))
        rows, _, width = streams.shape
        out = torch.empty_like(streams)
        _scatter_forward[(triton.cdiv(rows, 8),)](streams, update, post, mix, out, rows, width, 8)
        ctx.save_for_backward(streams, update, post, mix)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in saved]
        rows, _, width = saved[0].shape
        _scatter_backward[(triton.cdiv(rows, 8),)](*saved, grad.contiguous(), *grads, rows, width, 8)
        return tuple(grads)


@triton.jit
def _fp4_kernel(x, out, groups, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = n[:, None] * 32 + tl.arange(0, 32)[None, :]
    live = (n < groups)[:, None]
    v = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(v), 1), 6.0 * 1.1754943508222875e-38)
    bits = (largest * (1.0 / 6.0)).to(tl.int32, bitcast=True)
    scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    v = v / scale[:, None]
    a = tl.minimum(tl.abs(v), 6.0)
    step = tl.where(a < 2.0, 0.5, tl.where(a < 4.0, 1.0, 2.0))
    # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
    rounded = ((a / step + 12582912.0) - 12582912.0) * step
    tl.store(out + at, (tl.where(v < 0, -rounded, rounded) * scale[:, None]).to(out.dtype.element_ty), mask=live)


def fp4_round(x: torch.Tensor) -> torch.Tensor:
    """`quantise.fp4_groups` on a GPU."""
    x = x.contiguous()
    out = torch.empty_like(x)
    groups = x.numel() // 32
    _fp4_kernel[(triton.cdiv(groups, 64),)](x, out, groups, 64)
    return out


@triton.jit
def _mixes_kernel(streams, fn, raw, inverse, rows, eps, WIDTH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, 32)
    live = (n < rows)[:, None]
    total = tl.zeros([BLOCK, 32], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, WIDTH, 64):
        d = begin + tl.arange(0, 64)
        x = tl.load(streams + n[:, None] * WIDTH + d[None, :], mask=live, other=0.0).to(tl.float32)
        w = tl.load(fn + m[None, :] * WIDTH + d[:, None], mask=(m < COUNT)[None, :], other=0.0)
        total += tl.dot(x, w)
        squares += tl.sum(x * x, 1)
    tl.store(raw + n[:, None] * COUNT + m[None, :], total, mask=live & (m < COUNT)[None, :])
    tl.store(inverse + n, 1.0 / tl.sqrt(squares / WIDTH + eps), mask=n < rows)


class StreamMixes(torch.autograd.Function):
    """(fn . x) / rms(x): streams [N, K] (K a multiple of 64), fn [M <= 32, K] fp32 to fp32 [N, M]."""

    @staticmethod
    def forward(ctx, streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
        streams, fn = streams.contiguous(), fn.contiguous()
        rows, width = streams.shape
        raw = torch.empty(rows, fn.shape[0], device=streams.device)
        inverse = torch.empty(rows, device=streams.device)
        _mixes_kernel[(triton.cdiv(rows, 32),)](streams, fn, raw, inverse, rows, eps, width, fn.shape[0], 32)
        ctx.save_for_backward(streams, fn, raw, inverse)
        return raw * inverse.unsqueeze(-1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        streams, fn, raw, inverse = ctx.saved_tensors
        scaled = (grad * inverse.unsqueeze(-1)).to(streams.dtype)
        along = (grad * raw).sum(-1, keepdim=True) * inverse.unsqueeze(-1) ** 3 / -streams.shape[1]
        grad_streams = torch.addcmul(scaled @ fn.to(streams.dtype), streams, along.to(streams.dtype))
        return grad_streams, (scaled.mT @ streams).to(fn.dtype), None


@triton.jit
def _rotate_kernel(
    x, cos, sin, out, rows, heads, sign, WIDTH: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = (n < rows)[:, None]
    c = tl.arange(0, PAD)[None, :]
    plain = live & (c < WIDTH - 2 * HALF)
    tl.store(out + n[:, None] * WIDTH + c, tl.load(x + n[:, None] * WIDTH + c, mask=plain, other=0.0), mask=plain)
    i = tl.arange(0, HALF)[None, :]
    at = n[:, None] * WIDTH + WIDTH - 2 * HALF + 2 * i
    a = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(x + at + 1, mask=live, other=0.0).to(tl.float32)
    turn = (n // heads)[:, None] * HALF + i
    co = tl.load(cos + turn, mask=live, other=0.0)
    si = tl.load(sin + turn, mask=live, other=0.0) * sign
    tl.store(out + at, (a * co - b * si).to(out.dtype.element_ty), mask=live)
    tl.store(out + at + 1, (a * si + b * co).to(out.dtype.element_ty), mask=live)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    width, half = x.shape[-1], cos.shape[-1]
    rows = x.numel() // width
    heads = rows // max(1, cos.numel() // half)
    if rows:
        grid = (triton.cdiv(rows, 16),)
        _rotate_kernel[grid](x, cos, sin, out, rows, heads, sign, width, triton.next_power_of_2(width), half, 16)
    return out


class Rotate(torch.autograd.Function):
    """RoPE on x [..., heads, width] or [..., width] by cos and sin fp32 [..., half], one row per token."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.sign = sign
        return _rotated(x, cos, sin, sign)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -ctx.sign), None, None, None
