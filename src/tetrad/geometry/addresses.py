"""Where everything lies: page layouts, and every address formula.

A *page* is the bytes of one block in one layer's cache. Inside a page the entries' data come first and their scales
after them, so that a page can be copied as one run of bytes. All addresses are int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor

from tetrad.errors import ConfigError, check_whole
from tetrad.formats.arguments import check_is_tensor, described
from tetrad.geometry.sizes import CSA_ENTRIES, ceil_div

FP4_GROUP = 32
"""Channels of an index key that share one e8m0 scale."""

KV_GROUP = 64
"""Rope-free channels of a main KV entry that share one e8m0 scale."""

PAGE_ALIGNMENT = 16
"""Pages start at multiples of this many bytes, so that a kernel can load 16 bytes at once."""

SCALE_ALIGNMENT = 8
"""The e8m0 scales of an FP8 main KV entry are padded to a multiple of this many bytes."""


_OTHER_NAMES = {
    "mxfp4": "fp4",
    "float4_e2m1fn_x2": "fp4",
    "float8_e4m3fn": "fp8",
    "bfloat16": "bf16",
    "float32": "fp32",
}
"""What else people, and torch, call the dtypes of a cache."""


class _CacheDtype(StrEnum):
    """A dtype of a cache, made from its name in any case, from another name of it, or from the torch dtype."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        if isinstance(value, (str, torch.dtype)):
            name = str(value).removeprefix("torch.").lower()
            for member in cls:
                if member.value == _OTHER_NAMES.get(name, name):
                    return member
        choices = ", ".join(repr(member.value) for member in cls)
        raise ConfigError(f"{described(value)} is no {cls.__name__}; choose one of {choices}")


class IndexDtype(_CacheDtype):
    """How the indexer's keys are stored. ``IndexDtype("fp4")`` and ``IndexDtype(torch.bfloat16)`` work too."""

    FP4 = "fp4"
    FP8 = "fp8"
    BF16 = "bf16"
    FP32 = "fp32"


class KVDtype(_CacheDtype):
    """How window and compressed KV entries are stored. ``KVDtype("fp8")`` works too."""

    FP8 = "fp8"
    BF16 = "bf16"
    FP32 = "fp32"


_ITEM_BYTES = {"bf16": 2, "fp32": 4}
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _set_fields(layout: object, **values: object) -> None:
    """What an ``__init__`` of a frozen dataclass does for itself."""
    for name, value in values.items():
        object.__setattr__(layout, name, value)


@dataclass(frozen=True, slots=True, init=False)
class IndexLayout:
    """One page of the index cache: 64 keys of ``head_dim`` channels, and whether those are rotated.

    ======  ==========================================  ==============================  ===================
    dtype   data                                        scales                          bytes (128 channels)
    ======  ==========================================  ==============================  ===================
    fp4     64 x D/2, low nibble = even channel         64 x D/32 e8m0                  4096 + 256 = 4352
    fp8     64 x D, E4M3                                64 x fp32                       8192 + 256 = 8448
    bf16    64 x D bf16                                 none                            16384
    fp32    64 x D fp32                                 none                            32768
    ======  ==========================================  ==============================  ===================

    ``hadamard`` says that what is stored is H k / sqrt(D) instead of k (:mod:`tetrad.formats.hadamard`), as
    DeepSeek-V4's indexer was trained. It changes no byte's place. Whoever writes keys and whoever makes queries for
    them read it here, so both rotate or neither does.

    Args:
        dtype: an :class:`IndexDtype`, or its name ("fp4"), or the torch dtype
        head_dim: channels of a key, at least 1: a multiple of 32 for fp4, a power of two for ``hadamard``
        hadamard: False leaves the rotation out, on queries and keys alike

    Raises:
        ConfigError: for an unknown dtype, or a number of channels that cannot be stored or rotated
        TypeError: if ``head_dim`` is no plain int or ``hadamard`` no bool
    """

    dtype: IndexDtype
    head_dim: int
    hadamard: bool

    def __init__(self, dtype: IndexDtype | str | torch.dtype, head_dim: int, *, hadamard: bool = True) -> None:
        _set_fields(self, dtype=IndexDtype(dtype), head_dim=head_dim, hadamard=hadamard)
        check_whole("head_dim", self.head_dim, 1, error=ConfigError)
        if not isinstance(self.hadamard, bool):
            raise TypeError(f"hadamard must be True or False; got {described(self.hadamard)}")
        if self.dtype is IndexDtype.FP4 and self.head_dim % FP4_GROUP:
            raise ConfigError(
                f"index_head_dim {self.head_dim} is not a multiple of {FP4_GROUP}, so its keys cannot be stored in "
                f"fp4; choose index_cache_dtype fp8 or bf16"
            )
        if self.hadamard and self.head_dim & (self.head_dim - 1):
            raise ConfigError(
                f"head_dim {self.head_dim} is not a power of two, so its keys cannot be rotated by Hadamard; pass "
                f"hadamard=False to keep queries and keys as they are"
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


@dataclass(frozen=True, slots=True, init=False)
class KVLayout:
    """One page of ``entries`` main KV entries (window or compressed).

    fp8: ``entries`` x [nope E4M3, rope in ``rope_dtype``], then ``entries`` x ceil(nope/64) e8m0 bytes padded to 8.
    bf16 and fp32: ``entries`` x (nope + rope) elements.
    For the released models an fp8 entry is 448 + 128 + 8 = 584 bytes.

    Args:
        dtype: a :class:`KVDtype`, or its name ("fp8"), or the torch dtype
        entries: entries in a page, at least 1
        nope_dim: channels that RoPE leaves alone; ``rope_dim``: those that it turns, which come last. Either may be 0,
            not both
        rope_dtype: torch.bfloat16 or torch.float32, of the channels that RoPE rotates, in an fp8 entry

    Raises:
        ConfigError: for an unknown dtype or a number that is too small
        TypeError: if a number is no plain int
    """

    dtype: KVDtype
    entries: int
    nope_dim: int
    rope_dim: int
    rope_dtype: torch.dtype

    def __init__(
        self,
        dtype: KVDtype | str | torch.dtype,
        entries: int,
        nope_dim: int,
        rope_dim: int,
        rope_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        numbers = {"entries": entries, "nope_dim": nope_dim, "rope_dim": rope_dim}
        _set_fields(self, dtype=KVDtype(dtype), rope_dtype=rope_dtype, **numbers)
        for name, least in (("entries", 1), ("nope_dim", 0), ("rope_dim", 0)):
            check_whole(name, getattr(self, name), least, error=ConfigError)
        if not self.head_dim:
            raise ConfigError("nope_dim and rope_dim are both 0; an entry has at least one channel")
        if self.rope_dtype not in _TORCH_DTYPES.values():
            raise ConfigError(f"rope_dtype must be torch.bfloat16 or torch.float32; got {described(self.rope_dtype)}")

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


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Pages of one layer's cache and how they are laid out: one value.

    ``pages`` is uint8 [pages, stride], at least ``layout.page_bytes`` wide. Slot s is entry ``s % layout.entries`` of
    page ``s // layout.entries``. Only what was written may be read.
    """

    pages: Tensor
    layout: KVLayout

    def __post_init__(self) -> None:
        check_layout(self.layout, KVLayout)
        _check_pages(self.pages, self.layout)

    @property
    def slots(self) -> int:
        """How many entries there is room for."""
        return self.pages.shape[0] * self.layout.entries


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """The same for index keys, 64 in a page."""

    pages: Tensor
    layout: IndexLayout

    def __post_init__(self) -> None:
        check_layout(self.layout, IndexLayout)
        _check_pages(self.pages, self.layout)


def page_stride(layout: PageLayout) -> int:
    """Bytes from one page to the next: the page, rounded up to a multiple of 16."""
    check_layout(layout)
    return ceil_div(layout.page_bytes, PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def element_dtype(layout: PageLayout) -> torch.dtype:
    """The torch dtype of the elements of an unquantised (bf16 or fp32) layout.

    Raises:
        ConfigError: for a quantised one, which has no elements of one dtype
    """
    check_layout(layout)
    if layout.dtype not in _TORCH_DTYPES:
        raise ConfigError(f"a page in {layout.dtype} has data and scales, not elements of one dtype")
    return _TORCH_DTYPES[layout.dtype]


def check_layout(layout: object, kind: type[IndexLayout] | type[KVLayout] | None = None) -> None:
    """Refuse what is not a layout, or not one of the ``kind``.

    Raises:
        TypeError: with what to pass instead
    """
    if isinstance(layout, kind or PageLayout):
        return
    wanted = {
        IndexLayout: 'an IndexLayout, such as IndexLayout("fp4", 128)',
        KVLayout: 'a KVLayout, such as KVLayout("fp8", 64, 448, 64)',
    }
    wish = wanted[kind] if kind else " or ".join(wanted.values())
    raise TypeError(f"layout must be {wish}; got {described(layout)}")


def data_rows(pages: Tensor, layout: PageLayout) -> Tensor:
    """The data of every entry: a view uint8 [pages, entries, data_row_bytes] of ``pages`` uint8 [pages, stride].

    Raises:
        TypeError: for a wrong type or dtype
        ValueError: for a wrong shape
    """
    _check_pages(pages, layout)
    return pages[:, : layout.entries * layout.data_row_bytes].unflatten(1, (layout.entries, layout.data_row_bytes))


def scale_rows(pages: Tensor, layout: PageLayout) -> Tensor:
    """The scales of every entry: a view uint8 [pages, entries, scale_row_bytes] of ``pages`` uint8 [pages, stride].

    Errors as for :func:`data_rows`.
    """
    _check_pages(pages, layout)
    start = layout.entries * layout.data_row_bytes
    end = start + layout.entries * layout.scale_row_bytes
    return pages[:, start:end].unflatten(1, (layout.entries, layout.scale_row_bytes))


def entry_slots(tables: Tensor, request: Tensor, entry: Tensor, entries_per_block: int) -> Tensor:
    """The slot of an entry: ``table[request, entry // E] * E + entry % E``.

    tables: int32 [requests, blocks]; request, entry: integer tensors of one shape (broadcastable). Entries and
    requests must be in range; :func:`tetrad.ops.physical_slots` takes -1 for none. Returns int64 slots; slot ``s`` is
    entry ``s % E`` of page ``s // E``.
    """
    _check_integers(tables=tables, request=request, entry=entry)
    check_whole("entries_per_block", entries_per_block, 1)
    entry = entry.long()
    block = tables[request.long(), entry // entries_per_block].long()
    return block * entries_per_block + entry % entries_per_block


def split_slots(slots: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """(page, entry in the page) of int64 ``slots``."""
    check_layout(layout)
    _check_integers(slots=slots)
    return slots // layout.entries, slots % layout.entries


def ring_slots(request: Tensor, position: Tensor, ring: int) -> Tensor:
    """The slot of a position where each request has a ring: ``request * ring + position % ring``, int64."""
    _check_integers(request=request, position=position)
    check_whole("ring", ring, 1)
    return request.long() * ring + position.long() % ring


def check_paged(cache: object) -> None:
    """Refuse what is not a :class:`PagedKV`.

    Raises:
        TypeError: with what to pass instead
    """
    if not isinstance(cache, PagedKV):
        raise TypeError(f"cache must be PagedKV(pages, layout); got {described(cache)}")


def _check_pages(pages: Tensor, layout: PageLayout) -> None:
    check_layout(layout)
    check_is_tensor("pages", pages)
    if pages.dtype != torch.uint8:
        raise TypeError(f"pages must be uint8 [pages, bytes]; got {pages.dtype}")
    if pages.dim() != 2 or pages.shape[1] < layout.page_bytes:
        raise ValueError(
            f"pages must be uint8 [pages, bytes] with at least {layout.page_bytes} bytes a page; got the shape "
            f"{list(pages.shape)}"
        )


def _check_integers(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        check_is_tensor(name, tensor)
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError(f"{name} must be a tensor of integers; got {tensor.dtype}")
