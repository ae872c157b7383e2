"""The indexer's scores in torch: the oracle of every kernel, and the back end of devices without one.

Row-invariant: a row's bits depend on its query, its weights and the keys that it sees, never on what else is in the
call. Three things make it so. Keys are scored in blocks of 256 from entry 0, also where fewer are visible. Every
product is one [heads, D] x [D, 256] item of a batch, with heads padded to a multiple of 8 and a batch of at least 2,
because a matrix library may choose another kernel, which rounds differently, for other shapes or for a single item.
And the sum over heads is a reduction of one shape.

Reads the lengths on the host, so it cannot be captured in a CUDA graph, and it needs no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.geometry import IndexLayout, ceil_div, entry_slots
from tetrad.ops.index_keys.encoding import decode, from_rows
from tetrad.ops.paged_rows import gather_rows
from tetrad.ops.plan_indexer.plan import BLOCK, IndexerPlan
from tetrad.ops.row_invariant import LANES, ROW_MULTIPLE, batched_product
from tetrad.ops.temporaries import temporary_bytes

_CHUNK_BYTES = 16 << 20
"""Bytes of temporaries that are aimed at; changes no result. Many more are slower: they leave the CPU's cache."""

_MANY_ROWS = 8
"""Rows of one request that share its keys as they are; fewer get a copy of them, in a batch of requests."""

_ORDINARY_EXPONENT = 46
"""With scales from 2^-46 to 2^46 no product of two FP4 or E4M3 values, and no sum of a thousand of them, leaves the
normal fp32 numbers. Others are scored in fp64, which has room for any two scales."""


@dataclass(slots=True)
class _Group:
    """Adjacent rows [start, stop) of one request, of which the furthest sees ``end`` entries."""

    request: int
    start: int
    stop: int
    end: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def blocks(self) -> int:
        return ceil_div(self.end, BLOCK)


@dataclass(frozen=True, slots=True)
class _Vectors:
    """Queries [..., heads, D] or keys [..., D] as stored, and where their scales are beyond the ordinary.

    ``wide`` is bool [...], one for each row or key, None where nothing is.
    """

    values: Tensor
    scales: Tensor | None
    wide: Tensor | None

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """In ``dtype``, the channels padded with zeros to a multiple of 16."""
        x = decode(self.values, self.scales, dtype)
        missing = -x.shape[-1] % LANES
        return torch.nn.functional.pad(x, (0, missing)) if missing else x


def indexer_logits(
    q: Tensor,
    q_scale: Tensor | None,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    visible_end: Tensor,
    out: Tensor,
    *,
    layout: IndexLayout,
    plan: IndexerPlan | None = None,
) -> None:
    """Fill ``out`` fp32 [R, width]; see :func:`tetrad.ops.indexer_logits.indexer_logits`. ``plan`` is not needed.

    fp4 and fp8 scores are those of the dequantised values also where the values themselves leave the range of fp32.
    """
    scorer = _Scorer(q, q_scale, weights, cache, block_tables, visible_end, out, layout)
    few: list[_Group] = []
    for group in _groups(row_request.tolist(), visible_end.tolist()):
        if group.rows >= _MANY_ROWS:
            scorer.score_group(group)
        else:
            few.append(group)
    scorer.score_small_groups(few)


def _groups(requests: list[int], ends: list[int]) -> list[_Group]:
    """The rows that see anything, by request."""
    groups: list[_Group] = []
    for row, (request, end) in enumerate(zip(requests, ends, strict=True)):
        if request < 0 or end <= 0:
            continue
        last = groups[-1] if groups else None
        if last is not None and last.request == request and last.stop == row:
            last.stop, last.end = row + 1, max(last.end, end)
        else:
            groups.append(_Group(request, row, row + 1, end))
    return groups


@dataclass(frozen=True, slots=True)
class _Scorer:
    """The arguments of one call."""

    q: Tensor
    q_scale: Tensor | None
    weights: Tensor
    cache: Tensor
    block_tables: Tensor
    visible_end: Tensor
    out: Tensor
    layout: IndexLayout

    def score_group(self, group: _Group) -> None:
        """Many rows of one request: block by block, its keys dequantised once for a chunk of rows."""
        rows_at_once = max(1, temporary_bytes(self.q.device, _CHUNK_BYTES) // self._item_bytes(keys=False))
        request = torch.tensor([group.request], dtype=torch.int64, device=self.q.device)
        for start in range(group.start, group.stop, rows_at_once):
            rows = slice(start, min(start + rows_at_once, group.stop))
            ends = self.visible_end[rows]
            # in fp32 once for all blocks; in fp64 only where a block needs it
            query = self._queries(rows)
            query_fp32 = self._padded(query, torch.float32)
            shortest, longest = (int(end) for end in torch.aminmax(ends))
            for block in range(ceil_div(longest, BLOCK)):
                first = block * BLOCK
                keys = self._keys(request, torch.tensor([block], dtype=torch.int64, device=self.q.device), longest)
                scores = self._score(query, query_fp32, keys, None, rows)
                columns = slice(first, min(first + BLOCK, longest))
                target, scores = self.out[rows, columns], scores[:, : columns.stop - first]
                if shortest < columns.stop:
                    column = torch.arange(columns.start, columns.stop, dtype=torch.int64, device=self.q.device)
                    scores = torch.where(column < ends.unsqueeze(1), scores, target)
                target.copy_(scores)

    def score_small_groups(self, groups: list[_Group]) -> None:
        """Many requests of few rows: blocks of different requests in one batch, each dequantised once."""
        for group_of, block in self._batches(groups):
            device = self.q.device
            requests, starts, rows, ends = torch.tensor(
                [(group.request, group.start, group.rows, group.end) for group in group_of],
                dtype=torch.int64,
                device=device,
            ).unbind(1)
            blocks = torch.tensor(block, dtype=torch.int64, device=device)
            keys = self._keys(requests, blocks, ends)
            # one item for every row of every block
            count = sum(group.rows for group in group_of)
            item = torch.repeat_interleave(rows, output_size=count)
            row = starts[item] + torch.arange(count, dtype=torch.int64, device=device) - (rows.cumsum(0) - rows)[item]
            query = self._queries(row)
            scores = self._score(query, self._padded(query, torch.float32), keys, item, row)
            column = blocks[item].unsqueeze(1) * BLOCK + torch.arange(BLOCK, dtype=torch.int64, device=device)
            visible = column < self.visible_end[row].unsqueeze(1)
            self.out[row.unsqueeze(1).expand(-1, BLOCK)[visible], column[visible]] = scores[visible]

    def _batches(self, groups: list[_Group]) -> Iterator[tuple[list[_Group], list[int]]]:
        """(group, block) of every key block, in batches of bounded size."""
        limit = max(1, temporary_bytes(self.q.device, _CHUNK_BYTES) // self._item_bytes(keys=True))
        group_of: list[_Group] = []
        block_of: list[int] = []
        items = 0
        for group in groups:
            for block in range(group.blocks):
                if items and items + group.rows > limit:
                    yield group_of, block_of
                    group_of, block_of, items = [], [], 0
                group_of.append(group)
                block_of.append(block)
                items += group.rows
        if items:
            yield group_of, block_of

    def _item_bytes(self, *, keys: bool) -> int:
        """fp32 bytes of one item: its query, its scores, and its keys if it has a copy of its own."""
        heads, dim = self.q.shape[1] + ROW_MULTIPLE, self.layout.head_dim + LANES
        return 4 * (heads * dim + heads * BLOCK + (2 * BLOCK * dim if keys else 0))

    def _queries(self, rows: slice | Tensor) -> _Vectors:
        scales = None if self.q_scale is None else self.q_scale[rows]
        wide = _beyond_ordinary(scales)
        return _Vectors(self.q[rows], scales, None if wide is None else wide.flatten(1).any(1))

    def _keys(self, requests: Tensor, blocks: Tensor, ends: Tensor | int) -> _Vectors:
        """The keys of N blocks, [N, 256, ...]. Behind the end the last visible key is repeated: no other is read."""
        entry = blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK, dtype=torch.int64, device=blocks.device)
        entry = torch.minimum(entry, torch.as_tensor(ends, dtype=torch.int64, device=blocks.device).view(-1, 1) - 1)
        slots = entry_slots(self.block_tables, requests.unsqueeze(1), entry, self.layout.entries)
        values, scales = from_rows(*gather_rows(self.cache, slots, self.layout), self.layout)
        wide = _beyond_ordinary(scales)
        return _Vectors(values, scales, None if wide is None else wide.view(*slots.shape, -1).any(-1))

    def _score(
        self, query: _Vectors, query_fp32: Tensor, keys: _Vectors, item: Tensor | None, rows: slice | Tensor
    ) -> Tensor:
        """fp32 [M, 256] of M rows against the keys of their ``item``, or all against the only one."""
        weights = self.weights[rows]
        scores = _weighted_sum(query_fp32, _spread(keys.decoded(torch.float32), item, query_fp32), weights)
        if query.wide is None or keys.wide is None:
            return scores
        wide = query.wide.unsqueeze(1) | (keys.wide if item is None else keys.wide[item])
        if not wide.any():
            return scores
        query_fp64 = self._padded(query, torch.float64)
        exact = _weighted_sum(query_fp64, _spread(keys.decoded(torch.float64), item, query_fp64), weights.double())
        return torch.where(wide, exact.float(), scores)

    def _padded(self, query: _Vectors, dtype: torch.dtype) -> Tensor:
        """[M, heads, D] with zero heads up to a multiple of 8, always a copy: the caller's may lie anywhere."""
        x = query.decoded(dtype)
        padded = x.new_zeros((x.shape[0], x.shape[1] + -x.shape[1] % ROW_MULTIPLE, x.shape[2]))
        padded[:, : x.shape[1]] = x
        return padded


def _spread(keys: Tensor, item: Tensor | None, query: Tensor) -> Tensor:
    """The keys [M, 256, D] of every row: a copy for each, or one for all without copying."""
    return keys.expand(query.shape[0], -1, -1) if item is None else keys[item]


def _weighted_sum(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """SUM_h weights[m, h] * relu(<query[m, h], keys[m, j]>): [M, 256]."""
    if query.shape[0] == 1:
        # a batch of one may be computed by another kernel than a batch of more
        return _weighted_sum(query.expand(2, -1, -1), keys.expand(2, -1, -1), weights.expand(2, -1))[:1]
    dots = batched_product(query, keys.transpose(1, 2))[:, : weights.shape[1]]
    # relu keeps NaN, as a maximum with zero need not
    return dots.relu_().mul_(weights.unsqueeze(-1)).sum(1)


def _beyond_ordinary(scales: Tensor | None) -> Tensor | None:
    """Where scales (e8m0 bytes or fp32) are so far from 1 that fp32 might not hold a product; NaN is not."""
    if scales is None:
        return None
    if scales.dtype == torch.uint8:
        exponent = scales.to(torch.int16) - 127
        return (exponent.abs() > _ORDINARY_EXPONENT) & (scales != 255)
    size = scales.abs()
    return (size > 2.0**_ORDINARY_EXPONENT) | (size < 2.0**-_ORDINARY_EXPONENT)
