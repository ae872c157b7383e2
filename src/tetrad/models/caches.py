"""The caches of DeepSeek-V4: the groups that its layers declare, and what each kind of layer reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.cache.groups import CacheGroup, CacheGroups, Lifetime, RingLayout
from tetrad.cache.pools import CachePools
from tetrad.geometry import (
    BLOCK_SIZE,
    CSA_RATIO,
    IndexDtype,
    IndexLayout,
    KVDtype,
    KVLayout,
    PagedIndex,
    PagedKV,
    compressor_ring,
    window_ring,
)
from tetrad.models.config import LayerKind, ModelConfig


@dataclass(frozen=True, slots=True)
class WindowCache:
    """A layer that attends to its window alone."""

    window: PagedKV


@dataclass(frozen=True, slots=True)
class HcaCache:
    """A layer that attends to all of its heavily compressed history. ``ring``: fp32 [requests, places, 2, width]."""

    window: PagedKV
    compressed: PagedKV
    ring: Tensor


@dataclass(frozen=True, slots=True)
class CsaCache:
    """A layer whose indexer chooses among its compressed entries."""

    window: PagedKV
    compressed: PagedKV
    ring: Tensor
    index: PagedIndex
    index_ring: Tensor


LayerCache = WindowCache | CsaCache | HcaCache


def cache_groups(
    config: ModelConfig,
    *,
    kv_dtype: KVDtype,
    index_dtype: IndexDtype,
    compute_dtype: torch.dtype,
    index_hadamard: bool = True,
) -> CacheGroups:
    """The groups of a model: window, csa, index, hca, and the rings of their compressors."""

    def kv_layout(entries: int) -> KVLayout:
        return KVLayout(kv_dtype, entries, config.nope_head_dim, config.qk_rope_head_dim, compute_dtype)

    layers = range(config.num_hidden_layers)
    csa, hca = config.layers_of(LayerKind.CSA), config.layers_of(LayerKind.HCA)
    window = kv_layout(window_ring(config.sliding_window))
    groups = [CacheGroup("window", tuple(layers), Lifetime.WINDOW, 1, window)]

    def compressed(name: str, of: tuple[int, ...], ratio: int) -> None:
        groups.append(CacheGroup(name, of, Lifetime.CONTEXT, ratio, kv_layout(BLOCK_SIZE // ratio)))

    def ring(name: str, of: tuple[int, ...], ratio: int, dim: int) -> None:
        width = 2 * dim if ratio == CSA_RATIO else dim
        groups.append(CacheGroup(name, of, Lifetime.COMPRESSOR, 1, RingLayout(compressor_ring(ratio), width)))

    if csa:
        compressed("csa", csa, CSA_RATIO)
        layout = IndexLayout(index_dtype, config.index_head_dim, hadamard=index_hadamard)
        groups.append(CacheGroup("index", csa, Lifetime.CONTEXT, CSA_RATIO, layout))
        ring("csa_ring", csa, CSA_RATIO, config.head_dim)
        ring("index_ring", csa, CSA_RATIO, config.index_head_dim)
    if hca and config.hca_ratio is not None:
        compressed("hca", hca, config.hca_ratio)
        ring("hca_ring", hca, config.hca_ratio, config.head_dim)
    return CacheGroups(tuple(groups))


def layer_caches(config: ModelConfig, pools: CachePools) -> list[LayerCache]:
    """What every layer reads and writes, in order."""

    def paged(name: str, layer: int) -> PagedKV:
        layout = pools.groups[name].layout
        assert isinstance(layout, KVLayout)
        return PagedKV(pools.layer(name, layer), layout)

    def cache(layer: int, kind: LayerKind) -> LayerCache:
        window = paged("window", layer)
        if kind is LayerKind.SWA:
            return WindowCache(window)
        if kind is LayerKind.HCA:
            return HcaCache(window, paged("hca", layer), pools.layer("hca_ring", layer))
        layout = pools.groups["index"].layout
        assert isinstance(layout, IndexLayout)
        index = PagedIndex(pools.layer("index", layer), layout)
        return CsaCache(
            window, paged("csa", layer), pools.layer("csa_ring", layer), index, pools.layer("index_ring", layer)
        )

    return [cache(layer, kind) for layer, kind in enumerate(config.layer_kinds)]
