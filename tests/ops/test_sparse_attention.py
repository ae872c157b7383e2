"""Sparse attention against a dense softmax with sinks, in fp64 and one row and head at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from tests.row_splits import ROWS, assert_row_invariant
from torch import Tensor

from tetrad.geometry import KVDtype, KVLayout, PagedKV, page_stride
from tetrad.ops.kv_entries import read_kv_entries, write_kv_entries
from tetrad.ops.sparse_attention import History, sparse_attention

reference = import_module("tetrad.ops.sparse_attention.reference")

NOPE, ROPE = 40, 8
DIM = NOPE + ROPE
SCALE = DIM**-0.5


@dataclass
class Cache:
    """Requests with some written entries each, on scattered pages; everything else reads as NaN."""

    paged: PagedKV
    tables: Tensor
    written: list[int]

    def slot(self, request: int, entry: int) -> int:
        """Where an entry lies; it must have been written."""
        assert 0 <= entry < self.written[request]
        block, place = divmod(entry, self.paged.layout.entries)
        return int(self.tables[request, block]) * self.paged.layout.entries + place

    def key(self, request: int, entry: int, dtype: torch.dtype) -> Tensor:
        """The entry as stored, fp64 [d]."""
        return read_kv_entries(self.paged, torch.tensor([self.slot(request, entry)]), dtype)[0].double()

    def slots(self, request: list[int], entries: list[list[int]], width: int) -> Tensor:
        """int64 [R, width], -1 behind the entries of a row."""
        rows = [[self.slot(r, entry) for entry in row] for r, row in zip(request, entries, strict=True)]
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows]).view(len(rows), width)

    def history(self, request: list[int], end: list[int], width: int) -> History:
        """The first ``end`` entries of every row."""
        rows, ends = (torch.tensor(values, dtype=torch.int32) for values in (request, end))
        return History(self.tables, rows, ends, width)


def make_cache(dtype: str, entries: int, written: list[int], seed: int = 0, rope_dtype=torch.float32) -> Cache:
    layout = KVLayout(KVDtype(dtype), entries, NOPE, ROPE, rope_dtype)
    blocks = [-(-count // entries) for count in written]
    generator = torch.Generator().manual_seed(seed)
    pages = torch.full((sum(blocks) + 3, page_stride(layout)), 0xFF, dtype=torch.uint8)
    free = torch.randperm(len(pages), generator=generator).tolist()
    # behind a request's blocks the table is stale: what stands there was never a page
    tables = torch.full((len(written), max(blocks) + 2), 1 << 20, dtype=torch.int32)
    for request, count in enumerate(written):
        for block in range(blocks[request]):
            tables[request, block] = free.pop()
        place = torch.arange(count)
        slots = tables[request, place // entries].long() * entries + place % entries
        write_kv_entries(torch.randn(count, DIM, generator=generator) * 2, PagedKV(pages, layout), slots)
    return Cache(PagedKV(pages, layout), tables, written)


def expected(q: Tensor, sinks: Tensor, seen: list[list[Tensor]]) -> Tensor:
    """The formula. ``seen``: the keys of every row, fp64."""
    result = torch.zeros(q.shape).double()
    for row, keys in enumerate(seen):
        for head in range(q.shape[1]):
            scores = [SCALE * float(q[row, head].double() @ key) for key in keys]
            largest = max([*scores, float(sinks[head])])
            weights = [math.exp(score - largest) for score in scores]
            total = sum(weights) + math.exp(float(sinks[head]) - largest)
            for weight, key in zip(weights, keys, strict=True):
                result[row, head] += weight / total * key
    return result


def queries(rows: int, heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(q, sinks)."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(rows, heads, DIM, generator=generator).to(dtype), torch.randn(heads, generator=generator)


def keys_of(cache: Cache, request: list[int], seen: list[list[int]], dtype=torch.float32) -> list[list[Tensor]]:
    return [[cache.key(r, entry, dtype) for entry in row] for r, row in zip(request, seen, strict=True)]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    ("kv_dtype", "dtype"), [("fp32", torch.float32), ("fp8", torch.float32), ("bf16", torch.bfloat16)]
)
def test_window_and_chosen(kv_dtype, dtype, heads):
    """The union of both, nothing removed: an entry that is chosen twice counts twice.

    Rows of three requests see different counts, in any order.
    """
    request = [0, 0, 0, 2, 1, 1]
    window, compressed = make_cache(kv_dtype, 16, [21, 3, 40]), make_cache(kv_dtype, 4, [9, 1, 7], seed=1)
    seen = [list(range(a, b)) for a, b in zip([0, 5, 13, 33, 0, 2], [1, 13, 21, 40, 1, 3], strict=True)]
    picks = [[], [0, 8], [8, 1, 1, 5], [6, 2, 0], [0], []]
    q, sinks = queries(6, heads, dtype)
    slots = window.slots(request, seen, 8), compressed.slots(request, picks, 5)
    got = sparse_attention(q, sinks, window.paged, slots[0], compressed.paged, slots[1], scale=SCALE)
    keys = keys_of(window, request, seen, dtype)
    for row, more in zip(keys, keys_of(compressed, request, picks, dtype), strict=True):
        row += more
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 0.501 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected(q, sinks, keys), rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("entries", [2, 64, 256])
def test_block_edges(width, entries):
    """Keys are summed 64 at a time: around a block's edge none is lost or counted twice, in shorter rows as well.

    A history is the same as its slots, one by one: to the bit where both are summed in blocks of 64.
    """
    cache, none = make_cache("fp32", entries, [width, width + 70]), make_cache("fp32", 4, [1])
    end = [width, 1, max(1, width - 1), (width + 1) // 2, min(64, width)]
    request = [0, 0, 1, 1, 0]
    q, sinks = queries(5, 2)
    empty = torch.full((5, 8), -1)
    all_of_them = [list(range(count)) for count in end]
    want = expected(q, sinks, keys_of(cache, request, all_of_them))
    history = cache.history(request, end, width)
    got = sparse_attention(q, sinks, none.paged, empty, cache.paged, history, scale=SCALE)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    slots = cache.slots(request, all_of_them, width)
    for by_slot in (
        sparse_attention(q, sinks, none.paged, empty, cache.paged, slots, scale=SCALE),
        sparse_attention(q, sinks, cache.paged, slots, scale=SCALE),
    ):
        torch.testing.assert_close(by_slot.double(), want, rtol=1e-5, atol=1e-5)
        assert width < 64 or torch.equal(by_slot, got)
    backwards = cache.slots(request, [row[::-1] for row in all_of_them], width)
    got = sparse_attention(q, sinks, cache.paged, backwards, scale=SCALE)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_no_compressed_entry_yet():
    """In the first tokens of every request there is no compressed entry, and no page of them was ever written."""
    window, empty = make_cache("fp32", 16, [3]), make_cache("fp32", 4, [1])
    q, sinks = queries(3, 2)
    slots = window.slots([0] * 3, [[0], [0, 1], [0, 1, 2]], 8)
    alone = sparse_attention(q, sinks, window.paged, slots, scale=SCALE)
    for nothing in (
        empty.history([0] * 3, [0] * 3, 0),
        torch.empty((3, 0), dtype=torch.int64),
        # other rows of the step may see some: a block of nothing changes no bit
        empty.history([0] * 3, [0] * 3, 70),
        torch.full((3, 9), -1),
    ):
        got = sparse_attention(q, sinks, window.paged, slots, empty.paged, nothing, scale=SCALE)
        assert torch.equal(got, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_reads_nothing(dtype):
    """Rows of request -1 give zeros, although their query is NaN, and the rows beside them keep every bit."""
    window, compressed = make_cache("fp8", 16, [21, 13]), make_cache("fp8", 4, [9, 70], seed=1)
    request, end, padding = [0, 1, 1], [9, 70, 2], 5
    seen = window.slots(request, [list(range(13)), list(range(2, 13)), [4]], 13)
    q, sinks = queries(3, 2, dtype)
    padded_q = torch.cat((q, torch.full((padding, *q.shape[1:]), float("nan"), dtype=dtype)))
    padded_seen = torch.cat((seen, torch.full((padding, 13), -1)))
    picks = compressed.slots(request, [list(range(count)) for count in end], 70)
    for plain, padded in (
        (compressed.history(request, end, 70), compressed.history(request + [-1] * padding, end + [0] * padding, 70)),
        (picks, torch.cat((picks, torch.full((padding, 70), -1)))),
    ):
        want = sparse_attention(q, sinks, window.paged, seen, compressed.paged, plain, scale=SCALE)
        got = sparse_attention(padded_q, sinks, window.paged, padded_seen, compressed.paged, padded, scale=SCALE)
        assert torch.equal(got[:3], want)
        assert not got[3:].any()


def test_sinks():
    """A sink takes its share and gives nothing: alone at any size it neither overflows nor divides by zero."""
    cache = make_cache("fp32", 4, [3])
    q, _ = queries(1, 4)
    sinks = torch.tensor([-1e4, 0.0, 60.0, 1e4])
    got = sparse_attention(q, sinks, cache.paged, cache.slots([0], [[0, 1, 2]], 3), scale=SCALE)
    keys = keys_of(cache, [0], [[0, 1, 2]])
    torch.testing.assert_close(got.double(), expected(q, sinks, keys), rtol=1e-5, atol=1e-6)
    assert not got[0, 3].any()
    plain = torch.softmax(torch.stack([SCALE * (q[0, 0].double() @ key) for key in keys[0]]), 0)
    torch.testing.assert_close(got[0, 0].double(), plain @ torch.stack(keys[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [300.0, 1e4])
def test_large_scores(size):
    """Scores beyond the range of exp, rising and falling from block to block."""
    cache = make_cache("fp32", 64, [150])
    q, sinks = queries(4, 2)
    request = [0] * 4
    seen = [list(range(count)) for count in (150, 90, 64, 7)]
    got = sparse_attention(size * q, sinks, cache.paged, cache.slots(request, seen, 150), scale=SCALE)
    want = expected(size * q, sinks, keys_of(cache, request, seen))
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


def test_no_rows():
    """A step without rows."""
    cache = make_cache("fp32", 4, [1])
    q, sinks = queries(0, 2)
    none = torch.empty((0, 3), dtype=torch.int64)
    assert sparse_attention(q, sinks, cache.paged, none, scale=SCALE).shape == (0, 2, DIM)
    for nothing in (none, cache.history([], [], 3)):
        got = sparse_attention(q, sinks, cache.paged, none, cache.paged, nothing, scale=SCALE)
        assert got.shape == (0, 2, DIM)


def test_rows_of_padding_alone():
    """A step, or a warm-up, in which no row sees anything; a window of no slots as well."""
    cache = make_cache("fp32", 4, [1])
    q, sinks = queries(2, 2)
    none = torch.full((2, 3), -1)
    for slots in (none, none[:, :0]):
        for nothing in (none, cache.history([-1, -1], [0, 0], 3)):
            got = sparse_attention(q * float("nan"), sinks, cache.paged, slots, cache.paged, nothing, scale=SCALE)
            assert torch.equal(got, torch.zeros(2, 2, DIM))


def split_case(heads: int, width: int, dtype: torch.dtype):
    """37 rows over the window and both kinds of compressed slots, as functions of the rows' tensors, and those."""
    generator = torch.Generator().manual_seed(3)
    window, compressed = make_cache("fp8", 256, [90, 70]), make_cache("fp8", 64, [150, 140], seed=1)
    q, sinks = queries(ROWS, heads, dtype)
    request = [0] * 20 + [1] * (ROWS - 20)
    ends = torch.randint(1, 70, (ROWS,), generator=generator).tolist()
    seen = window.slots(request, [list(range(max(end - 24, 0), end)) for end in ends], 24)
    counts = torch.randint(0, width + 1, (ROWS,), generator=generator).tolist()
    entries = [torch.randperm(140, generator=generator)[:count].tolist() for count in counts]
    picks = compressed.slots(request, entries, width)
    end = torch.randint(0, 141, (ROWS,), generator=generator).int()

    def attend(q: Tensor, seen: Tensor, picks: Tensor, request: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        history = History(compressed.tables, request, end, 141)
        return (
            sparse_attention(q, sinks, window.paged, seen, compressed.paged, picks, scale=SCALE),
            sparse_attention(q, sinks, window.paged, seen, compressed.paged, history, scale=SCALE),
        )

    return attend, (q, seen, picks, torch.tensor(request, dtype=torch.int32), end)


@pytest.mark.parametrize("heads", [4, 7, 16])
@pytest.mark.parametrize(("width", "dtype"), [(83, torch.float32), (13, torch.float32), (83, torch.bfloat16)], ids=str)
def test_rows_do_not_depend_on_each_other(heads, width, dtype):
    """A row alone was once one matrix product for all threads, which rounds the heads at a thread's edge otherwise."""
    attend, rows = split_case(heads, width, dtype)
    assert_row_invariant(attend, *rows)


def test_memory_bound_changes_no_bit(monkeypatch):
    """Long prefills are computed in chunks of rows."""
    attend, rows = split_case(3, 83, torch.float32)
    whole = attend(*rows)
    monkeypatch.setattr(reference, "_CHUNK_BYTES", 1)
    for got, expected_bits in zip(attend(*rows), whole, strict=True):
        assert torch.equal(got, expected_bits)
