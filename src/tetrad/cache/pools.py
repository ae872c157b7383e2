"""The tensors behind the caches: one allocation for each group, a slice of it for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tetrad.cache.groups import CacheGroup, CacheGroups, CacheSizes, Lifetime, RingLayout

Copy = tuple[int, int]
"""(from, to)."""


class CachePools:
    """All caches of a model on one device. Nothing is initialised: only what was written may be read.

    ``pools[name]`` is uint8 [layers, pages, page bytes], or fp32 [layers, requests, places, 2, width] for a ring of a
    compressor.
    """

    def __init__(self, groups: CacheGroups, sizes: CacheSizes, device: torch.device | str) -> None:
        self.groups, self.sizes = groups, sizes
        self.pools = {group.name: self._allocate(group, torch.device(device)) for group in groups}

    def _allocate(self, group: CacheGroup, device: torch.device) -> Tensor:
        layers, pages, layout = len(group.layers), group.pages(self.sizes), group.layout
        if isinstance(layout, RingLayout):
            shape = (layers, pages, layout.places, 2, layout.width)
            return torch.empty(shape, dtype=torch.float32, device=device)
        allocated = torch.empty((layers, pages, group.page_stride), dtype=torch.uint8, device=device)
        return allocated[..., : layout.page_bytes]

    def layer(self, name: str, layer: int) -> Tensor:
        """One layer's slice of a group."""
        return self.pools[name][self.groups[name].layers.index(layer)]

    def copy(self, blocks: Sequence[Copy], requests: Sequence[Copy]) -> None:
        """Copy pages of blocks and rings of requests, all from what was there before."""
        for group in self.groups:
            _copy(self.pools[group.name], blocks if group.lifetime is Lifetime.CONTEXT else requests)

    def poison(self) -> None:
        """Fill everything with bytes that read as NaN in every format, so that a read of unwritten memory shows."""
        for pool in self.pools.values():
            pool.fill_(0xFF if pool.dtype is torch.uint8 else float("nan"))


def _copy(pool: Tensor, pairs: Sequence[Copy]) -> None:
    if not pairs:
        return
    source, target = torch.tensor(pairs, dtype=torch.int64, device=pool.device).unbind(1)
    pool.index_copy_(1, target, pool.index_select(1, source))
