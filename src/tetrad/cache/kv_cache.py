"""The tensors behind the caches: one slice per layer of a few large allocations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.cache.block_manager import CacheCopies
from tetrad.cache.spec import CacheSizes, CacheSpec
from tetrad.geometry import CSA_RATIO, IndexLayout, KVLayout, PageLayout, page_stride, state_ring


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's view of the caches. Pages are uint8 [pages, page bytes]; states are fp32 [slots * ring, 2, width].

    What a layer kind does not have is None. Nothing is initialised: only what was written may be read.
    """

    window_pages: Tensor
    window_layout: KVLayout
    compressed_pages: Tensor | None = None
    compressed_layout: KVLayout | None = None
    index_pages: Tensor | None = None
    index_layout: IndexLayout | None = None
    state: Tensor | None = None
    index_state: Tensor | None = None


class KVCaches:
    """All caches of a model on one device. ``layers[i]`` is what layer i reads and writes."""

    def __init__(self, spec: CacheSpec, sizes: CacheSizes, device: torch.device | str) -> None:
        self.spec, self.sizes = spec, sizes

        def pages(layers: int, count: int, layout: PageLayout) -> Tensor:
            stride = page_stride(layout)
            return torch.empty((layers, count, stride), dtype=torch.uint8, device=device)[..., : layout.page_bytes]

        def states(layers: int, ratio: int, dim: int) -> Tensor:
            places = sizes.state_slots * state_ring(ratio)
            return torch.empty((layers, places, 2, spec.state_width(ratio, dim)), dtype=torch.float32, device=device)

        count = spec.csa_layers
        self.window = pages(len(spec.layer_ratios), sizes.window_blocks, spec.window_layout)
        self.csa = self.index = self.csa_state = self.index_state = self.hca = self.hca_state = None
        if count:
            self.csa = pages(count, sizes.blocks, spec.compressed_layout(CSA_RATIO))
            self.index = pages(count, sizes.blocks, spec.index_layout)
            self.csa_state = states(count, CSA_RATIO, spec.head_dim)
            self.index_state = states(count, CSA_RATIO, spec.index_head_dim)
        if spec.hca_ratio is not None:
            self.hca = pages(spec.hca_layers, sizes.blocks, spec.compressed_layout(spec.hca_ratio))
            self.hca_state = states(spec.hca_layers, spec.hca_ratio, spec.head_dim)
        self.layers = [self._layer(index) for index in range(len(spec.layer_ratios))]

    def _layer(self, index: int) -> LayerCache:
        spec, ratio = self.spec, self.spec.layer_ratios[index]
        window = self.window[index]
        before = spec.layer_ratios[:index]
        if ratio == 0:
            return LayerCache(window, spec.window_layout)
        if ratio == CSA_RATIO:
            assert self.csa is not None and self.index is not None
            assert self.csa_state is not None and self.index_state is not None
            place = before.count(CSA_RATIO)
            return LayerCache(
                window,
                spec.window_layout,
                self.csa[place],
                spec.compressed_layout(ratio),
                self.index[place],
                spec.index_layout,
                self.csa_state[place],
                self.index_state[place],
            )
        assert self.hca is not None and self.hca_state is not None
        place = sum(other not in (0, CSA_RATIO) for other in before)
        return LayerCache(
            window, spec.window_layout, self.hca[place], spec.compressed_layout(ratio), state=self.hca_state[place]
        )

    def copy(self, copies: CacheCopies) -> None:
        """Copy pages and compressor states, all from what was there before."""
        for tensor in (self.csa, self.index, self.hca):
            _copy_along(tensor, copies.blocks, 1)
        _copy_along(self.window, copies.window_blocks, 1)
        for state, ratio in (
            (self.csa_state, CSA_RATIO),
            (self.index_state, CSA_RATIO),
            (self.hca_state, self.spec.hca_ratio),
        ):
            if state is not None and ratio is not None:
                _copy_along(state.unflatten(1, (self.sizes.state_slots, state_ring(ratio))), copies.state_slots, 1)

    def tensors(self) -> dict[str, Tensor]:
        """Every allocation by name, for those who count or poison them."""
        names = ("window", "csa", "index", "hca", "csa_state", "index_state", "hca_state")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def poison(self) -> None:
        """Fill everything with bytes that read as NaN in every format, so that a read of unwritten memory shows."""
        for tensor in self.tensors().values():
            tensor.fill_(0xFF if tensor.dtype is torch.uint8 else float("nan"))


def _copy_along(tensor: Tensor | None, pairs: list[tuple[int, int]], dim: int) -> None:
    if tensor is None or not pairs:
        return
    source, target = torch.tensor(pairs, dtype=torch.int64, device=tensor.device).unbind(1)
    tensor.index_copy_(dim, target, tensor.index_select(dim, source))
