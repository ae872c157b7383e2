"""Whether a function's result for one row depends, in any bit, on which rows it is computed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROWS = 37
# first row and count: alone at either end, around multiples of 8, and nearly all
SPLITS = ((0, 1), (ROWS - 1, 1), (3, 2), (5, 7), (0, 8), (11, 9), (20, 17), (1, 33))
# a matrix library gives its threads parts of a product, whose edges other kernels may compute. Not 2: on two busy cores
# two threads wait for each other by spinning, which takes a hundred times as long
THREADS = (1, 3)


def assert_row_invariant(function: Callable[..., Tensor | Sequence[Tensor]], *rows: Any) -> None:
    """``function`` of some rows gives the same bits as those rows of ``function`` of all ``ROWS`` rows.

    ``rows``: its arguments, tensors [ROWS, ...]. It gives a tensor or several, [ROWS, ...].
    """
    before = torch.get_num_threads()
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            expected = _several(function(*rows))
            for start, count in SPLITS:
                part = slice(start, start + count)
                # clones: a view would have the alignment of its place
                for got, whole in zip(_several(function(*(row[part].clone() for row in rows))), expected, strict=True):
                    assert torch.equal(got, whole[part]), f"{count} rows from {start} on, {threads} threads"
    finally:
        torch.set_num_threads(before)


def _several(result: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (result,) if isinstance(result, Tensor) else result
