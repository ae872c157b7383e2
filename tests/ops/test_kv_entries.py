"""Main KV entries: every byte of a page, and what comes back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.ops.indexer_cases import decode_e4m3

from tetrad.geometry import KVDtype, KVLayout, PagedKV
from tetrad.ops.kv_entries import copy_kv_entries, read_kv_entries, write_kv_entries, write_pooled_kv_entries
from tetrad.ops.rotary import apply_rotary
from tetrad.ops.row_invariant import rms_norm

BF16, FP32 = torch.bfloat16, torch.float32

LAYOUTS = {
    "fp8-released-csa": KVLayout(KVDtype.FP8, 64, 448, 64),
    "fp8-released-hca": KVLayout(KVDtype.FP8, 2, 448, 64),
    "fp8-window": KVLayout(KVDtype.FP8, 256, 64, 16),
    "fp8-one-short-group": KVLayout(KVDtype.FP8, 3, 48, 16),
    "fp8-odd": KVLayout(KVDtype.FP8, 5, 131, 6),
    "fp8-fp32-rope": KVLayout(KVDtype.FP8, 64, 70, 10, FP32),
    "fp8-no-nope": KVLayout(KVDtype.FP8, 2, 0, 8),
    "bf16": KVLayout(KVDtype.BF16, 64, 45, 6),
    "fp32": KVLayout(KVDtype.FP32, 2, 45, 6),
}


@pytest.fixture(params=LAYOUTS, ids=list(LAYOUTS))
def layout(request) -> KVLayout:
    return LAYOUTS[request.param]


def guarded_pages(layout: KVLayout, pages: int, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages [pages, page bytes], the whole allocation), 0xFF everywhere."""
    stride = layout.page_bytes + extra
    memory = torch.full((pages * stride + 64,), 0xFF, dtype=torch.uint8)
    return memory[32:-32].view(pages, stride)[:, : layout.page_bytes], memory


def entry_bytes(pages: torch.Tensor, slot: int, layout: KVLayout) -> tuple[np.ndarray, np.ndarray]:
    """(data, scales) of one entry, from the format's own sizes: 448 + 128 + 8 = 584 bytes for the released models."""
    page, entry = pages[slot // layout.entries].numpy(), slot % layout.entries
    if layout.dtype is KVDtype.FP8:
        size = layout.nope_dim + layout.rope_dim * (2 if layout.rope_dtype is BF16 else 4)
        scale = 8 * math.ceil(math.ceil(layout.nope_dim / 64) / 8)
    else:
        size, scale = (layout.nope_dim + layout.rope_dim) * (2 if layout.dtype is KVDtype.BF16 else 4), 0
    start = layout.entries * size + entry * scale
    return page[entry * size : (entry + 1) * size], page[start : start + scale]


def decode(data: np.ndarray, scales: np.ndarray, layout: KVLayout) -> tuple[np.ndarray, np.ndarray]:
    """(nope, rope) in fp64."""

    def floats(raw: np.ndarray, dtype: torch.dtype) -> np.ndarray:
        if dtype is BF16:
            return (raw.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return raw.copy().view(np.float32).astype(np.float64)

    nope = layout.nope_dim
    if layout.dtype is KVDtype.FP8:
        powers = np.exp2(scales.astype(np.float64) - 127)
        return decode_e4m3(data[:nope]) * np.repeat(powers, 64)[:nope], floats(data[nope:], layout.rope_dtype)
    values = floats(data, BF16 if layout.dtype is KVDtype.BF16 else FP32)
    return values[:nope], values[nope:]


@pytest.mark.parametrize("extra", [0, 48])
@pytest.mark.parametrize("compute", [FP32, BF16])
def test_every_byte_of_a_page(layout, compute, extra):
    """Values, scales and their padding lie where the layout says; nothing else is touched, between pages either."""
    torch.manual_seed(1)
    pages, memory = guarded_pages(layout, 5, extra)
    last = 5 * layout.entries - 1
    slots = torch.tensor([last, 0, -1, layout.entries, layout.entries + 1, -9])
    values = torch.randn(6, layout.head_dim) * torch.tensor([1.0, 1e-3, 1, 300, 0, 1]).unsqueeze(1)
    values = values.to(compute)
    values[slots < 0] = float("nan")
    write_kv_entries(values, PagedKV(pages, layout), slots)
    written, base = np.zeros(memory.numel(), bool), memory.data_ptr()
    for value, slot in zip(values, slots.tolist(), strict=True):
        if slot < 0:
            continue
        data, scales = entry_bytes(pages, slot, layout)
        for part in (data, scales):
            if part.size:
                start = part.__array_interface__["data"][0] - base
                written[start : start + part.size] = True
        nope, rope = decode(data, scales, layout)
        exact = value.double().numpy()
        if layout.dtype is KVDtype.FP8:
            groups = -(-layout.nope_dim // 64)
            assert (scales[groups:] == 0).all(), "the bytes that pad the scales are zero"
            for group in range(groups):
                part = slice(64 * group, min(64 * (group + 1), layout.nope_dim))
                largest = max(np.abs(exact[part]).max(), 1e-4)
                power = 2.0 ** (int(scales[group]) - 127)
                assert largest / 448 <= power * (1 + 1e-6) < 2 * largest / 448 * (1 + 1e-6)
                assert np.abs(nope[part] - exact[part]).max() <= max(largest / 16, power * 2**-10)
            stored = value[layout.nope_dim :].to(layout.rope_dtype)
        else:
            stored = value[layout.nope_dim :].to(BF16 if layout.dtype is KVDtype.BF16 else FP32)
            assert np.abs(nope - exact[: layout.nope_dim]).max() <= np.abs(exact).max() / 250
        assert (rope == stored.double().numpy()).all()
    assert (memory.numpy()[~written] == 0xFF).all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_read_gives_what_was_stored(layout, dtype):
    """Any shape of slots; a negative slot gives zeros although the first page is full of NaN."""
    pages, _ = guarded_pages(layout, 5, 16)
    slots = torch.randperm(4 * layout.entries)[:7] + layout.entries
    write_kv_entries(torch.randn(7, layout.head_dim), PagedKV(pages, layout), slots)
    asked = torch.cat((slots, torch.tensor([-1]))).view(2, 4)
    got = read_kv_entries(PagedKV(pages, layout), asked, dtype)
    assert got.shape == (2, 4, layout.head_dim)
    assert got.dtype == dtype
    got = got.view(8, -1)
    for row, slot in enumerate(slots.tolist()):
        exact = np.concatenate(decode(*entry_bytes(pages, slot, layout), layout))
        assert torch.equal(got[row], torch.from_numpy(exact).to(dtype)), f"slot {slot}"
    assert (got[7] == 0).all()
    single = read_kv_entries(PagedKV(pages, layout), slots[3], dtype)
    assert torch.equal(single, got[3])


def test_unquantised_entries_keep_every_bit():
    """bf16 and fp32 caches verify the model: quantising them on the way would hide what is looked for."""
    for name, dtype in (("bf16", BF16), ("fp32", FP32)):
        layout = LAYOUTS[name]
        pages, _ = guarded_pages(layout, 3, 0)
        values = torch.randn(6, layout.head_dim).to(dtype)
        write_kv_entries(values, PagedKV(pages, layout), torch.arange(6))
        assert torch.equal(read_kv_entries(PagedKV(pages, layout), torch.arange(6), dtype), values)


def test_an_entry_is_stored_alike_in_any_company(layout):
    """Written in one call or in several: decode must store what prefill stores."""
    count = 4 * layout.entries - 1
    values = torch.randn(count, layout.head_dim)
    whole, parts = (torch.zeros(4, layout.page_bytes, dtype=torch.uint8) for _ in range(2))
    write_kv_entries(values, PagedKV(whole, layout), torch.arange(count))
    for start, end in ((0, 1), (1, 3), (3, count)):
        write_kv_entries(values[start:end], PagedKV(parts, layout), torch.arange(start, end))
    assert torch.equal(whole, parts)


def test_nothing_to_write(layout):
    pages, memory = guarded_pages(layout, 2, 0)
    write_kv_entries(torch.randn(0, layout.head_dim), PagedKV(pages, layout), torch.zeros(0, dtype=torch.int64))
    write_kv_entries(torch.randn(2, layout.head_dim), PagedKV(pages, layout), torch.tensor([-1, -2]))
    assert (memory == 0xFF).all()
    assert read_kv_entries(PagedKV(pages, layout), torch.zeros((3, 0), dtype=torch.int64), FP32).shape == (
        3,
        0,
        layout.head_dim,
    )


def test_bad_arguments():
    layout = LAYOUTS["fp8-released-hca"]
    pages, slots = torch.zeros(2, 1168, dtype=torch.uint8), torch.arange(2)
    assert layout.page_bytes == 2 * 584
    values = torch.zeros(2, 512)
    with pytest.raises(TypeError, match=r"values must be float32 or bfloat16 .*; got torch.float16"):
        write_kv_entries(values.half(), PagedKV(pages, layout), slots)
    with pytest.raises(ValueError, match=r"values must be .* = \[any, 512\]; got the shape \[2, 511\]"):
        write_kv_entries(values[:, :511], PagedKV(pages, layout), slots)
    with pytest.raises(TypeError, match=r"slots must be int64 .*; got torch.int32"):
        write_kv_entries(values, PagedKV(pages, layout), slots.int())
    with pytest.raises(ValueError, match=r"slots must be .*; got the shape \[1\]"):
        write_kv_entries(values, PagedKV(pages, layout), slots[:1])
    with pytest.raises(ValueError, match=r"at least 1168 bytes a page; got the shape \[2, 1167\]"):
        write_kv_entries(values, PagedKV(pages[:, :-1], layout), slots)
    with pytest.raises(ValueError, match="overlap"):
        write_kv_entries(values, PagedKV(pages[:1].expand(2, -1), layout), slots)
    with pytest.raises(ValueError, match="slots must be on cpu"):
        write_kv_entries(values, PagedKV(pages, layout), slots.to("meta"))
    with pytest.raises(TypeError, match=r"dtype must be float32 or bfloat16; got torch.float16"):
        read_kv_entries(PagedKV(pages, layout), slots, torch.float16)
    with pytest.raises(IndexError):
        read_kv_entries(PagedKV(pages, layout), torch.tensor([4]), FP32)
    with pytest.raises(IndexError):
        write_kv_entries(values, PagedKV(pages, layout), torch.tensor([0, 4]))


# ---- pooled entries ----


@pytest.mark.parametrize("compute", [FP32, BF16])
def test_pooled_entries_are_normed_rotated_and_stored(layout, compute):
    """Cast, norm and RoPE, each rounded to the compute dtype. A row without a slot is not made: it may be NaN."""
    rows, rope = 6, layout.rope_dim
    pooled, weight = torch.randn(rows, layout.head_dim), torch.randn(layout.head_dim)
    cos, sin = torch.randn(rows, rope // 2), torch.randn(rows, rope // 2)
    slots = torch.tensor([layout.entries + 1, -1, 0, -1, -1, 2 * layout.entries])
    absent = slots < 0
    entries = apply_rotary(rms_norm(pooled.to(compute), weight, 0.01), cos, sin)
    for values in (pooled, cos, sin):
        values[absent] = float("nan")
    pages, memory = guarded_pages(layout, 3, 16)
    expected_pages, expected_memory = guarded_pages(layout, 3, 16)
    write_pooled_kv_entries(pooled, weight, 0.01, cos, sin, compute, PagedKV(pages, layout), slots)
    write_kv_entries(entries[~absent], PagedKV(expected_pages, layout), slots[~absent])
    assert torch.equal(memory, expected_memory)
    write_pooled_kv_entries(pooled, weight, 0.01, cos, sin, compute, PagedKV(pages, layout), torch.full_like(slots, -1))
    assert torch.equal(memory, expected_memory)


# ---- copies ----


def test_copies_move_every_byte_of_an_entry(layout):
    """Data and scales together, and nothing else; -1 copies nothing, and reads nothing that was not written."""
    last = 5 * layout.entries - 1
    pages, memory = guarded_pages(layout, 5, 48)
    values = torch.randn(3, layout.head_dim) * torch.tensor([[1e-2], [1.0], [300.0]])
    write_kv_entries(values, PagedKV(pages, layout), torch.tensor([0, last, layout.entries]))
    sources, targets = [0, -1, last, -1, layout.entries], [layout.entries + 1, -1, 1, -1, 3 * layout.entries]
    before = {slot: [part.copy() for part in entry_bytes(pages, slot, layout)] for slot in sources if slot >= 0}
    copy_kv_entries(PagedKV(pages, layout), torch.tensor(sources), torch.tensor(targets))
    expected_pages, expected_memory = guarded_pages(layout, 5, 48)
    for source, target in zip(sources, targets, strict=True):
        for slot in (source, target):
            if slot >= 0:
                for part, byte_values in zip(entry_bytes(expected_pages, slot, layout), before[source], strict=True):
                    part[:] = byte_values
    assert torch.equal(memory, expected_memory)


def test_copies_read_what_was_there_before(layout):
    """Entries that change places: the second copy must not see what the first has written."""
    pages, _ = guarded_pages(layout, 3, 0)
    cache = PagedKV(pages, layout)
    values = torch.randn(3, layout.head_dim)
    slots = torch.tensor([0, 2 * layout.entries, layout.entries + 1])
    write_kv_entries(values, cache, slots)
    before = read_kv_entries(cache, slots, FP32)
    copy_kv_entries(cache, slots, slots.roll(1))
    assert torch.equal(read_kv_entries(cache, slots.roll(1), FP32), before)


def test_nothing_to_copy(layout):
    pages, memory = guarded_pages(layout, 2, 0)
    for nothing in (torch.full((3,), -1), torch.empty(0, dtype=torch.int64)):
        copy_kv_entries(PagedKV(pages, layout), nothing, nothing)
    assert (memory == 0xFF).all()


def test_bad_copies():
    layout = LAYOUTS["fp8-released-hca"]
    cache, slots = PagedKV(torch.zeros(2, 1168, dtype=torch.uint8), layout), torch.arange(2)
    with pytest.raises(TypeError, match=r"targets must be int64 .*; got torch.int32"):
        copy_kv_entries(cache, slots, slots.int())
    with pytest.raises(TypeError, match=r"sources must be int64 .*; got torch.int32"):
        copy_kv_entries(cache, slots.int(), slots)
    with pytest.raises(ValueError, match=r"targets must be .*; got the shape \[1\]"):
        copy_kv_entries(cache, slots, slots[:1])
    with pytest.raises(ValueError, match=r"at least 1168 bytes a page"):
        copy_kv_entries(PagedKV(cache.pages[:, :-1], layout), slots, slots)
    with pytest.raises(IndexError):
        copy_kv_entries(cache, torch.tensor([0, 4]), slots)
