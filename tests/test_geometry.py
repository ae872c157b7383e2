"""Layouts and addresses against numbers worked out by hand, and at their edges."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tetrad.errors import ConfigError
from tetrad.geometry import (
    BLOCK_SIZE,
    CSA_ENTRIES,
    CSA_RATIO,
    DRAFT_ROWS,
    PAGE_ALIGNMENT,
    IndexDtype,
    IndexLayout,
    KVDtype,
    KVLayout,
    blocks_for,
    ceil_div,
    check_block_size,
    compressor_ring,
    data_rows,
    element_dtype,
    entry_slots,
    page_stride,
    pooled_tokens,
    ring_slots,
    scale_rows,
    split_slots,
    width_blocks,
    window_ring,
)


def test_a_block():
    """256 tokens: 64 CSA and index entries, 2 HCA entries at the released ratio."""
    assert (BLOCK_SIZE, CSA_RATIO, CSA_ENTRIES, BLOCK_SIZE // 128) == (256, 4, 64, 2)


# ---- pages ----


@pytest.mark.parametrize(
    ("dtype", "dim", "data", "scales", "page"),
    [
        ("fp4", 128, 64, 4, 4352),
        ("fp8", 128, 128, 4, 8448),
        ("bf16", 128, 256, 0, 16384),
        ("fp32", 128, 512, 0, 32768),
        ("fp4", 32, 16, 1, 1088),
        ("fp8", 16, 16, 4, 1280),
        ("bf16", 2, 4, 0, 256),
    ],
)
def test_index_page(dtype, dim, data, scales, page):
    """The page of DeepGEMM's and SGLang's FP4 pools is 4352 bytes: a page can be handed over."""
    layout = IndexLayout(IndexDtype(dtype), dim)
    assert (layout.entries, layout.data_row_bytes, layout.scale_row_bytes) == (64, data, scales)
    assert layout.page_bytes == page_stride(layout) == page


@pytest.mark.parametrize("dim", [16, 48, 100])
def test_index_page_that_fp4_cannot_hold(dim):
    with pytest.raises(ConfigError, match=rf"index_head_dim {dim} is not a multiple of 32.*fp8 or bf16"):
        IndexLayout(IndexDtype.FP4, dim)
    IndexLayout(IndexDtype.FP8, dim, hadamard=False)


def test_a_layout_is_a_value():
    """It may be a key, be changed into another, and travel to another process."""
    layout = IndexLayout("fp4", 128)
    assert {layout: 1}[IndexLayout(IndexDtype.FP4, 128)] == 1
    plain = dataclasses.replace(layout, hadamard=False)
    assert plain == IndexLayout("fp4", 128, hadamard=False) != layout
    assert pickle.loads(pickle.dumps(plain)) == plain
    kv = dataclasses.replace(KVLayout("fp8", 64, 448, 64), entries=2)
    assert pickle.loads(pickle.dumps(kv)) == kv == KVLayout("fp8", 2, 448, 64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.hadamard = False  # type: ignore[misc]


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "entries", "nope", "rope", "rope_dtype", "data", "scales"),
    [
        # V4: 448 E4M3 + 64 x 2 rope + 7 scales padded to 8 = 584
        ("fp8", 256, 448, 64, BF16, 576, 8),
        ("fp8", 64, 448, 64, BF16, 576, 8),
        ("fp8", 2, 448, 64, BF16, 576, 8),
        ("fp8", 2, 448, 64, FP32, 704, 8),
        ("bf16", 64, 448, 64, BF16, 1024, 0),
        ("fp32", 64, 448, 64, BF16, 2048, 0),
        ("fp8", 1, 48, 16, BF16, 80, 8),
        ("fp8", 1, 512, 64, BF16, 640, 8),
        ("fp8", 1, 513, 64, BF16, 641, 16),  # nine scales need a second word
        ("fp8", 3, 1, 2, BF16, 5, 8),
    ],
)
def test_kv_page(dtype, entries, nope, rope, rope_dtype, data, scales):
    layout = KVLayout(KVDtype(dtype), entries, nope, rope, rope_dtype)
    assert layout.head_dim == nope + rope
    assert (layout.data_row_bytes, layout.scale_row_bytes) == (data, scales)
    assert layout.page_bytes == entries * (data + scales)
    assert page_stride(layout) % PAGE_ALIGNMENT == 0
    assert 0 <= page_stride(layout) - layout.page_bytes < PAGE_ALIGNMENT


def test_v4_entry_is_584_bytes():
    layout = KVLayout(KVDtype.FP8, 64, 448, 64)
    assert layout.scale_groups == 7
    assert layout.data_row_bytes + layout.scale_row_bytes == 584
    assert layout.page_bytes == 64 * 584


def test_element_dtypes():
    assert element_dtype(KVLayout(KVDtype.BF16, 2, 4, 4)) is BF16
    assert element_dtype(IndexLayout(IndexDtype.FP32, 8)) is FP32


LAYOUTS = [
    IndexLayout(IndexDtype.FP4, 64),
    IndexLayout(IndexDtype.FP8, 8),
    IndexLayout(IndexDtype.BF16, 4),
    KVLayout(KVDtype.FP8, 3, 13, 6),
    KVLayout(KVDtype.FP8, 2, 130, 2),
    KVLayout(KVDtype.BF16, 5, 3, 4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_cover_a_page_once(layout):
    """Data first and scales behind: each byte of a page belongs to one entry, none to two, padding to nobody."""
    stride = page_stride(layout)
    pages = torch.zeros((2, stride), dtype=torch.uint8)
    for entry in range(layout.entries):
        data_rows(pages, layout)[1, entry] += entry + 1
        scale_rows(pages, layout)[1, entry] += 100 + entry
    assert not pages[0].any()
    expected = [e + 1 for e in range(layout.entries) for _ in range(layout.data_row_bytes)]
    expected += [100 + e for e in range(layout.entries) for _ in range(layout.scale_row_bytes)]
    expected += [0] * (stride - layout.page_bytes)
    assert pages[1].tolist() == expected


# ---- addresses ----


def test_entry_slots():
    """Table entry times entries per block, plus the place: at the last entry of a block and the first of the next."""
    tables = torch.tensor([[5, 0, 9], [7, 2, -1]], dtype=torch.int32)
    request = torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.int32)
    entry = torch.tensor([0, 63, 64, 191, 127, 0], dtype=torch.int32)
    slots = entry_slots(tables, request, entry, 64)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [5 * 64, 5 * 64 + 63, 0, 9 * 64 + 63, 2 * 64 + 63, 7 * 64]
    page, place = split_slots(slots, IndexLayout(IndexDtype.FP4, 32))
    assert page.tolist() == [5, 5, 0, 9, 2, 7]
    assert place.tolist() == [0, 63, 0, 63, 63, 0]
    assert entry_slots(tables, request[:, None], entry[:, None] * 0 + torch.arange(2), 2)[3].tolist() == [10, 11]


def test_addresses_beyond_two_to_the_31():
    """A pool of a few hundred GB has more entries, and far more bytes, than int32 can count."""
    blocks = 2**31 - 1
    tables = torch.tensor([[0, blocks]], dtype=torch.int32)
    request, position = torch.tensor([0], dtype=torch.int32), torch.tensor([511], dtype=torch.int32)
    slot = entry_slots(tables, request, position, BLOCK_SIZE)
    assert slot.tolist() == [blocks * 256 + 255]
    page, place = split_slots(slot, KVLayout(KVDtype.FP8, 256, 448, 64))
    assert (page.tolist(), place.tolist()) == ([blocks], [255])
    assert ring_slots(
        torch.tensor([2**25], dtype=torch.int32), torch.tensor([130], dtype=torch.int32), 128
    ).tolist() == [2**32 + 2]


def test_ring_slots():
    """A request's places lie together, and positions go round in them."""
    position = torch.arange(15, 19)
    assert ring_slots(torch.tensor(3), position, 8).tolist() == [31, 24, 25, 26]
    assert ring_slots(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([7, 8]), 5).tolist() == [2, 13]


# ---- rings ----


def test_what_an_entry_pools():
    """Two groups of 4 where they overlap (CSA), one of the ratio otherwise; a ring has room for the drafts as well."""
    assert [pooled_tokens(ratio) for ratio in (4, 16, 128, 256)] == [8, 16, 128, 256]
    assert [compressor_ring(ratio) for ratio in (4, 16, 128, 256)] == [16, 24, 136, 264]


@given(st.integers(1, 256), st.integers(0, 1000), st.integers(0, DRAFT_ROWS))
def test_a_ring_keeps_what_accepted_rows_read(window, position, drafts):
    """A step writes the row at ``position`` and all its drafts before any of them reads, and may reject every draft.

    Nothing that one of these rows sees is overwritten, so neither is what the next step sees from ``position`` on.
    """
    for ring, seen in ((window_ring(window), window), (compressor_ring(4), 8), (compressor_ring(128), 128)):
        last = position + drafts
        held = {place % ring: place for place in range(max(0, last - ring + 1), last + 1)}
        for row in range(position, last + 1):
            assert all(held[place % ring] == place for place in range(max(0, row - seen + 1), row + 1))
    assert window_ring(window) % 8 == 0
    assert window_ring(window) - window - DRAFT_ROWS in range(8)


# ---- how many blocks ----


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (1 << 20, 4096)]
)
def test_blocks_for(tokens, blocks):
    assert blocks_for(tokens) == blocks


def test_ceil_div_is_exact_where_floats_are_not():
    assert ceil_div(2**60 + 1, 2) == 2**59 + 1


@pytest.mark.parametrize(
    ("tokens", "width"),
    [(0, 1), (1, 1), (256, 1), (257, 2), (512, 2), (513, 4), (1024, 4), (1025, 8), (1 << 20, 4096)],
)
def test_width_blocks(tokens, width):
    """Buckets are powers of two, so that few shapes serve every length."""
    assert width_blocks(tokens) == width


def test_other_block_sizes():
    check_block_size(256)
    for size in (16, 64, 128, 512):
        with pytest.raises(ConfigError, match=rf"block_size {size} is not supported: .*leave --block-size out"):
            check_block_size(size)
