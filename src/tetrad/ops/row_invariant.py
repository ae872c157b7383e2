"""Functions whose result for one row never depends on what else is computed beside it.

A library's matrix product may choose another kernel for another number of rows, and a library's sigmoid may compute
the last few elements of a tensor with a scalar routine that rounds differently from the vector one. One unit in the
last place before a 4-bit rounding can flip a token, so everything that a row passes through is built from these.
On a CPU they hold for any number of rows (asserted in the tests); on a GPU, for one captured size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 8
"""fp32 matrix products on CPUs round alike for every row when the number of rows is a multiple of this. Nine rows
already differ from eight where the kernel handles the ninth on its own."""

INNER_MULTIPLE = 4
"""The inner dimension must be a multiple of this, as those of DeepSeek-V4 are: at 33 no number of rows is safe."""


def pad_rows(x: Tensor) -> Tensor:
    """``x`` [N, ...] with zero rows behind it, up to a multiple of 8 rows and at least 8."""
    missing = -x.shape[0] % ROW_MULTIPLE if x.shape[0] else ROW_MULTIPLE
    if not missing:
        return x
    return torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K] times weight [M, K], transposed: [N, M]. Rows are padded to a multiple of 8 for the product.

    So is K, to a multiple of 4, which copies the weight: only unusual configurations need it.
    """
    rows = x.shape[0]
    if missing := -x.shape[1] % INNER_MULTIPLE:
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing))
    product = F.linear(pad_rows(x), weight)
    return product if product.shape[0] == rows else product[:rows]


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """a [N, M, K] times b [N, K, P], item by item: [N, M, P].

    An item on its own is computed as one of two: a single product is split among threads, whose kernels at the edges
    of their parts round differently, while a batch is split between its items.
    """
    if a.shape[0] == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)


def ordered_sum(terms: Sequence[Tensor]) -> Tensor:
    """The terms, at least one, added one after the other."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) from ``exp``, which rounds alike everywhere in a tensor; x is fp32."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x); x is fp32."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) as max(x, 0) + log1p(e^-|x|), which neither overflows nor cancels; x is fp32."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, in fp32, cast once to the dtype of ``x``."""
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        value = value * weight
    return value.to(x.dtype)
