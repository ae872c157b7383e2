"""The checks that look at values: what the ops leave to their callers, until :func:`checked` is switched on.

Every check here reads numbers back from the device and so waits for it. Outside of :func:`checked` each is one look at
a flag.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

_on: ContextVar[bool] = ContextVar("values are checked", default=False)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Inside, the ops look at the values of their arguments too, and raise where a kernel would read or write astray::

        with checked():
            step()

    Checked are visible ends against ``width`` and the block table, requests and page ids against the table and the
    cache, whether the rows of a request are adjacent, slots against the pages (and that no two keys share one), chosen
    entries against the table, and whether a plan was made for these rows. The results are the same.

    It holds for this thread (or asynchronous task) alone. Each call waits for the device, so nothing can be captured
    into a CUDA graph inside; run the step once outside of the capture.
    """
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)


def looks_at_values(values: Tensor) -> bool:
    """Whether the values of a tensor are to be checked here and now. The meta device has none.

    Raises:
        RuntimeError: inside of a capture, which could not be waited for
    """
    if not _on.get() or values.is_meta:
        return False
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "checked() reads values back, which cannot be captured into a CUDA graph; run the step once inside of "
            "checked() and capture it outside"
        )
    return True


def check_rows(row_request: Tensor | None, visible_end: Tensor, width: int) -> None:
    """Refuse visible ends beyond ``width`` and, where requests are given, rows of a request that are not adjacent.

    Raises:
        ValueError: naming the row
    """
    if not looks_at_values(visible_end):
        return
    _refuse("visible_end", visible_end, visible_end < 0, "must be at least 0")
    _refuse("visible_end", visible_end, visible_end > width, f"must not exceed width, which is {width}")
    if row_request is None:
        return
    _refuse("row_request", row_request, row_request < -1, "must be a row of block_tables, or -1 for padding")
    padding = (row_request < 0) & (visible_end > 0)
    _refuse("visible_end", visible_end, padding, "must be 0, since the row's request is -1 (padding)")
    seen: set[int] = set()
    last = -1
    for row, request in enumerate(row_request.tolist()):
        if request >= 0 and request != last and request in seen:
            raise ValueError(f"row_request[{row}] is {request}, but rows of one request must be adjacent")
        seen.add(request)
        last = request


def check_tables(block_tables: Tensor, row_request: Tensor, visible_end: Tensor, *, pages: int, entries: int) -> None:
    """Refuse requests that are not in the table, visible ends behind its last block, and page ids that are read but
    are not in the cache.

    Raises:
        ValueError: naming the row
    """
    if not looks_at_values(visible_end):
        return
    requests, blocks = block_tables.shape
    _refuse("row_request", row_request, row_request >= requests, f"must be below {requests}, the rows of block_tables")
    room = blocks * entries
    what = f"must not exceed {room}: block_tables has {blocks} blocks of {entries} entries a request"
    _refuse("visible_end", visible_end, (visible_end > room) & (row_request >= 0), what)
    real = (row_request >= 0) & (visible_end > 0)
    rows = real.nonzero().squeeze(-1)
    if not rows.numel():
        return
    ids = block_tables[row_request[rows].long()]
    read = torch.arange(blocks, dtype=torch.int32, device=ids.device) < (
        (visible_end[rows] + entries - 1) // entries
    ).unsqueeze(1)
    wrong = (read & ((ids < 0) | (ids >= pages))).nonzero()
    if wrong.numel():
        place, block = wrong[0].tolist()
        row = int(rows[place])
        raise ValueError(
            f"block_tables[{int(row_request[row])}, {block}] is {int(ids[place, block])}, but the cache has {pages} "
            f"pages, and row {row} sees {int(visible_end[row])} entries, so it reads this one"
        )


def check_step_rows(row_request: Tensor, position: Tensor, first: Tensor, requests: int) -> None:
    """Refuse requests that are not there, and rows that do not follow one another from ``first`` on.

    Raises:
        ValueError: naming the row
    """
    if not looks_at_values(position):
        return
    _refuse("row_request", row_request, row_request >= requests, f"must be below {requests}, the requests of state")
    real = row_request >= 0
    begin = torch.arange(len(position), dtype=torch.int64, device=position.device) - (position - first)
    _refuse("first", first, real & (first > position), "must not be behind the row's own position")
    strange = (begin < 0) | (row_request[begin.clamp(0, max(len(position) - 1, 0))] != row_request)
    what = "must follow the positions of its request's rows before it, which are adjacent and begin at first"
    _refuse("position", position, real & strange, what)


def check_slots(name: str, slots: Tensor, end: int, *, distinct: bool = False) -> None:
    """Refuse slots behind the pages and, with ``distinct``, two equal ones; negative ones stand for none.

    Raises:
        IndexError: for a slot behind the pages
        ValueError: for a slot that is there twice
    """
    if not looks_at_values(slots):
        return
    flat = slots.flatten()
    beyond = (flat >= end).nonzero()
    if beyond.numel():
        place = int(beyond[0])
        raise IndexError(f"{name}[{place}] is {int(flat[place])}, but the pages have slots 0 to {end - 1}")
    if not distinct:
        return
    given, counts = flat[flat >= 0].unique(return_counts=True)
    twice = (counts > 1).nonzero()
    if twice.numel():
        raise ValueError(f"{name} names slot {int(given[twice[0]])} more than once; two keys must not share a slot")


def check_copies(sources: Tensor, targets: Tensor) -> None:
    """Refuse a copy to nowhere: a target of -1 whose source is a slot.

    Raises:
        ValueError: naming the copy
    """
    if looks_at_values(targets):
        _refuse("targets", targets, (targets < 0) & (sources >= 0), "must be a slot, since its source is one")


def check_entries(entries: Tensor, block_tables: Tensor, row_request: Tensor, page_entries: int) -> None:
    """Refuse entries behind the last block of the table, requests that are not in it, and pages that it has not.

    Raises:
        ValueError: naming the row
    """
    if not looks_at_values(entries):
        return
    requests, blocks = block_tables.shape
    _refuse("row_request", row_request, row_request >= requests, f"must be below {requests}, the rows of block_tables")
    real = (entries >= 0) & (row_request >= 0).unsqueeze(1)
    room = blocks * page_entries
    what = f"must be below {room}: block_tables has {blocks} blocks of {page_entries} entries a request"
    _refuse("entries", entries, real & (entries >= room), what)
    row, place = real.nonzero().unbind(1)
    request, block = row_request[row].long(), entries[row, place].long() // page_entries
    page = block_tables[request, block]
    wrong = (page < 0).nonzero()
    if wrong.numel():
        first = int(wrong[0])
        raise ValueError(
            f"block_tables[{int(request[first])}, {int(block[first])}] is {int(page[first])}, which is no page, but "
            f"row {int(row[first])} chose an entry of it"
        )


def _refuse(name: str, values: Tensor, wrong: Tensor, what: str) -> None:
    places = wrong.nonzero()
    if places.numel():
        place = places[0].tolist()
        raise ValueError(f"{name}[{', '.join(map(str, place))}] is {int(values[tuple(place)])}, but {what}")
