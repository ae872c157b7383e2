"""What caches cost, against the numbers of the released models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tetrad.cache.kv_cache import KVCaches
from tetrad.cache.spec import CacheSizes, CacheSpec, format_bytes

from tests.released import flash_document, pro_document
from tetrad.geometry import IndexDtype, KVDtype
from tetrad.models.config import ModelConfig
from tetrad.ops.index_keys import read_index_keys
from tetrad.ops.kv_entries import read_kv_entries

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def spec_of(document: dict, kv: str = "fp8", index: str = "fp4") -> CacheSpec:
    config = ModelConfig.from_dict(document)
    return CacheSpec(
        config.compress_ratios,
        config.head_dim,
        config.qk_rope_head_dim,
        config.index_head_dim,
        config.sliding_window,
        KVDtype(kv),
        IndexDtype(index),
        torch.bfloat16,
    )


FLASH, PRO = spec_of(flash_document()), spec_of(pro_document())


def test_entries():
    assert FLASH.bytes_per_entry == {"kv": 584, "index": 68}
    for dtype, size in (("fp8", 132), ("bf16", 256), ("fp32", 512)):
        assert dataclasses.replace(FLASH, index_dtype=IndexDtype(dtype)).bytes_per_entry["index"] == size
    assert dataclasses.replace(FLASH, kv_dtype=KVDtype.BF16).bytes_per_entry["kv"] == 1024


def test_blocks():
    """A block in one layer: 64 x 584 of CSA, 4352 of index keys, 2 x 584 of HCA; a window block 256 x 584."""
    assert (FLASH.csa_layers, FLASH.hca_layers, FLASH.hca_ratio) == (21, 20, 128)
    assert FLASH.block_bytes == {"csa": 21 * 64 * 584, "index": 21 * 4352, "hca": 20 * 2 * 584}
    assert FLASH.window_block_bytes == 43 * 256 * 584
    assert (PRO.csa_layers, PRO.hca_layers) == (30, 31)


def test_growth_per_token():
    token = FLASH.bytes_per_token
    assert (token["index"], token["csa"], token["hca"]) == (357, 3066, 91.25)
    assert round(sum(token.values())) == 3514
    token = PRO.bytes_per_token
    assert (token["index"], token["csa"], round(token["hca"], 1)) == (510, 4380, 141.4)
    assert round(sum(token.values())) == 5031
    assert spec_of(flash_document(), index="fp8").bytes_per_token["index"] == 693
    assert spec_of(pro_document(), index="bf16").bytes_per_token["index"] == 1920


def test_states():
    """fp32: 64 KiB and 16 KiB (its index) for each CSA layer, 512 KiB for each HCA layer."""
    assert FLASH.state_bytes == 21 * (64 + 16) * KIB + 20 * 512 * KIB
    assert FLASH.state_bytes / MIB == pytest.approx(11.64, abs=0.01)
    assert PRO.state_bytes / MIB == pytest.approx(17.84, abs=0.01)


def test_a_million_tokens():
    """3.43 GiB for Flash and 4.91 GiB for Pro, and what a request holds whatever its length."""
    for spec, gib in ((FLASH, 3.43), (PRO, 4.91)):
        assert CacheSizes(4096, 0, 0).total_bytes(spec) / GIB == pytest.approx(gib, abs=0.005)
        fixed = CacheSizes(4096, 2, 1).total_bytes(spec) - CacheSizes(4096, 0, 0).total_bytes(spec)
        assert fixed == 2 * spec.window_block_bytes + spec.state_bytes


def test_a_model_without_one_kind_of_layer():
    window_only = dataclasses.replace(FLASH, layer_ratios=(0, 0))
    assert window_only.block_bytes == {"csa": 0, "index": 0, "hca": 0}
    assert (window_only.state_bytes, window_only.hca_ratio) == (0, None)
    no_csa = dataclasses.replace(FLASH, layer_ratios=(0, 64))
    assert no_csa.block_bytes == {"csa": 0, "index": 0, "hca": 4 * 584}
    assert no_csa.state_bytes == 64 * 2 * 512 * 4


SMALL = CacheSpec((0, 4, 32, 4, 32), 20, 6, 32, 8, KVDtype.FP8, IndexDtype.FP4, torch.bfloat16)


def test_layers_share_no_byte():
    """Layers of one kind are slices of one tensor; a wrong index would let two layers write to one place."""
    caches = KVCaches(SMALL, CacheSizes(3, 2, 2), "cpu")
    for tensor in caches.tensors().values():
        tensor.fill_(0)
    fields = ("window_pages", "compressed_pages", "index_pages", "state", "index_state")
    marked = []
    for number, layer in enumerate(caches.layers):
        for place, name in enumerate(fields):
            view = getattr(layer, name)
            if view is not None:
                view.fill_(1 + number * len(fields) + place)
                marked.append((view, 1 + number * len(fields) + place))
    assert all((view == mark).all() for view, mark in marked)
    kinds = [{name for name in fields if getattr(layer, name) is not None} for layer in caches.layers]
    assert kinds[0] == {"window_pages"}
    assert kinds[1] == kinds[3] == set(fields)
    assert kinds[2] == kinds[4] == {"window_pages", "compressed_pages", "state"}
    assert sum(view.numel() for view, _ in marked) == sum(tensor.numel() for tensor in caches.tensors().values())


def test_shapes_of_a_layer():
    sizes = CacheSizes(3, 5, 2)
    layer = KVCaches(SMALL, sizes, "cpu").layers[1]
    entry = 14 + 6 * 2 + 8
    assert layer.window_pages.shape == (5, 256 * entry)
    assert layer.compressed_pages is not None
    assert layer.compressed_pages.shape == (3, 64 * entry)
    assert layer.index_pages is not None
    assert layer.index_pages.shape == (3, 64 * 17)
    assert layer.state is not None
    assert layer.state.shape == (2 * 8, 2, 2 * 20)
    assert layer.index_state is not None
    assert layer.index_state.shape == (2 * 8, 2, 2 * 32)
    heavy = KVCaches(SMALL, sizes, "cpu").layers[2]
    assert heavy.compressed_pages is not None
    assert heavy.compressed_pages.shape == (3, 8 * entry)
    assert heavy.state is not None
    assert heavy.state.shape == (2 * 32, 2, 20)


@pytest.mark.parametrize(("kv", "index"), [("fp8", "fp4"), ("bf16", "bf16"), ("fp32", "fp32"), ("fp8", "fp8")])
def test_poison_reads_as_nan_in_every_format(kv, index):
    """Tests rely on it: a read of what nobody wrote has to show."""
    spec = dataclasses.replace(SMALL, kv_dtype=KVDtype(kv), index_dtype=IndexDtype(index))
    caches = KVCaches(spec, CacheSizes(1, 1, 1), "cpu")
    caches.poison()
    slots = torch.arange(64)
    layer = caches.layers[1]
    assert layer.compressed_pages is not None
    assert layer.index_pages is not None
    assert layer.compressed_layout is not None
    assert layer.index_layout is not None
    for pages, layout in (
        (layer.window_pages, layer.window_layout),
        (layer.compressed_pages, layer.compressed_layout),
    ):
        assert read_kv_entries(pages, slots, layout, torch.float32).isnan().all()
    assert read_index_keys(layer.index_pages, slots, layer.index_layout).isnan().all()
    assert layer.state is not None
    assert layer.state.isnan().all()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (4352, "4.25 KiB"),
        (1536 * KIB, "1.5 MiB"),
        (3.43 * GIB, "3.43 GiB"),
        (5 * 1024 * GIB, "5 TiB"),
        (9999 * 1024 * GIB, "9999 TiB"),
    ],
)
def test_bytes_for_a_reader(count, text):
    assert format_bytes(count) == text
