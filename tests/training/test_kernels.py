"""The Triton kernels of training against plain torch: on the GPU, or in Triton's interpreter where there is none."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.slow

CUDA = torch.cuda.is_available()
READY = CUDA or os.environ.get("TRITON_INTERPRET") == "1"
if READY:
    import attention
    import attention_kernels
    import hyper_connections
    import kernels
    import parts
    import quantise

needs_triton = pytest.mark.skipif(not READY, reason="runs in a process of its own, in Triton's interpreter")
DEVICE = "cuda" if CUDA else "cpu"
EXACT = {"rtol": 1e-4, "atol": 2e-5}


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu()


def compare(fast, slow, *inputs: torch.Tensor, **tolerance) -> None:
    """Outputs and gradients of `fast` on the device equal those of `slow` on the CPU."""
    left = [x.clone().to(DEVICE).requires_grad_() for x in inputs]
    right = [x.clone().requires_grad_() for x in inputs]
    a, b = fast(*left), slow(*right)
    gradient = torch.randn(b.shape, generator=torch.Generator().manual_seed(9)).to(b.dtype)
    a.backward(gradient.to(DEVICE))
    b.backward(gradient)
    torch.testing.assert_close(on_cpu(a), on_cpu(b), **tolerance)
    for x, y in zip(left, right, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad.cpu(), y.grad, **tolerance)


@needs_triton
def test_sinkhorn() -> None:
    """A wrong backward pass would still train, badly."""
    torch.manual_seed(0)
    logits = torch.randn(37, 4, 4) * 3
    fast = lambda x: kernels.Sinkhorn.apply(x, 20, 1e-6)  # noqa: E731
    compare(fast, lambda x: hyper_connections.sinkhorn(x, 20, 1e-6), logits, **EXACT)


@needs_triton
def test_streams() -> None:
    """Swapping the two indices of the mixing matrix would go unnoticed with a symmetric one."""
    torch.manual_seed(1)
    streams = torch.randn(19, 4, 64)
    compare(kernels.GatherStreams.apply, hyper_connections.gather_streams, streams, torch.rand(19, 4), **EXACT)
    inputs = (streams, torch.randn(19, 64), torch.rand(19, 4), torch.rand(19, 4, 4))
    compare(kernels.ScatterStreams.apply, hyper_connections.scatter_streams, *inputs, **EXACT)


@needs_triton
def test_stream_mixes() -> None:
    """The gradient has a part along the streams themselves, from the norm."""
    torch.manual_seed(4)
    streams, fn = torch.randn(37, 4, 64), torch.randn(24, 256)
    fast = lambda x, w: kernels.StreamMixes.apply(x.flatten(1), w, 1e-6)  # noqa: E731
    tolerance = {"rtol": 1e-2, "atol": 5e-2} if CUDA else EXACT
    compare(fast, lambda x, w: hyper_connections.stream_mixes(x, w, 1e-6), streams, fn, **tolerance)


@needs_triton
def test_rotate() -> None:
    """48 dims of which 16 turn: the rest must pass through, and the inverse must undo it."""
    torch.manual_seed(5)
    x, angles = torch.randn(3, 7, 2, 48), torch.randn(3, 7, 1, 8)
    cos, sin = angles.cos(), angles.sin()
    fast = lambda x: kernels.Rotate.apply(x, cos.to(DEVICE), sin.to(DEVICE), 1.0)  # noqa: E731
    compare(fast, lambda x: parts.rotate(x, cos, sin), x, **EXACT)


@needs_triton
@pytest.mark.parametrize("reach", [0, 5, 48])
def test_sink_softmax(reach: int) -> None:
    """Hidden scores get no share, and the sink's gradient counts though it has no value."""
    torch.manual_seed(6)
    near, far, sink = torch.randn(42, 2, 12), torch.randn(42, 2, reach), torch.randn(2)
    hidden, unseen = torch.rand(21, 12) < 0.4, torch.rand(42, reach) < 0.5
    weights = torch.randn(42, 2, 12 + reach)

    def total(shares, device):
        return (torch.cat(shares, -1) * weights.to(device)).sum(-1)

    masks = (hidden.to(DEVICE, torch.uint8), unseen.to(DEVICE, torch.uint8))
    compare(
        lambda a, b, c: total(attention_kernels.SinkSoftmax.apply(a, b, c, *masks), DEVICE),
        lambda a, b, c: total(attention.sink_softmax(a, b, c, hidden, unseen), "cpu"),
        near, far, sink, **EXACT,
    )  # fmt: skip


@needs_triton
def test_fp4_bit_for_bit() -> None:
    """Ties go to even codes, and a group of zeros stays zero."""
    torch.manual_seed(2)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0]).repeat(16)
    x = torch.cat([torch.randn(50, 128) * torch.randn(50, 1).exp(), ties[None], torch.zeros(1, 128)])
    assert torch.equal(kernels.fp4_round(x.to(DEVICE)).cpu(), quantise._fp4_torch(x))


@needs_triton
@pytest.mark.parametrize("shared", [False, True])
def test_index_scores(shared: bool) -> None:
    """Entries beyond the visible end are -inf, also where a whole tile is; the interpreter has no bf16 dot."""
    torch.manual_seed(3)
    dtype = torch.bfloat16 if CUDA else torch.float32
    q, k = torch.randn(2, 70, 4, 32).to(dtype), torch.randn(1 if shared else 2, 300, 32).to(dtype)
    weights = torch.randn(2, 70, 4)
    visible = torch.randint(0, 301, (2, 70), dtype=torch.int32)
    visible[:, :64] //= 4
    found = attention_kernels.index_scores(*(x.to(DEVICE) for x in (q, k, weights, visible))).cpu()
    products = torch.relu(torch.einsum("brhd,btd->brht", q.float(), k.float().expand(2, -1, -1)))
    wanted = torch.einsum("brh,brht->brt", weights, products)
    wanted = wanted.masked_fill(torch.arange(300) >= visible[..., None], float("-inf"))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(READY, reason="the tests above run here")
def test_in_the_interpreter() -> None:
    """Triton decides when it is imported whether it interprets, so another process has to."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout
