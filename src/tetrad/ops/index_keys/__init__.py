"""Index keys and queries: how they are made and how keys are stored in pages.

    key:    pooled -> RMSNorm -> RoPE -> Hadamard -> quantise -> page
    query:                       RoPE -> Hadamard -> quantise

Each arrow before the quantisation rounds to the compute dtype. The rotation is applied on both sides, so it cancels in
every score; what it changes is that no single channel takes an FP4 group's scale for itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.arguments import check_pages, check_tensor
from tetrad.ops.backends import Problem, backend_module
from tetrad.torch_settings import without_autocast

__all__ = [
    "index_key_vectors",
    "quantize_index_query",
    "read_index_keys",
    "write_index_keys",
    "write_pooled_index_keys",
]

_COMPUTE_DTYPES = (torch.float32, torch.bfloat16)


@without_autocast
def index_key_vectors(
    pooled: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    *,
    hadamard: bool = True,
) -> Tensor:
    """The keys that :func:`write_index_keys` stores: Hadamard(RoPE(RMSNorm(pooled))), [N, D] in ``dtype``.

    Source: the compressor inside DeepSeek-V4's indexer, and the rotation that its index keys were trained with.

    :param pooled: fp32 [N, D], the compressor's output; D a power of two
    :param norm_weight: fp32 or bf16 [D]
    :param eps: the norm's epsilon
    :param cos: fp32 [N, rope / 2], one angle per key and channel pair, at the position of the key's first token
    :param sin: as ``cos``
    :param dtype: the compute dtype, fp32 or bf16, to which every step rounds
    :param hadamard: False leaves the rotation out, on queries and keys alike; only to measure what it is worth
    :raises ValueError: for a wrong shape, stride or device, or if D is not a power of two
    :raises TypeError: for a wrong dtype
    """
    _check_pooled(pooled, norm_weight, cos, sin, dtype)
    backend = backend_module("index_keys", pooled.device, Problem(head_dim=pooled.shape[1]))
    return backend.index_key_vectors(pooled, norm_weight, eps, cos, sin, dtype, hadamard=hadamard)


@without_autocast
def quantize_index_query(
    q: Tensor, cos: Tensor, sin: Tensor, index_dtype: IndexDtype | str, *, hadamard: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Index queries as ``indexer_logits`` takes them: (q, q_scale) of Hadamard(RoPE(q)), quantised like the keys.

    fp4: uint8 [R, H, D/2] and e8m0 uint8 [R, H, D/32]; fp8: float8_e4m3fn [R, H, D] and fp32 [R, H]; bf16 and fp32:
    [R, H, D] in that dtype and None.

    :param q: bf16 or fp32 [R, H, D], the projected query; D a power of two
    :param cos: fp32 [R, rope / 2], one angle per row and channel pair; the last ``rope`` channels are rotated
    :param sin: as ``cos``
    :param index_dtype: the dtype of the index cache
    :param hadamard: as for the keys
    :raises ValueError: for a wrong shape, stride, device or index dtype, if D is not a power of two, or for fp4 if it
        is not a multiple of 32
    :raises TypeError: for a wrong dtype
    """
    check_tensor("q", q, _COMPUTE_DTYPES, (None, None, None), "rows, heads, channels")
    _check_angles(q, cos, sin)
    index_dtype = IndexDtype(index_dtype)
    backend = backend_module("index_keys", q.device, Problem(str(index_dtype), q.shape[2], q.shape[1]))
    return backend.quantize_index_query(q, cos, sin, index_dtype, hadamard=hadamard)


@without_autocast
def write_pooled_index_keys(
    pooled: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    pages: Tensor,
    slots: Tensor,
    layout: IndexLayout,
    *,
    hadamard: bool = True,
) -> None:
    """Make keys and store them: :func:`index_key_vectors`, whose parameters come first, then :func:`write_index_keys`.

    The same bytes as those two give, but a GPU does both in one launch. Errors as theirs.
    """
    _check_pooled(pooled, norm_weight, cos, sin, dtype)
    if pooled.shape[1] != layout.head_dim:
        raise ValueError(f"pooled has {pooled.shape[1]} channels, but the pages are for keys of {layout.head_dim}")
    _check_places(pages, slots, layout, pooled)
    backend = backend_module("index_keys", pooled.device, Problem(str(layout.dtype), layout.head_dim))
    backend.write_pooled_index_keys(pooled, norm_weight, eps, cos, sin, dtype, pages, slots, layout, hadamard=hadamard)


@without_autocast
def write_index_keys(keys: Tensor, pages: Tensor, slots: Tensor, layout: IndexLayout) -> None:
    """Quantise keys and store each at its slot, data and scales together; ``pages`` is changed in place.

    Slot s is entry ``s % 64`` of page ``s // 64``. Keys with a negative slot are not stored; two keys must not share a
    slot. Nothing but the named entries' bytes is written.

    :param keys: bf16 or fp32 [N, D], from :func:`index_key_vectors`
    :param pages: uint8 [pages, stride], at least ``layout.page_bytes`` wide, pages at multiples of 16 bytes
    :param slots: int64 [N]
    :param layout: how a page is laid out, and the dtype of its keys
    :raises ValueError: for a wrong shape, stride or device
    :raises TypeError: for a wrong dtype
    :raises IndexError: if a slot lies behind the last page, on a CPU. A GPU does not wait to find that out: there it
        may stop the process later, or leave the key out; it never writes elsewhere
    """
    check_tensor("keys", keys, _COMPUTE_DTYPES, (None, layout.head_dim), "keys, channels")
    _check_places(pages, slots, layout, keys)
    backend = backend_module("index_keys", keys.device, Problem(str(layout.dtype), layout.head_dim))
    backend.write_index_keys(keys, pages, slots, layout)


@without_autocast
def read_index_keys(pages: Tensor, slots: Tensor, layout: IndexLayout) -> Tensor:
    """The stored keys at ``slots``, dequantised: fp32 [..., D]; zeros for a negative slot.

    :param pages: as in :func:`write_index_keys`
    :param slots: int64 [...]
    :raises ValueError: for a wrong shape, stride or device
    :raises TypeError: for a wrong dtype
    :raises IndexError: if a slot lies behind the last page
    """
    check_pages("pages", pages, layout.page_bytes, f"index keys in {layout.dtype}")
    check_tensor("slots", slots, torch.int64, [None] * slots.dim(), "any shape", pages.device, strided=True)
    backend = backend_module("index_keys", pages.device, Problem(str(layout.dtype), layout.head_dim))
    return backend.read_index_keys(pages, slots, layout)


def _check_pooled(pooled: Tensor, norm_weight: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> None:
    check_tensor("pooled", pooled, torch.float32, (None, None), "keys, channels")
    check_tensor("norm_weight", norm_weight, _COMPUTE_DTYPES, (pooled.shape[1],), "channels", pooled.device)
    if dtype not in _COMPUTE_DTYPES:
        raise TypeError(f"dtype must be float32 or bfloat16; got {dtype}")
    _check_angles(pooled, cos, sin)


def _check_places(pages: Tensor, slots: Tensor, layout: IndexLayout, keys: Tensor) -> None:
    check_tensor("slots", slots, torch.int64, (keys.shape[0],), "keys", keys.device)
    check_pages("pages", pages, layout.page_bytes, f"index keys in {layout.dtype}", keys.device)


def _check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_tensor("cos", cos, torch.float32, (x.shape[0], None), "rows, channel pairs", x.device)
    check_tensor("sin", sin, torch.float32, tuple(cos.shape), "rows, channel pairs", x.device)
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"cos turns {2 * cos.shape[1]} channels, but there are only {x.shape[-1]}")
