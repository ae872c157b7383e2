"""Entries of a request to slots of a cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tetrad.ops import physical_slots

INT32 = torch.int32


def tensors(*values: object) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=INT32) for value in values]


@given(st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([1, 2, 7, 64]))
def test_the_formula(seed, requests, page_entries):
    """Entry by entry in plain Python; -1 and padding stay -1, whatever the table holds there."""
    generator = torch.Generator().manual_seed(seed)
    blocks, rows, k = 3, 6, 5
    table = torch.randint(0, 1000, (requests, blocks), generator=generator, dtype=INT32)
    request = torch.randint(-1, requests, (rows,), generator=generator, dtype=INT32)
    entries = torch.randint(-1, blocks * page_entries, (rows, k), generator=generator, dtype=INT32)
    got = physical_slots(entries, table, request, page_entries=page_entries)
    assert (got.dtype, got.shape) == (INT32, (rows, k))
    for row in range(rows):
        for place in range(k):
            entry, of = int(entries[row, place]), int(request[row])
            block, rest = divmod(entry, page_entries)
            wanted = -1 if entry < 0 or of < 0 else int(table[of, block]) * page_entries + rest
            assert int(got[row, place]) == wanted


def test_into_memory_of_the_caller():
    """A captured step writes to a fixed address, which may be that of the entries; columns may have gaps between."""
    entries, table, request = tensors([[0, 65, -1], [3, -1, 64]], [[4, 3]], [0, 0])
    wanted = [[256, 193, -1], [259, -1, 192]]
    memory = torch.full((2, 5), 77, dtype=INT32)
    assert physical_slots(entries, table, request, out=memory[:, :3]).data_ptr() == memory.data_ptr()
    assert memory.tolist() == [[*row, 77, 77] for row in wanted]
    assert physical_slots(entries, table, request, out=entries) is entries
    assert entries.tolist() == wanted


def test_nothing_to_look_up():
    none, table, request = tensors([[-1, -1]], [[4, 3]], [-1])
    assert physical_slots(none, table[:, :0], request).tolist() == [[-1, -1]]
    assert physical_slots(none, table[:0], request).tolist() == [[-1, -1]]
    assert physical_slots(none[:0], table, request[:0]).shape == (0, 2)
    assert physical_slots(none[:, :0], table, request).shape == (1, 0)


def test_tables_hold_nonsense_behind_the_end():
    entries, table, request = tensors([[1, -1]], [[4, -7, 2**31 - 1]], [0])
    assert physical_slots(entries, table, request).tolist() == [[257, -1]]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"entries": torch.zeros((2, 3), dtype=torch.int64)}, TypeError, "entries must be int32.*; got torch.int64"),
        ({"entries": torch.zeros(2, dtype=INT32)}, ValueError, r"entries must be .*; got the shape \[2\]"),
        ({"row_request": torch.zeros(3, dtype=INT32)}, ValueError, r"row_request must be .* = \[2\]"),
        ({"block_tables": torch.zeros((1, 2))}, TypeError, "block_tables must be int32"),
        ({"page_entries": 0}, ValueError, "page_entries must be at least 1"),
        ({"out": torch.zeros((2, 3))}, TypeError, "out must be int32"),
        ({"out": torch.zeros((1, 3), dtype=INT32).expand(2, 3)}, ValueError, "overlap"),
    ],
)
def test_bad_arguments(changes, error, message):
    zeros = torch.zeros((2, 3), dtype=INT32)
    right = {"entries": zeros, "block_tables": zeros, "row_request": torch.zeros(2, dtype=INT32)}
    with pytest.raises(error, match=message):
        physical_slots(**(right | changes))
