"""Rows of data and their scales, to and from pages: the one place where the two planes of a page move, always
together."""

from __future__ import annotations

from torch import Tensor

from tetrad.geometry import PageLayout, data_rows, scale_rows, split_slots


def scatter_rows(data: Tensor, scales: Tensor | None, pages: Tensor, slots: Tensor, layout: PageLayout) -> None:
    """Store rows at their slots; rows with a negative slot are left out. Two rows must not share a slot.

    Args:
        data: uint8 [N, data_row_bytes]
        scales: uint8 [N, scale_row_bytes], None for a layout without scales
        pages: uint8 [pages, stride], at least a page wide
        slots: int64 [N]

    Raises:
        IndexError: if a slot lies behind the last page
    """
    kept = (slots >= 0).nonzero().squeeze(-1)
    page, entry = split_slots(slots.index_select(0, kept), layout)
    data_rows(pages, layout)[page, entry] = data.index_select(0, kept)
    if scales is not None:
        scale_rows(pages, layout)[page, entry] = scales.index_select(0, kept)


def gather_rows(pages: Tensor, slots: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor | None]:
    """The rows at ``slots``: (data uint8 [..., data_row_bytes], scales uint8 [..., scale_row_bytes] or None).

    A negative slot gives zero bytes, which every format here takes for zeros.

    Args:
        pages: uint8 [pages, stride], at least a page wide
        slots: int64 [...]

    Raises:
        IndexError: if a slot lies behind the last page
    """
    if pages.shape[0] == 0:
        # no page: nothing but negative slots can be asked for
        if slots.numel() and bool((slots >= 0).any()):
            raise IndexError("a slot was asked for, but there are no pages")
        pages = pages.new_zeros((1, pages.shape[1]))
    absent = (slots < 0).unsqueeze(-1)
    page, entry = split_slots(slots.clamp_min(0), layout)
    data = data_rows(pages, layout)[page, entry].masked_fill_(absent, 0)
    if not layout.scale_row_bytes:
        return data, None
    return data, scale_rows(pages, layout)[page, entry].masked_fill_(absent, 0)
