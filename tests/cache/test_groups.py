"""What caches cost, against the numbers of the released models."""

from __future__ import annotations

import pytest
import torch

from tests.released import flash_document, pro_document
from tetrad.cache.groups import CacheGroup, CacheGroups, CacheSizes, Lifetime, RingLayout, format_bytes
from tetrad.cache.pools import CachePools
from tetrad.geometry import IndexDtype, KVDtype, KVLayout, PageLayout
from tetrad.models.caches import cache_groups
from tetrad.models.config import ModelConfig

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def groups_of(document: dict, kv: str = "fp8", index: str = "fp4", dtype: torch.dtype = torch.bfloat16) -> CacheGroups:
    config = ModelConfig.from_dict(document)
    return cache_groups(config, kv_dtype=KVDtype(kv), index_dtype=IndexDtype(index), compute_dtype=dtype)


FLASH, PRO = groups_of(flash_document()), groups_of(pro_document())
DEFAULTS = CacheSizes(blocks=4096, requests=256, step_rows=8192)


def row_bytes(group: CacheGroup) -> int:
    """Bytes of one entry."""
    layout = group.layout
    assert not isinstance(layout, RingLayout)
    return layout.data_row_bytes + layout.scale_row_bytes


def test_entries():
    assert [row_bytes(FLASH[name]) for name in ("window", "csa", "hca", "index")] == [584, 584, 584, 68]
    for dtype, size in (("fp8", 132), ("bf16", 256), ("fp32", 512)):
        assert row_bytes(groups_of(flash_document(), index=dtype)["index"]) == size
    assert row_bytes(groups_of(flash_document(), kv="bf16")["csa"]) == 1024


def test_groups_of_the_released_models():
    """Every layer has a window; an indexer's caches are in CSA layers alone; nothing lives longer than it must."""
    for groups, layers, csa, hca in ((FLASH, 43, 21, 20), (PRO, 61, 30, 31)):
        counts = {group.name: len(group.layers) for group in groups}
        assert counts == {
            "window": layers,
            "csa": csa,
            "index": csa,
            "csa_ring": csa,
            "index_ring": csa,
            "hca": hca,
            "hca_ring": hca,
        }
        lifetimes = {group.name: group.lifetime for group in groups}
        assert lifetimes.pop("window") is Lifetime.WINDOW
        for name, lifetime in lifetimes.items():
            assert lifetime is (Lifetime.COMPRESSOR if "ring" in name else Lifetime.CONTEXT)
        tokens = {group.name: group.tokens_per_entry for group in groups if group.lifetime is Lifetime.CONTEXT}
        assert tokens == {"csa": 4, "index": 4, "hca": 128}
    assert FLASH["csa"].layers[:3] == (2, 4, 6)
    assert PRO["hca"].layers[:3] == (0, 1, 3)
    assert FLASH["csa"].layers == FLASH["index_ring"].layers


def test_blocks():
    """A block in one layer: 64 x 584 of CSA, 4352 of index keys, 2 x 584 of HCA."""
    assert FLASH.block_bytes == {"csa": 21 * 64 * 584, "index": 21 * 4352, "hca": 20 * 2 * 584}
    assert PRO.block_bytes == {"csa": 30 * 64 * 584, "index": 30 * 4352, "hca": 31 * 2 * 584}


def test_growth_per_token():
    token = FLASH.bytes_per_token
    assert (token["index"], token["csa"], token["hca"]) == (357, 3066, 91.25)
    assert round(sum(token.values())) == 3514
    token = PRO.bytes_per_token
    assert (token["index"], token["csa"], round(token["hca"], 1)) == (510, 4380, 141.4)
    assert round(sum(token.values())) == 5031
    assert groups_of(flash_document(), index="fp8").bytes_per_token["index"] == 693
    assert groups_of(pro_document(), index="bf16").bytes_per_token["index"] == 1920


def test_rings_of_a_request():
    """fp32 u and g of 8 + 8 tokens (CSA, and its index) and of 128 + 8 (HCA); 128 + 8 window keys in every layer."""
    csa, index, hca = 16 * 2 * 1024 * 4, 16 * 2 * 256 * 4, 136 * 2 * 512 * 4
    assert (csa, index, hca) == (128 * KIB, 32 * KIB, 544 * KIB)
    for groups, layers, csa_layers, hca_layers in ((FLASH, 43, 21, 20), (PRO, 61, 30, 31)):
        assert groups.request_bytes(Lifetime.COMPRESSOR) == csa_layers * (csa + index) + hca_layers * hca
        assert groups.request_bytes(Lifetime.WINDOW) == layers * 136 * 584
        assert groups.request_bytes(Lifetime.CONTEXT) == 0


def test_window_at_the_defaults():
    """256 requests and steps of 8192 rows: rings of 0.87 GB and step entries of 0.21 GB. Window blocks took 5 GB."""
    for groups, layers, gigabytes in ((FLASH, 43, 1.083), (PRO, 61, 1.536)):
        window = groups["window"].bytes(DEFAULTS)
        assert window == 256 * groups.request_bytes(Lifetime.WINDOW) + groups.step_bytes(8192)
        # step entries come in pages of a ring's size
        assert groups.step_bytes(8192) == layers * -(-8192 // 136) * 136 * 584
        assert window / 1e9 == pytest.approx(gigabytes, abs=0.001)
    assert FLASH["window"].bytes(DEFAULTS) <= 1.1e9


def test_a_million_tokens():
    """3.43 GiB for Flash and 4.91 GiB for Pro, and what a request holds whatever its length."""
    for groups, gib in ((FLASH, 3.43), (PRO, 4.91)):
        context = groups.total_bytes(CacheSizes(4096, 0, 0))
        assert context / GIB == pytest.approx(gib, abs=0.005)
        fixed = groups.request_bytes(Lifetime.WINDOW) + groups.request_bytes(Lifetime.COMPRESSOR)
        assert groups.total_bytes(CacheSizes(4096, 3, 0)) - context == 3 * fixed
        assert groups.total_bytes(CacheSizes(4096, 3, 500)) - context == 3 * fixed + groups.step_bytes(500)


SMALL = flash_document(
    num_hidden_layers=5,
    compress_ratios=[0, 4, 32, 4, 32, 0],
    head_dim=20,
    qk_rope_head_dim=6,
    index_head_dim=32,
    sliding_window=11,
    num_hash_layers=1,
)


@pytest.mark.parametrize("sizes", [CacheSizes(3, 2, 40), CacheSizes(5, 1, 1), CacheSizes(1, 4, 0)], ids=str)
@pytest.mark.parametrize(
    ("kv", "index", "dtype"),
    [
        ("fp8", "fp4", torch.bfloat16),
        ("fp8", "fp8", torch.float32),
        ("bf16", "bf16", torch.bfloat16),
        ("fp32", "fp32", torch.float32),
    ],
)
def test_every_group_takes_the_bytes_that_it_says(kv, index, dtype, sizes):
    """What is allocated is what was computed: a page's padding to 16 bytes is counted, and nothing twice."""
    groups = groups_of(SMALL, kv, index, dtype)
    pools = CachePools(groups, sizes, "cpu")
    for group in groups:
        assert pools.pools[group.name].untyped_storage().nbytes() == group.bytes(sizes), group.name
    assert groups.total_bytes(sizes) == sum(pool.untyped_storage().nbytes() for pool in pools.pools.values())


def test_a_model_without_one_kind_of_layer():
    window_only = groups_of(SMALL | {"num_hidden_layers": 2, "compress_ratios": [0, 0, 0]})
    assert [group.name for group in window_only] == ["window"]
    assert window_only.block_bytes == window_only.bytes_per_token == {}
    assert window_only.request_bytes(Lifetime.COMPRESSOR) == 0
    no_csa = groups_of(SMALL | {"num_hidden_layers": 2, "compress_ratios": [0, 64, 0]})
    assert {group.name for group in no_csa} == {"window", "hca", "hca_ring"}
    assert no_csa.block_bytes == {"hca": 4 * (14 + 12 + 8) + 8}  # padded to a multiple of 16
    assert no_csa.request_bytes(Lifetime.COMPRESSOR) == (64 + 8) * 2 * 20 * 4
    no_hca = groups_of(SMALL | {"num_hidden_layers": 2, "compress_ratios": [4, 4, 0]})
    assert {group.name for group in no_hca} == {"window", "csa", "index", "csa_ring", "index_ring"}
    assert "csa" in no_hca
    assert "hca" not in no_hca


def test_pages_of_a_group():
    """One for each block; one for each request, and behind those enough for a step's rows; a ring for each request."""
    layout: PageLayout = KVLayout(KVDtype.BF16, 24, 10, 6)
    sizes = CacheSizes(blocks=7, requests=3, step_rows=25)
    expected = {Lifetime.CONTEXT: 7, Lifetime.WINDOW: 3 + 2, Lifetime.COMPRESSOR: 3}
    for lifetime, pages in expected.items():
        ring = RingLayout(5, 4)
        group = CacheGroup("some", (2, 5), lifetime, 1, ring if lifetime is Lifetime.COMPRESSOR else layout)
        assert group.pages(sizes) == pages
        size = 5 * 2 * 4 * 4 if lifetime is Lifetime.COMPRESSOR else 24 * 32
        assert group.bytes(sizes) == 2 * pages * size


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
