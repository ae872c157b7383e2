"""Where everything lies: block sizes, page layouts, and every address formula.

A *block* is 256 original tokens of one request. One block table per request drives three caches at once: block ``b``
holds 64 CSA entries, 64 index entries and ``256 / hca_ratio`` HCA entries. The window cache has blocks (and a table)
of its own, of 256 raw tokens each.

A *page* is the bytes of one block in one layer's cache. Inside a page the entries' data come first and their scales
after them, so that a page can be copied as one run of bytes. All addresses are int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from tetrad.errors import ConfigError

BLOCK_SIZE = 256
"""Original tokens in a block."""

CSA_RATIO = 4
"""Original tokens behind one CSA entry (and one index entry)."""

CSA_ENTRIES = BLOCK_SIZE // CSA_RATIO
"""CSA entries, and index entries, in a block."""

FP4_GROUP = 32
"""Channels of an index key that share one e8m0 scale."""

KV_GROUP = 64
"""Rope-free channels of a main KV entry that share one e8m0 scale."""

PAGE_ALIGNMENT = 16
"""Pages start at multiples of this many bytes, so that a kernel can load 16 bytes at once."""

SCALE_ALIGNMENT = 8
"""The e8m0 scales of an FP8 main KV entry are padded to a multiple of this many bytes."""


class IndexDtype(StrEnum):
    """How the indexer's keys are stored."""

    FP4 = "fp4"
    FP8 = "fp8"
    BF16 = "bf16"
    FP32 = "fp32"


class KVDtype(StrEnum):
    """How window and compressed KV entries are stored."""

    FP8 = "fp8"
    BF16 = "bf16"
    FP32 = "fp32"


_ITEM_BYTES = {"bf16": 2, "fp32": 4}
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def ceil_div(numerator: int, denominator: int) -> int:
    """The least integer that is not below ``numerator / denominator``."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """One page of the index cache: 64 keys of ``head_dim`` channels.

    ======  ==========================================  ==============================  ===================
    dtype   data                                        scales                          bytes (128 channels)
    ======  ==========================================  ==============================  ===================
    fp4     64 x D/2, low nibble = even channel         64 x D/32 e8m0                  4096 + 256 = 4352
    fp8     64 x D, E4M3                                64 x fp32                       8192 + 256 = 8448
    bf16    64 x D bf16                                 none                            16384
    fp32    64 x D fp32                                 none                            32768
    ======  ==========================================  ==============================  ===================
    """

    dtype: IndexDtype
    head_dim: int

    def __post_init__(self) -> None:
        if self.dtype is IndexDtype.FP4 and self.head_dim % FP4_GROUP:
            raise ConfigError(
                f"index_head_dim {self.head_dim} is not a multiple of {FP4_GROUP}, so its keys cannot be stored in "
                f"fp4; choose index_cache_dtype fp8 or bf16"
            )

    @property
    def entries(self) -> int:
        """Keys in a page."""
        return CSA_ENTRIES

    @property
    def data_row_bytes(self) -> int:
        """Bytes of one key without its scales."""
        if self.dtype is IndexDtype.FP4:
            return self.head_dim // 2
        if self.dtype is IndexDtype.FP8:
            return self.head_dim
        return self.head_dim * _ITEM_BYTES[self.dtype]

    @property
    def scale_row_bytes(self) -> int:
        """Bytes of one key's scales."""
        if self.dtype is IndexDtype.FP4:
            return self.head_dim // FP4_GROUP
        return 4 if self.dtype is IndexDtype.FP8 else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.entries * (self.data_row_bytes + self.scale_row_bytes)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One page of ``entries`` main KV entries (window or compressed).

    fp8: ``entries`` x [nope E4M3, rope in ``rope_dtype``], then ``entries`` x ceil(nope/64) e8m0 bytes padded to 8.
    bf16 and fp32: ``entries`` x (nope + rope) elements.
    For the released models an fp8 entry is 448 + 128 + 8 = 584 bytes.
    """

    dtype: KVDtype
    entries: int
    nope_dim: int
    rope_dim: int
    rope_dtype: torch.dtype = torch.bfloat16

    @property
    def head_dim(self) -> int:
        """Channels of an entry."""
        return self.nope_dim + self.rope_dim

    @property
    def scale_groups(self) -> int:
        """e8m0 scales of an fp8 entry."""
        return ceil_div(self.nope_dim, KV_GROUP)

    @property
    def data_row_bytes(self) -> int:
        """Bytes of one entry without its scales."""
        if self.dtype is KVDtype.FP8:
            return self.nope_dim + self.rope_dim * self.rope_dtype.itemsize
        return self.head_dim * _ITEM_BYTES[self.dtype]

    @property
    def scale_row_bytes(self) -> int:
        """Bytes of one entry's scales, padding included."""
        if self.dtype is not KVDtype.FP8:
            return 0
        return ceil_div(self.scale_groups, SCALE_ALIGNMENT) * SCALE_ALIGNMENT

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.entries * (self.data_row_bytes + self.scale_row_bytes)


PageLayout = IndexLayout | KVLayout


def page_stride(layout: PageLayout) -> int:
    """Bytes from one page to the next: the page, rounded up to a multiple of 16."""
    return ceil_div(layout.page_bytes, PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def element_dtype(layout: PageLayout) -> torch.dtype:
    """The torch dtype of the elements of an unquantised (bf16 or fp32) layout."""
    return _TORCH_DTYPES[layout.dtype]


def data_rows(pages: Tensor, layout: PageLayout) -> Tensor:
    """The data of every entry: a view uint8 [pages, entries, data_row_bytes] of ``pages`` uint8 [pages, stride]."""
    return pages[:, : layout.entries * layout.data_row_bytes].unflatten(1, (layout.entries, layout.data_row_bytes))


def scale_rows(pages: Tensor, layout: PageLayout) -> Tensor:
    """The scales of every entry: a view uint8 [pages, entries, scale_row_bytes] of ``pages`` uint8 [pages, stride]."""
    start = layout.entries * layout.data_row_bytes
    end = start + layout.entries * layout.scale_row_bytes
    return pages[:, start:end].unflatten(1, (layout.entries, layout.scale_row_bytes))


def entry_slots(tables: Tensor, request: Tensor, entry: Tensor, entries_per_block: int) -> Tensor:
    """The slot of an entry: ``table[request, entry // E] * E + entry % E``.

    tables: int32 [requests, blocks]; request, entry: integer tensors of one shape (broadcastable). Entries and
    requests must be in range. Returns int64 slots; slot ``s`` is entry ``s % E`` of page ``s // E``.
    """
    entry = entry.long()
    block = tables[request.long(), entry // entries_per_block].long()
    return block * entries_per_block + entry % entries_per_block


def split_slots(slots: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """(page, entry in the page) of int64 ``slots``."""
    return slots // layout.entries, slots % layout.entries


def ring_slots(state_slot: Tensor, position: Tensor, ring: int) -> Tensor:
    """The place of a position in the compressor state: ``state_slot * ring + position % ring``, int64."""
    return state_slot.long() * ring + position.long() % ring


def state_ring(ratio: int) -> int:
    """Positions that a compressor must remember: two blocks where they overlap (ratio 4), else one.

    Source: the pooling window of 2 * 4 tokens in CSA layers and of ``ratio`` tokens in HCA layers.
    """
    return 2 * ratio if ratio == CSA_RATIO else ratio


def blocks_for(tokens: int) -> int:
    """Blocks that hold ``tokens`` original tokens."""
    return ceil_div(tokens, BLOCK_SIZE)


def first_window_block(position: int, window: int) -> int:
    """The first window block that a query at ``position`` (or a later one) still reads."""
    return max(0, position - window + 1) // BLOCK_SIZE


def window_blocks_bound(max_num_seqs: int, max_num_batched_tokens: int, window: int) -> int:
    """Window blocks that any step can need at once, so that none is ever short of one.

    A request with n new tokens touches ceil((window - 1 + n) / 256) + 1 blocks at most; summed over requests this is
    at most the figure returned.
    """
    per_request = ceil_div(window - 1, BLOCK_SIZE) + 2
    return max_num_seqs * per_request + ceil_div(max_num_batched_tokens, BLOCK_SIZE)


def check_block_size(block_size: int) -> None:
    """Refuse every block size but 256, with the reason."""
    if block_size != BLOCK_SIZE:
        raise ConfigError(
            f"block_size {block_size} is not supported: a block is {BLOCK_SIZE} tokens, so that it holds the "
            f"{CSA_ENTRIES} index keys of one page, which the scoring kernels read together; leave --block-size out"
        )
