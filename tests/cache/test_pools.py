"""The tensors behind the caches: which bytes belong to whom, copies and poison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_config
from tetrad.cache.groups import CacheSizes, Lifetime
from tetrad.cache.pools import CachePools
from tetrad.geometry import IndexDtype, KVDtype, PagedIndex, PagedKV, window_ring
from tetrad.models.caches import CsaCache, HcaCache, LayerCache, WindowCache, cache_groups, layer_caches
from tetrad.ops.index_keys import read_index_keys
from tetrad.ops.kv_entries import read_kv_entries

CONFIG = tiny_config("flash", hca_ratio=32, head_dim=20, qk_rope_head_dim=6, index_head_dim=32, sliding_window=13)
SIZES = CacheSizes(blocks=3, requests=2, step_rows=30)


def make_pools(kv: str = "fp8", index: str = "fp4", sizes: CacheSizes = SIZES) -> CachePools:
    groups = cache_groups(CONFIG, kv_dtype=KVDtype(kv), index_dtype=IndexDtype(index), compute_dtype=torch.bfloat16)
    return CachePools(groups, sizes, "cpu")


def parts(cache: LayerCache) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer's cache by their names."""
    for field in dataclasses.fields(cache):
        value = getattr(cache, field.name)
        yield field.name, value if isinstance(value, Tensor) else value.pages


def test_layers_share_no_byte():
    """Layers of one kind are slices of one tensor; a wrong index would let two layers write to one place."""
    pools = make_pools()
    for pool in pools.pools.values():
        pool.fill_(0)
    layers = layer_caches(CONFIG, pools)
    marked = []
    for layer in layers:
        for _, view in parts(layer):
            marked.append((view, 1 + len(marked)))
            view.fill_(len(marked))
    assert all((view == mark).all() for view, mark in marked)
    assert sum(view.numel() for view, _ in marked) == sum(pool.numel() for pool in pools.pools.values())


def test_a_layer_gets_the_cache_of_its_kind():
    """SWA, CSA, HCA, CSA, HCA. A field that a layer does not use does not exist."""
    layers = layer_caches(CONFIG, make_pools())
    assert [type(layer) for layer in layers] == [WindowCache, CsaCache, HcaCache, CsaCache, HcaCache]


def test_shapes_of_a_layer():
    """Context pages for blocks; window pages for requests and, behind them, the rows of a step; rings for requests."""
    _, csa, hca, *_ = layer_caches(CONFIG, make_pools())
    entry, ring = 14 + 6 * 2 + 8, 24
    assert ring == window_ring(13)
    assert isinstance(csa, CsaCache)
    assert isinstance(hca, HcaCache)
    assert csa.window.pages.shape == (2 + 2, ring * entry)
    assert csa.window.layout.entries == ring
    assert csa.compressed.pages.shape == (3, 64 * entry)
    assert csa.index.pages.shape == (3, 64 * 17)
    assert csa.ring.shape == (2, 8 + 8, 2, 2 * 20)
    assert csa.index_ring.shape == (2, 8 + 8, 2, 2 * 32)
    assert hca.compressed.pages.shape == (3, 8 * entry)
    assert hca.ring.shape == (2, 32 + 8, 2, 20)
    assert csa.ring.dtype == csa.index_ring.dtype == hca.ring.dtype == torch.float32
    for paged in (csa.window, csa.compressed, csa.index):
        assert paged.pages.stride(0) % 16 == 0
        assert paged.pages.data_ptr() % 16 == 0


@pytest.mark.parametrize(("kv", "index"), [("fp8", "fp4"), ("bf16", "bf16"), ("fp32", "fp32"), ("fp8", "fp8")])
def test_poison_reads_as_nan_in_every_format(kv, index):
    """Tests rely on it: a read of what nobody wrote has to show."""
    pools = make_pools(kv, index)
    pools.poison()
    for layer in layer_caches(CONFIG, pools):
        for field in dataclasses.fields(layer):
            value = getattr(layer, field.name)
            if isinstance(value, PagedKV):
                slots = torch.arange(value.pages.shape[0] * value.layout.entries)
                assert read_kv_entries(value, slots, torch.float32).isnan().all()
            elif isinstance(value, PagedIndex):
                slots = torch.arange(value.pages.shape[0] * value.layout.entries)
                assert read_index_keys(value.pages, slots, value.layout).isnan().all()
            else:
                assert value.isnan().all()


def numbered(sizes: CacheSizes) -> CachePools:
    """Every page of every layer full of a number of its own."""
    pools = make_pools(sizes=sizes)
    for pool in pools.pools.values():
        for layer in range(pool.shape[0]):
            for page in range(pool.shape[1]):
                pool[layer, page] = 16 * layer + page
    return pools


def pages_of(pools: CachePools, name: str) -> list[list[int]]:
    """The numbers of a group's pages, by layer; each is the same throughout."""
    pages = pools.pools[name].flatten(2)
    assert (pages == pages[..., :1]).all()
    return (pages[..., 0].int() - 16 * torch.arange(len(pages)).unsqueeze(1)).tolist()


@pytest.mark.parametrize(
    ("blocks", "requests"),
    [([], []), ([(0, 4)], []), ([], [(2, 0)]), ([(1, 2), (2, 1), (0, 4)], [(0, 1), (1, 0)]), ([(3, 0)], [(2, 1)])],
)
def test_copies(blocks, requests):
    """A fork's copies: pages of blocks in what grows with the context, rings in what belongs to a request.

    All of them read what was there before, in every layer. The slots of a step's rows belong to nobody.
    """
    pools = numbered(CacheSizes(blocks=5, requests=3, step_rows=30))
    pools.copy(blocks, requests)
    for group in pools.groups:
        expected = list(range(group.pages(pools.sizes)))
        for source, target in blocks if group.lifetime is Lifetime.CONTEXT else requests:
            expected[target] = source
        assert pages_of(pools, group.name) == [expected] * len(group.layers), group.name
