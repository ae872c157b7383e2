"""The Hadamard rotation of index queries and keys, applied after RoPE and before FP4.

    y = H x / sqrt(n)        H[j, k] = (-1)^popcount(j & k), Sylvester's order

H / sqrt(n) is orthogonal and symmetric: rotating query and key alike leaves every dot product as it was, and rotating
twice gives the vector back. What changes is the shape of the values: one large channel among small ones, which
would take the group's FP4 scale for itself, is spread evenly over all n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats.arguments import check_is_tensor


def rotate(x: Tensor) -> Tensor:
    """H x / sqrt(n) along the last dimension, in the shape and dtype of ``x``.

    Computed in fp32 (fp64 for fp64) by log2(n) passes of additions and subtractions and one final multiplication, so a
    vector's bits never depend on what else is in the tensor, nor on a matrix library. Gradients flow.

    Args:
        x: [..., n], floating point, n a power of two

    Raises:
        ValueError: if n is not a power of two
        TypeError: if ``x`` is not floating point
    """
    check_is_tensor("x", x)
    if not x.is_floating_point():
        raise TypeError(f"only floating-point tensors can be rotated, not {x.dtype}")
    size = x.shape[-1] if x.dim() else 0
    if size < 1 or size & (size - 1):
        raise ValueError(
            f"the Hadamard rotation needs a last dimension that is a power of two; got the shape {list(x.shape)}"
        )
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    for _ in range(size.bit_length() - 1):
        # each pass combines the two values of the index's top bit and moves that bit to the bottom; in the end every
        # bit has had its turn and is back in its place
        upper, lower = y.chunk(2, dim=-1)
        y = torch.stack((upper + lower, upper - lower), dim=-1).flatten(-2)
    return (y * size**-0.5).to(x.dtype)
