"""Checks of what a caller hands to an op. They look at what the host knows (type, dtype, shape, strides, device),
never at values, so they cost no synchronisation. Every error names the argument, what was needed, and what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tetrad.formats.arguments import described
from tetrad.geometry import IndexLayout

ALIGNMENT = 16
"""Bytes: kernels read pages in pieces of this size."""


def check_tensor(
    name: str,
    value: Any,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: Sequence[int | None] | None,
    dims: str,
    device: torch.device | None = None,
    *,
    contiguous: bool = False,
    strided: bool = False,
) -> None:
    """Refuse anything but a tensor of one of ``dtypes`` and of ``shape`` (None: any size, or any shape), on ``device``
    if given.

    ``dims`` names the dimensions for the error ("rows, heads"). With ``contiguous`` the tensor must be so; with
    ``strided`` it may have any strides; with neither, the elements of its last dimension must be adjacent.

    Raises:
        TypeError: wrong type or dtype
        ValueError: wrong shape, strides or device
    """
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, {_wanted(allowed, shape, dims)}; got {type(value).__name__}")
    if value.dtype not in allowed:
        raise TypeError(f"{name} must be {_wanted(allowed, shape, dims)}; got {value.dtype}")
    if shape is not None and (
        value.dim() != len(shape)
        or any(need is not None and need != got for need, got in zip(shape, value.shape, strict=True))
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


def check_output(
    name: str, out: Any, dtype: torch.dtype, rows: int, width: int, dims: str, device: torch.device
) -> None:
    """Refuse an ``out`` that is not [rows, width] with rows that do not overlap. Errors as :func:`check_tensor`."""
    check_tensor(name, out, dtype, (rows, width), dims, device)
    if rows > 1 and out.stride(0) < width:
        raise ValueError(f"{name}: rows {out.stride(0)} elements apart overlap, each has {width}")


def as_pages(name: str, pages: Any, layout: IndexLayout) -> Any:
    """Index pages in DeepGEMM's form, uint8 [pages, 64, 1, bytes of an entry], as uint8 [pages, bytes]; no copy.

    The bytes of a page are the same in both: all data, then all scales. What has another number of dimensions comes
    back as it is, for :func:`check_pages` to judge.

    Raises:
        ValueError: for four dimensions of other sizes, or with gaps inside a page
    """
    if not isinstance(pages, Tensor) or pages.dim() != 4:
        return pages
    row = layout.page_bytes // layout.entries
    if pages.shape[1:] != (layout.entries, 1, row):
        raise ValueError(
            f"{name} must be uint8 [pages, bytes] = [any, {layout.page_bytes}], or [pages, {layout.entries}, 1, {row}] "
            f"as DeepGEMM has them, for keys of {layout.head_dim} channels in {layout.dtype}; got the shape "
            f"{list(pages.shape)}"
        )
    try:
        return pages.view(pages.shape[0], layout.page_bytes)
    except RuntimeError as error:
        raise ValueError(
            f"{name} must have the bytes of a page beside each other; got strides {pages.stride()} for the shape "
            f"{list(pages.shape)}"
        ) from error


def check_compute_dtype(dtype: Any) -> None:
    """Refuse what is not a compute dtype.

    Raises:
        TypeError: if it is not
    """
    if dtype not in (torch.float32, torch.bfloat16):
        hint = "" if isinstance(dtype, torch.dtype) else ", pass torch.float32 or torch.bfloat16"
        raise TypeError(f"dtype must be float32 or bfloat16; got {described(dtype)}{hint}")


def check_switch(name: str, value: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        TypeError: if it is not
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {described(value)}")


def check_real(name: str, value: Any) -> None:
    """Refuse what is not a plain number.

    Raises:
        TypeError: if it is not
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a plain number; got {described(value)}")


def _wanted(dtypes: tuple[torch.dtype, ...], shape: Sequence[int | None] | None, dims: str) -> str:
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if shape is None:
        return f"{names} of {dims}"
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"{names} [{dims}] = [{sizes}]"
