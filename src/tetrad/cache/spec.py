"""What the caches of a model hold and how many bytes they take: computed from the layouts, never guessed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tetrad.geometry import (
    BLOCK_SIZE,
    CSA_RATIO,
    IndexDtype,
    IndexLayout,
    KVDtype,
    KVLayout,
    page_stride,
    state_ring,
)

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The caches of one model. ``layer_ratios``: 0 window only, 4 CSA, any other HCA; dims in channels.

    ``index_hadamard``: whether index keys, and with them index queries, are rotated (:class:`IndexLayout`).
    """

    layer_ratios: tuple[int, ...]
    head_dim: int
    rope_dim: int
    index_head_dim: int
    window: int
    kv_dtype: KVDtype
    index_dtype: IndexDtype
    compute_dtype: torch.dtype
    index_hadamard: bool = True

    @property
    def csa_layers(self) -> int:
        """Layers with an indexer."""
        return self.layer_ratios.count(CSA_RATIO)

    @property
    def hca_layers(self) -> int:
        """Layers that attend to all of their heavily compressed history."""
        return sum(ratio not in (0, CSA_RATIO) for ratio in self.layer_ratios)

    @property
    def hca_ratio(self) -> int | None:
        """Tokens behind one HCA entry, None without HCA layers."""
        return next((ratio for ratio in self.layer_ratios if ratio not in (0, CSA_RATIO)), None)

    def _kv_layout(self, entries: int) -> KVLayout:
        return KVLayout(self.kv_dtype, entries, self.head_dim - self.rope_dim, self.rope_dim, self.compute_dtype)

    @property
    def window_layout(self) -> KVLayout:
        """A page of 256 raw keys."""
        return self._kv_layout(BLOCK_SIZE)

    def compressed_layout(self, ratio: int) -> KVLayout:
        """A page of the compressed entries of one block: 64 at ratio 4, 256 / ratio otherwise."""
        return self._kv_layout(BLOCK_SIZE // ratio)

    @property
    def index_layout(self) -> IndexLayout:
        """A page of 64 index keys."""
        return IndexLayout(self.index_dtype, self.index_head_dim, hadamard=self.index_hadamard)

    def state_width(self, ratio: int, dim: int) -> int:
        """fp32 channels that a compressor keeps per token, for u and for g each."""
        return 2 * dim if ratio == CSA_RATIO else dim

    @property
    def block_bytes(self) -> dict[str, int]:
        """Bytes that one block takes in the compressed caches, over all layers, by cache."""
        result = {"csa": 0, "index": 0, "hca": 0}
        if self.csa_layers:
            result["csa"] = self.csa_layers * page_stride(self.compressed_layout(CSA_RATIO))
            result["index"] = self.csa_layers * page_stride(self.index_layout)
        if self.hca_ratio is not None:
            result["hca"] = self.hca_layers * page_stride(self.compressed_layout(self.hca_ratio))
        return result

    @property
    def window_block_bytes(self) -> int:
        """Bytes of one window block over all layers."""
        return len(self.layer_ratios) * page_stride(self.window_layout)

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's compressor states over all layers."""
        csa = state_ring(CSA_RATIO) * 2 * _FP32_BYTES
        csa *= self.state_width(CSA_RATIO, self.head_dim) + self.state_width(CSA_RATIO, self.index_head_dim)
        ratio = self.hca_ratio
        hca = state_ring(ratio) * 2 * self.state_width(ratio, self.head_dim) * _FP32_BYTES if ratio else 0
        return self.csa_layers * csa + self.hca_layers * hca

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Bytes by which each compressed cache grows with one more token of context."""
        return {name: size / BLOCK_SIZE for name, size in self.block_bytes.items()}

    @property
    def bytes_per_entry(self) -> dict[str, int]:
        """Bytes of one entry in one layer: a main KV entry and an index key."""
        kv, index = self.compressed_layout(CSA_RATIO), self.index_layout
        return {
            "kv": kv.data_row_bytes + kv.scale_row_bytes,
            "index": index.data_row_bytes + index.scale_row_bytes,
        }


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """How many of everything: blocks of the compressed caches, window blocks, state slots (one per request)."""

    blocks: int
    window_blocks: int
    state_slots: int

    def total_bytes(self, spec: CacheSpec) -> int:
        """Bytes of all caches together."""
        return (
            self.blocks * sum(spec.block_bytes.values())
            + self.window_blocks * spec.window_block_bytes
            + self.state_slots * spec.state_bytes
        )


@dataclass(frozen=True, slots=True)
class CacheDemand:
    """What an engine asks of its caches: blocks and states counted, bytes over all layers."""

    window_blocks: int
    window_block_bytes: int
    states: int  # one per sequence of a step
    state_bytes: int
    block_bytes: int
    blocks_per_sequence: int  # of a sequence of the greatest length

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are there however long the sequences are: window blocks and compressor states."""
        return self.window_blocks * self.window_block_bytes + self.states * self.state_bytes

    def describe_fixed(self) -> str:
        """The arithmetic of ``fixed_bytes``, for a reader."""
        windows, states = self.window_blocks * self.window_block_bytes, self.states * self.state_bytes
        return (
            f"{self.window_blocks} window blocks x {format_bytes(self.window_block_bytes)} = {format_bytes(windows)}, "
            f"{self.states} compressor states x {format_bytes(self.state_bytes)} = {format_bytes(states)}"
        )

    def total_bytes(self, sequences: int) -> int:
        """Bytes with which this many sequences of the greatest length fit."""
        return self.fixed_bytes + sequences * self.blocks_per_sequence * self.block_bytes


def format_bytes(count: float) -> str:
    """``count`` bytes for a reader: "4352 B", "3.4 GiB"."""
    if count < 1024:
        return f"{count:g} B"
    power = min(int(math.log2(count) // 10), 4)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
