"""Checks of what a caller hands to an op. They look at what the host knows (type, dtype, shape, strides, device),
never at values, so they cost no synchronisation. Every error names the argument, what was needed, and what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: kernels read pages in pieces of this size."""


def check_tensor(
    name: str,
    value: Any,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: Sequence[int | None],
    dims: str,
    device: torch.device | None = None,
    *,
    contiguous: bool = False,
    strided: bool = False,
) -> None:
    """Refuse anything but a tensor of one of ``dtypes`` and of ``shape`` (None: any size), on ``device`` if given.

    ``dims`` names the dimensions for the error ("rows, heads"). With ``contiguous`` the tensor must be so; with
    ``strided`` it may have any strides; with neither, the elements of its last dimension must be adjacent.

    :raises TypeError: wrong type or dtype
    :raises ValueError: wrong shape, strides or device
    """
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, {_wanted(allowed, shape, dims)}; got {type(value).__name__}")
    if value.dtype not in allowed:
        raise TypeError(f"{name} must be {_wanted(allowed, shape, dims)}; got {value.dtype}")
    if value.dim() != len(shape) or any(
        need is not None and need != got for need, got in zip(shape, value.shape, strict=True)
    ):
        raise ValueError(f"{name} must be {_wanted(allowed, shape, dims)}; got the shape {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device}, where the other arguments are; got {value.device}")
    if contiguous and not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got strides {value.stride()} for the shape {list(value.shape)}")
    if not (contiguous or strided) and value.numel() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(
            f"{name} must have adjacent elements along its last dimension (stride 1); got strides {value.stride()}"
        )


def check_pages(
    name: str, pages: Any, page_bytes: int, what: str, device: torch.device | None = None, *, aligned: bool = True
) -> None:
    """Refuse anything but pages of at least ``page_bytes``: uint8 [pages, bytes], adjacent bytes, no overlap.

    ``what`` says whose page size that is; ``aligned`` asks for every page to start at a multiple of 16 bytes. Errors as
    :func:`check_tensor`.
    """
    check_tensor(name, pages, torch.uint8, (None, None), "pages, bytes", device)
    if pages.shape[1] < page_bytes:
        raise ValueError(f"{name} must have pages of {page_bytes} bytes ({what}); got {pages.shape[1]}")
    # the stride of a dimension of one page is meaningless
    if pages.shape[0] > 1 and pages.stride(0) < page_bytes:
        raise ValueError(f"{name}: pages {pages.stride(0)} bytes apart overlap, each has {page_bytes} bytes")
    if not aligned:
        return
    if pages.shape[0] > 1 and pages.stride(0) % ALIGNMENT:
        raise ValueError(f"{name} must have pages a multiple of {ALIGNMENT} bytes apart; got {pages.stride(0)}")
    if pages.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} must start at a multiple of {ALIGNMENT} bytes; got the address {pages.data_ptr():#x}")


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse anything but a plain int of at least ``least``.

    :raises TypeError: not an int (a tensor would need a synchronisation)
    :raises ValueError: too small
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a plain int; got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


def check_output(
    name: str, out: Any, dtype: torch.dtype, rows: int, width: int, dims: str, device: torch.device
) -> None:
    """Refuse an ``out`` that is not [rows, width] with rows that do not overlap. Errors as :func:`check_tensor`."""
    check_tensor(name, out, dtype, (rows, width), dims, device)
    if rows > 1 and out.stride(0) < width:
        raise ValueError(f"{name}: rows {out.stride(0)} elements apart overlap, each has {width}")


def _wanted(dtypes: tuple[torch.dtype, ...], shape: Sequence[int | None], dims: str) -> str:
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"{names} [{dims}] = [{sizes}]"
