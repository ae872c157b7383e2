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

from tetrad.geometry.sizes import ROW_MULTIPLE as ROW_MULTIPLE
from tetrad.torch_settings import without_autocast

INNER_MULTIPLE = 4
"""The inner dimension must be a multiple of this, as those of DeepSeek-V4 are: at 33 no number of rows is safe."""

LANES = 16
"""fp32 numbers in 64 bytes. The items of a batched product start at multiples of as many bytes: the kernels round by
how an item lies in memory."""

_SMALL_PRODUCT = 16**3
"""torch computes a 16-bit product on a CPU by one library above as many multiplications and by another up to it."""

_COLUMNS = 32
"""Columns that torch gives to one thread, or a multiple of them, where threads share a reduction."""

_SPLIT_REDUCTION = 32768
"""From as many numbers on, torch lets its threads share a reduction that has a single result."""


def pad_rows(x: Tensor, least: int = 1) -> Tensor:
    """``x`` [N, ...] with zero rows behind it, up to a multiple of 8 rows, at least ``least`` and at least 8."""
    rows = max(x.shape[0], least)
    missing = rows + -rows % ROW_MULTIPLE - x.shape[0]
    if not missing:
        return x
    return torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


@without_autocast
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K] times weight [M, K], transposed: [N, M]. Rows are padded to a multiple of 8 for the product.

    So is K, to a multiple of 4, which copies the weight, and in 16 bits a small weight gets more rows, so that no
    number of rows falls below the size at which torch takes another library: only unusual configurations need either.
    """
    rows = x.shape[0]
    if missing := -x.shape[1] % INNER_MULTIPLE:
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing))
    least = 1 if weight.element_size() != 2 else _SMALL_PRODUCT // max(weight.numel(), 1) + 1
    product = F.linear(pad_rows(x, least), weight)
    return product if product.shape[0] == rows else product[:rows]


@without_autocast
def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """a [N, M, K] times b [N, K, P], item by item: [N, M, P]; fp32 or fp64.

    An item on its own is computed as one of two: a single product is split among threads, whose kernels at the edges
    of their parts round differently, while a batch is split between its items. K and P are padded with zeros to
    multiples of 16, so that every item lies alike in memory.
    """
    inner, outputs = -a.shape[2] % LANES, -b.shape[2] % LANES
    if inner:
        a = F.pad(a, (0, inner))
    if inner or outputs:
        # the last dimension in memory may be either
        transposed = b.stride(1) == 1
        b = F.pad(b.mT, (0, inner, 0, outputs)).mT if transposed else F.pad(b, (0, outputs, 0, inner))
    alone = a.shape[0] == 1
    product = torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1] if alone else torch.bmm(a, b)
    return product[..., : product.shape[2] - outputs] if outputs else product


def mean_square(x: Tensor) -> Tensor:
    """The mean of x^2 over the last dimension, kept as 1; x is fp32.

    A long row on its own is computed as one of two, since the threads would share its sum.
    """
    square = x.square()
    if x.numel() == x.shape[-1] >= _SPLIT_REDUCTION:
        return torch.cat((square, square)).mean(-1, keepdim=True)[: x.shape[0]]
    return square.mean(-1, keepdim=True)


def middle_sum(x: Tensor) -> Tensor:
    """x [N, K, C] summed over K: [N, C]; x is fp32.

    Where N is small, threads share the columns of a long sum, 32 or a multiple of them each, and what is left behind
    the last 32 is summed in another order. So C is padded with zeros to a multiple of 32, unless it is smaller.
    """
    columns = x.shape[2]
    if columns > _COLUMNS and columns % _COLUMNS:
        return F.pad(x, (0, -columns % _COLUMNS)).sum(1)[:, :columns]
    return x.sum(1)


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
    value = value * torch.rsqrt(mean_square(value) + eps)
    if weight is not None:
        value = value * weight
    return value.to(x.dtype)
