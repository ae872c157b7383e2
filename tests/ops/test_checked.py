"""What :func:`tetrad.ops.checked` finds. Outside of it a CPU raised an IndexError from the inside, or gave scores of
somebody else's keys, and a GPU said nothing."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.ops.indexer_cases import make_case

from tetrad.geometry import IndexLayout, KVLayout, PagedKV
from tetrad.ops import (
    checked,
    index_topk,
    indexer_logits,
    physical_slots,
    plan_indexer,
    topk_indices,
    write_index_keys,
)
from tetrad.ops.index_keys import read_index_keys
from tetrad.ops.kv_entries import copy_kv_entries, read_kv_entries, write_kv_entries

NAMES = ("q", "q_scale", "weights", "cache", "block_tables", "row_request", "visible_end")
INT32 = torch.int32


def score(call=indexer_logits, **changes):
    """Two requests: rows that see 70 and 71 entries, and one that sees 9; a row of padding. Three pages are read."""
    case = make_case("fp4", 4, 64, [[70, 71], [9]], padding=1)
    arguments = dict(zip(NAMES, case.arguments, strict=True)) | {"width": case.width}
    if call is index_topk:
        arguments["k"] = 3
    for name, change in changes.items():
        arguments[name] = change(arguments[name].clone()) if callable(change) else change
    return call(**arguments)


def put(place, value):
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


WRONG = [
    ({"width": 70}, r"visible_end\[1\] is 71, but must not exceed width, which is 70"),
    ({"visible_end": put(2, -3)}, r"visible_end\[2\] is -3, but must be at least 0"),
    (
        {"visible_end": put(2, 65), "block_tables": lambda t: t[:, :1]},
        r"visible_end\[0\] is 70, but must not exceed 64",
    ),
    ({"visible_end": put(3, 1)}, r"visible_end\[3\] is 1, but must be 0, since the row's request is -1"),
    ({"row_request": put(2, 2)}, r"row_request\[2\] is 2, but must be below 2, the rows of block_tables"),
    ({"row_request": put(2, -2), "visible_end": put(2, 0)}, r"row_request\[2\] is -2, but must be a row of"),
    ({"row_request": put(1, 1)}, None),
    ({"row_request": put(2, 0), "visible_end": put(1, 0)}, None),
    ({"row_request": lambda r: r[[0, 2, 1, 3]]}, r"row_request\[2\] is 0, but rows of one request must be adjacent"),
    ({"block_tables": put((0, 1), 6)}, r"block_tables\[0, 1\] is 6, but the cache has 6 pages, and row 0 sees 70"),
    ({"block_tables": put((1, 0), -1)}, r"block_tables\[1, 0\] is -1, but the cache has 6 pages, and row 2 sees 9"),
    ({"block_tables": put((0, 2), 99)}, None),
]


@pytest.mark.parametrize("call", [indexer_logits, index_topk])
@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(row[1])[:30] for row in WRONG])
def test_values(call, changes, message):
    """What is read must be there; what is not read, behind the visible end, may be anything (no message)."""
    if message is None:
        if "row_request" in changes and "visible_end" not in changes:
            changes = changes | {"block_tables": put((1, slice(2)), torch.tensor([0, 1]))}
        with checked():
            score(call, **changes)
        return
    with pytest.raises(ValueError, match=message), checked():
        score(call, **changes)


def test_the_results_are_the_same():
    width = 71
    expected = score(index_topk)
    with checked():
        assert torch.equal(score(index_topk), expected)
        case = make_case("fp4", 4, 64, [[70, 71], [9]], padding=1)
        plan = plan_indexer(*case.arguments[-2:], width=width)
        assert torch.equal(score(index_topk, plan=plan), expected)
        assert (score(index_topk, width=0, visible_end=put(slice(None), 0)) == -1).all()


def test_a_cpu_says_which_row_it_was():
    """Also outside: it raised ``index 6 is out of bounds for dimension 0 with size 6`` from the inside."""
    with pytest.raises(ValueError, match=r"block_tables\[0, 1\] is 6, but the cache has 6 pages"):
        score(block_tables=put((0, 1), 6))


def test_a_plan_of_an_earlier_step():
    """It leaves entries out, or reads what is not there, and looks like any other plan."""
    ends, request = torch.tensor([70, 71, 9, 0], dtype=INT32), torch.tensor([0, 0, 1, -1], dtype=INT32)
    plan = plan_indexer(request, torch.tensor([3, 3, 3, 0], dtype=INT32), width=71)
    score(plan=plan)
    message = r"the plan is not of these rows: slot 0 .*\[0, 0, 1, 70\]; call plan_indexer"
    with pytest.raises(ValueError, match=message), checked():
        score(plan=plan)
    plan_indexer(request, ends, width=71, out=plan)
    with checked():
        score(plan=plan)


def test_the_other_ops():
    request, end = torch.tensor([0], dtype=INT32), torch.tensor([6], dtype=INT32)
    with pytest.raises(ValueError, match=r"visible_end\[0\] is 6, but must not exceed width, which is 5"), checked():
        plan_indexer(request, end, width=5)
    with pytest.raises(ValueError, match=r"visible_end\[0\] is 6, but must not exceed width, which is 5"), checked():
        topk_indices(torch.zeros(1, 5), end, 2)


def index_cache():
    """(write, read) of a cache of 128 slots."""
    layout = IndexLayout("fp4", 32)
    pages = torch.zeros((2, layout.page_bytes), dtype=torch.uint8)
    return lambda keys, slots: write_index_keys(keys, pages, slots, layout), lambda s: read_index_keys(pages, s, layout)


def kv_cache():
    layout = KVLayout("fp8", 64, 24, 8)
    cache = PagedKV(torch.zeros((2, layout.page_bytes), dtype=torch.uint8), layout)
    return (
        lambda keys, slots: write_kv_entries(keys, cache, slots),
        lambda slots: read_kv_entries(cache, slots, torch.float32),
    )


@pytest.mark.parametrize("cache", [index_cache, kv_cache])
def test_slots(cache):
    (write, read), keys = cache(), torch.zeros(3, 32)
    with checked():
        write(keys, torch.tensor([127, -1, -1]))
        read(torch.tensor([[5, 5, -1]]))
        with pytest.raises(IndexError, match=r"slots\[1\] is 128, but the pages have slots 0 to 127"):
            write(keys, torch.tensor([0, 128, -1]))
        with pytest.raises(IndexError, match=r"slots\[2\] is 999, but the pages have slots 0 to 127"):
            read(torch.tensor([[0, 1, 999]]))
        with pytest.raises(ValueError, match="slots names slot 7 more than once"):
            write(keys, torch.tensor([7, 3, 7]))


def test_slots_of_copies():
    """A source may be copied twice; two entries must not arrive at one slot."""
    layout = KVLayout("fp8", 64, 24, 8)
    cache = PagedKV(torch.zeros((2, layout.page_bytes), dtype=torch.uint8), layout)
    with checked():
        copy_kv_entries(cache, torch.tensor([5, 5, -1]), torch.tensor([127, 6, -1]))
        with pytest.raises(IndexError, match=r"sources\[1\] is 128, but the pages have slots 0 to 127"):
            copy_kv_entries(cache, torch.tensor([0, 128]), torch.tensor([1, 2]))
        with pytest.raises(ValueError, match="targets names slot 7 more than once"):
            copy_kv_entries(cache, torch.tensor([0, 1]), torch.tensor([7, 7]))


@pytest.mark.parametrize(
    ("entries", "request_of_row", "table", "message"),
    [
        ([[0, 128]], [0], [[4, 3]], r"entries\[0, 1\] is 128, but must be below 128: block_tables has 2 blocks of 64"),
        ([[0, -1]], [1], [[4, 3]], r"row_request\[0\] is 1, but must be below 1"),
        ([[-1, 70]], [0], [[4, -1]], r"block_tables\[0, 1\] is -1, which is no page, but row 0 chose an entry of it"),
    ],
)
def test_entries(entries, request_of_row, table, message):
    given = (torch.tensor(x, dtype=INT32) for x in (entries, table, request_of_row))
    with pytest.raises(ValueError, match=message), checked():
        physical_slots(*given)


def test_only_inside_and_only_here():
    """A server beside someone who looks for a mistake must not wait for its device."""
    wrong = {"logits": torch.zeros(1, 5), "visible_end": torch.tensor([6], dtype=INT32), "k": 2}
    got = []
    with checked():
        thread = threading.Thread(target=lambda: got.append(topk_indices(**wrong).shape))
        thread.start()
        thread.join()
    topk_indices(**wrong)
    assert got == [(1, 2)]


def test_a_capture_is_refused(monkeypatch):
    """It would wait for the device, which spoils a capture with an error that names neither."""
    from tetrad.ops.checked import looks_at_values

    class OnDevice:
        is_meta, is_cuda = False, True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not looks_at_values(OnDevice())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph; run the step once"), checked():
        looks_at_values(OnDevice())  # type: ignore[arg-type]
