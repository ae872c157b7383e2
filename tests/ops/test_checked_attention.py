"""What attention and the ops around it refuse: wrong arguments by name, and wrong values inside of ``checked()``."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from tetrad.geometry import KVLayout, PagedKV
from tetrad.ops import backends, checked, forced_backends
from tetrad.ops.backends import Backend
from tetrad.ops.compress import compress, update_state
from tetrad.ops.kv_entries import copy_kv_entries, write_pooled_kv_entries
from tetrad.ops.rotary import apply_rotary
from tetrad.ops.sparse_attention import History, sparse_attention

LAYOUT = KVLayout("fp32", 64, 8, 8)
CACHE = PagedKV(torch.zeros(3, LAYOUT.page_bytes, dtype=torch.uint8), LAYOUT)
OTHER = PagedKV(torch.zeros(3, 2 * LAYOUT.page_bytes, dtype=torch.uint8), KVLayout("fp32", 64, 8, 16))
SLOTS = torch.tensor([[0, 1], [2, -1], [-1, -1]])
END = torch.tensor([5, 65, 0], dtype=torch.int32)


def history(table=(0, 1), request=(0, 0, -1), end: Any = END, width=128) -> History:
    tables = torch.tensor([table], dtype=torch.int32)
    return History(tables, torch.tensor(request, dtype=torch.int32), end, width)


def attend(**changes):
    given = {
        "q": torch.randn(3, 2, 16),
        "sinks": torch.zeros(2),
        "window": CACHE,
        "window_slots": SLOTS,
        "compressed": CACHE,
        "compressed_slots": history(),
        "scale": 0.25,
    }
    return sparse_attention(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": [1]}, TypeError, "q must be a tensor"),
        ({"q": torch.zeros(2, 16)}, ValueError, "q must be"),
        ({"q": torch.zeros(3, 2, 16).half()}, TypeError, "q must be"),
        ({"q": torch.zeros(3, 2, 8)}, ValueError, "q has 8 channels"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must be"),
        ({"window": CACHE.pages}, TypeError, "PagedKV"),
        ({"window_slots": SLOTS.int()}, TypeError, "window_slots must be"),
        ({"window_slots": SLOTS[:2]}, ValueError, "window_slots must be"),
        ({"compressed": None}, ValueError, "go together"),
        ({"compressed_slots": None}, ValueError, "go together"),
        ({"compressed": OTHER}, ValueError, "have 24"),
        ({"compressed_slots": [0]}, TypeError, "compressed_slots must be"),
        ({"compressed_slots": history(end=END.long())}, TypeError, "end must be"),
        ({"compressed_slots": history(end=[1, 2, 3])}, TypeError, "end must be"),
        ({"scale": "a"}, TypeError, "scale must be"),
    ],
)
def test_wrong_arguments(changes, error, text):
    """Each of them was an error from the inside of torch, or was taken: nothing was checked."""
    with pytest.raises(error, match=text):
        attend(**changes)


@pytest.mark.parametrize(
    ("compressed_slots", "text"),
    [
        (history(width=64), "must not exceed width"),
        (history(request=(4, 4, -1)), "must be below 1"),
        (history(table=(0, 7)), "the cache has 3 pages"),
        (history(table=(0,)), "must not exceed 64"),
    ],
)
def test_checked_looks_at_a_history(compressed_slots, text):
    """A visible end beyond the width was taken, and the others were errors about an index that nobody had given."""
    with checked(), pytest.raises(ValueError, match=text):
        attend(compressed_slots=compressed_slots)


def test_checked_looks_at_state_slots():
    """The ring's slots were not looked at: two rows in one slot left either of them."""
    step, state = torch.zeros(2, 2, 4), torch.zeros(1, 3, 2, 4)
    with checked(), pytest.raises(ValueError, match="slot 1 more than once"):
        update_state(step, state, torch.tensor([1, 1]))
    with checked(), pytest.raises(IndexError, match=r"slots\[1\] is 3"):
        update_state(step, state, torch.tensor([1, 3]))


@pytest.mark.parametrize("sizes", [(2, 3), (9, 9)])
def test_angles_are_checked_without_entries(sizes):
    """Wrong angles were noticed only where a row completed an entry."""
    cos, sin = (torch.zeros(1, size) for size in sizes)
    with pytest.raises(ValueError, match="cos and sin"):
        write_pooled_kv_entries(
            torch.zeros(1, 16), torch.ones(16), 1e-6, cos, sin, torch.float32, CACHE, torch.tensor([-1])
        )


def test_checked_looks_for_copies_to_nowhere():
    """Such a copy overwrote the last entry of the last page, and checked() said nothing."""
    with checked(), pytest.raises(ValueError, match=r"targets\[1\] is -1"):
        copy_kv_entries(CACHE, torch.tensor([-1, 0]), torch.tensor([-1, -1]))


def test_angles_on_another_device():
    """They were an error from the inside of torch."""
    with pytest.raises(ValueError, match=r"cos must be .*on cpu"):
        apply_rotary(torch.zeros(3, 8), *torch.zeros(2, 3, 2, device="meta"))


@pytest.mark.parametrize(
    ("request_ids", "position", "first", "text"),
    [
        ((7, 7, 7, -1), (4, 5, 6, 0), 4, r"row_request\[0\] is 7"),
        ((1, 1, 1, -1), (4, 5, 6, 0), 5, r"first\[0\] is 5"),
        ((1, 1, 1, -1), (4, 6, 7, 0), 4, r"position\[1\] is 6"),
        ((1, 0, 1, -1), (4, 4, 5, 0), 4, r"position\[2\] is 5"),
    ],
)
def test_checked_looks_at_the_rows_of_a_step(request_ids, position, first, text):
    """A request that is not there was an index out of bounds, and rows that are not adjacent pooled other rows."""
    step, state = torch.zeros(4, 2, 8), torch.zeros(2, 16, 2, 8)
    row_request = torch.tensor(request_ids, dtype=torch.int32)
    rows = (row_request, torch.tensor(position), torch.full((4,), first))
    with checked(), pytest.raises(ValueError, match=text):
        compress(step, state, *rows, ratio=4, overlap=True)


@pytest.mark.parametrize("op", ["compress", "sparse_attention"])
def test_a_forced_back_end_is_asked(op, monkeypatch):
    """Both ops called the reference themselves, so another back end of theirs would never have run."""
    other = types.SimpleNamespace(**{op: lambda *arguments, **options: "other"})
    monkeypatch.setitem(sys.modules, "tetrad.ops.other", other)
    monkeypatch.setitem(backends.BACKENDS, op, (Backend("other", "tetrad.ops.other", lambda *_: (True, "")),))
    with forced_backends({op: "other"}):
        if op == "sparse_attention":
            assert attend() == "other"
        else:
            rows = (torch.zeros(1, dtype=torch.int32), torch.zeros(1).long(), torch.zeros(1).long())
            assert compress(torch.zeros(1, 2, 8), torch.zeros(2, 16, 2, 8), *rows, ratio=4, overlap=True) == "other"
