"""Sparse attention against a dense softmax with sinks, in fp64 and one row and head at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from tests.row_splits import ROWS, assert_row_invariant
from torch import Tensor

from tetrad.geometry import KVDtype, KVLayout, page_stride
from tetrad.ops.kv_entries import read_kv_entries, write_kv_entries
from tetrad.ops.sparse_attention import KeySegment, sparse_attention

reference = import_module("tetrad.ops.sparse_attention.reference")

NOPE, ROPE = 40, 8
DIM = NOPE + ROPE
SCALE = DIM**-0.5


@dataclass
class Cache:
    """Requests with some written entries each, on scattered pages; everything else reads as NaN."""

    layout: KVLayout
    pages: Tensor
    tables: Tensor
    written: list[int]

    def key(self, request: int, entry: int, dtype: torch.dtype) -> Tensor:
        """The entry as stored, fp64 [d]; it must have been written."""
        assert 0 <= entry < self.written[request]
        block, place = divmod(entry, self.layout.entries)
        slot = torch.tensor([int(self.tables[request, block]) * self.layout.entries + place])
        return read_kv_entries(self.pages, slot, self.layout, dtype)[0].double()


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
        write_kv_entries(torch.randn(count, DIM, generator=generator) * 2, pages, slots, layout)
    return Cache(layout, pages, tables, written)


def ranges(cache: Cache, width: int, block: int, start: list[int], end: list[int]) -> KeySegment:
    bounds = (torch.tensor(values, dtype=torch.int32) for values in (start, end))
    return KeySegment(cache.pages, cache.layout, cache.tables, width, block, *bounds)


def chosen(cache: Cache, width: int, block: int, entries: list[list[int]]) -> KeySegment:
    padded = [row + [-1] * (width - len(row)) for row in entries]
    table = torch.tensor(padded, dtype=torch.int32).view(len(entries), width)
    return KeySegment(cache.pages, cache.layout, cache.tables, width, block, entries=table)


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
    """The union of both segments, nothing removed: an entry that is chosen twice counts twice.

    Rows of three requests see different counts; -1 may stand anywhere.
    """
    request = [0, 0, 0, 2, 1, 1]
    window, compressed = make_cache(kv_dtype, 16, [21, 3, 40]), make_cache(kv_dtype, 4, [9, 1, 7], seed=1)
    start, end = [0, 5, 13, 33, 0, 2], [1, 13, 21, 40, 1, 3]
    picks = [[], [0, 8], [8, 1, 1, 5], [-1, 6, -1, 2, 0], [0], [-1]]
    q, sinks = queries(6, heads, dtype)
    got = sparse_attention(
        q,
        sinks,
        [ranges(window, 8, 8, start, end), chosen(compressed, 5, 8, picks)],
        torch.tensor(request, dtype=torch.int32),
        scale=SCALE,
    )
    seen = keys_of(window, request, [list(range(a, b)) for a, b in zip(start, end, strict=True)], dtype)
    for row, more in zip(
        seen, keys_of(compressed, request, [[e for e in p if e >= 0] for p in picks], dtype), strict=True
    ):
        row += more
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 0.501 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected(q, sinks, seen), rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("entries", [2, 64, 256])
def test_block_edges(width, entries):
    """Keys are summed 64 at a time: around a block's edge none is lost or counted twice, in shorter rows as well."""
    cache = make_cache("fp32", entries, [width, width + 70])
    end = [width, 1, max(1, width - 1), (width + 1) // 2, min(64, width)]
    request = [0, 0, 1, 1, 0]
    start = [0, 0, 0, 0, 0]
    q, sinks = queries(5, 2)
    rows = torch.tensor(request, dtype=torch.int32)
    got = sparse_attention(q, sinks, [ranges(cache, width, 64, start, end)], rows, scale=SCALE)
    want = expected(q, sinks, keys_of(cache, request, [list(range(count)) for count in end]))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    picks = [list(range(count))[::-1] for count in end]
    got = sparse_attention(q, sinks, [chosen(cache, width, 64, picks)], rows, scale=SCALE)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_no_compressed_entry_yet():
    """In the first tokens of every request the compressed segment has width 0, and no page of it was ever written."""
    window, empty = make_cache("fp32", 16, [3]), make_cache("fp32", 4, [1])
    q, sinks = queries(3, 2)
    request = torch.zeros(3, dtype=torch.int32)
    alone = [ranges(window, 8, 8, [0, 0, 0], [1, 2, 3])]
    expected_bits = sparse_attention(q, sinks, alone, request, scale=SCALE)
    for nothing in (
        ranges(empty, 0, 64, [0] * 3, [0] * 3),
        chosen(empty, 0, 8, [[]] * 3),
        # other rows of the step may see some: a block of nothing changes no bit
        ranges(empty, 70, 64, [0] * 3, [0] * 3),
        chosen(empty, 9, 8, [[]] * 3),
    ):
        got = sparse_attention(q, sinks, [*alone, nothing], request, scale=SCALE)
        assert torch.equal(got, expected_bits)
        got = sparse_attention(q, sinks, [nothing, *alone], request, scale=SCALE)
        assert torch.equal(got, expected_bits)


def test_sinks():
    """A sink takes its share and gives nothing: alone at any size it neither overflows nor divides by zero."""
    cache = make_cache("fp32", 4, [3])
    q, _ = queries(1, 4)
    sinks = torch.tensor([-1e4, 0.0, 60.0, 1e4])
    segment = ranges(cache, 3, 8, [0], [3])
    got = sparse_attention(q, sinks, [segment], torch.zeros(1, dtype=torch.int32), scale=SCALE)
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
    end = [150, 90, 64, 7]
    rows = torch.zeros(4, dtype=torch.int32)
    got = sparse_attention(size * q, sinks, [ranges(cache, 150, 64, [0] * 4, end)], rows, scale=SCALE)
    want = expected(size * q, sinks, keys_of(cache, request, [list(range(count)) for count in end]))
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


def test_no_rows():
    """A step without rows."""
    cache = make_cache("fp32", 4, [1])
    q, sinks = queries(0, 2)
    none = torch.empty(0, dtype=torch.int32)
    assert sparse_attention(q, sinks, [ranges(cache, 3, 8, [], [])], none, scale=SCALE).shape == (0, 2, DIM)


def split_case(heads: int, block: int, dtype: torch.dtype):
    """37 rows over both kinds of segment, as a function of the rows' tensors, and those tensors."""
    generator = torch.Generator().manual_seed(3)
    window, compressed = make_cache("fp8", 256, [90, 70]), make_cache("fp8", 64, [150, 140], seed=1)
    q, sinks = queries(ROWS, heads, dtype)
    request = torch.tensor([0] * 20 + [1] * (ROWS - 20), dtype=torch.int32)
    end = torch.randint(1, 70, (ROWS,), generator=generator, dtype=torch.int32)
    start = (end - 24).clamp_min(0)
    entries = torch.rand(ROWS, 140, generator=generator).argsort(1)[:, :83].int()
    entries[torch.arange(83) >= torch.randint(0, 84, (ROWS, 1), generator=generator)] = -1

    def attend(q: Tensor, request: Tensor, start: Tensor, end: Tensor, entries: Tensor) -> Tensor:
        segments = [
            KeySegment(window.pages, window.layout, window.tables, 24, 24, start=start, end=end),
            KeySegment(compressed.pages, compressed.layout, compressed.tables, 83, block, entries=entries),
        ]
        return sparse_attention(q, sinks, segments, request, scale=SCALE)

    return attend, (q, request, start, end, entries)


@pytest.mark.parametrize("heads", [4, 7, 16])
@pytest.mark.parametrize(("block", "dtype"), [(64, torch.float32), (16, torch.float32), (64, torch.bfloat16)], ids=str)
def test_rows_do_not_depend_on_each_other(heads, block, dtype):
    """A row alone was once one matrix product for all threads, which rounds the heads at a thread's edge otherwise."""
    attend, rows = split_case(heads, block, dtype)
    assert_row_invariant(attend, *rows)


def test_memory_bound_changes_no_bit(monkeypatch):
    """Long prefills are computed in chunks of rows."""
    attend, rows = split_case(3, 64, torch.float32)
    whole = attend(*rows)
    monkeypatch.setattr(reference, "_CHUNK_BYTES", 1)
    assert torch.equal(attend(*rows), whole)
