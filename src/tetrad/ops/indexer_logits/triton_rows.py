"""The portable scorer's kernel: one work item, of one row or of several rows of one request."""

from __future__ import annotations

import triton
import triton.language as tl

from tetrad.ops.indexer_logits.triton_exact import exact_scores
from tetrad.ops.indexer_logits.triton_operands import keys_of_page, query_vectors
from tetrad.ops.indexer_logits.triton_sums import weighted_products


@triton.jit
def _score_rows(
    q,
    q_scale,
    weights,
    cache,
    table,
    visible_end,
    out,
    first,
    rows,
    begin,
    end,
    page_stride,
    out_stride,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    LOW: tl.constexpr,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    UNITS: tl.constexpr,
    WIDEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Score entries ``begin`` to ``end`` for ``rows`` rows from ``first`` on, at most ROWS, all of them of the request
    with the block table ``table``; ``end`` is within what the furthest of them sees.
    """
    lane = tl.arange(0, TILE)
    place = lane % 64
    column = tl.arange(0, ROWS * HEAD_TILE)
    # rows lie between the low and the high bits of the head, INNER of them
    head = column % LOW + column // (LOW * INNER) * LOW % HEAD_TILE
    row_of = column // (HEAD_TILE * INNER) * INNER + column // LOW % INNER
    vector = (first + row_of) * HEADS + head
    is_head = head < HEADS
    CHUNKS: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    tl.static_assert(CHUNKS == 1 or ROWS == 1)
    query_a, query_b, w, wide_vectors = query_vectors(  # pyright: ignore[reportGeneralTypeIssues]
        q, q_scale, weights, vector, is_head & (row_of < rows), KIND, DIM, UNITS
    )
    for chunk in range(1, CHUNKS):
        wide_vectors |= query_vectors(
            q, q_scale, weights, vector + chunk * HEAD_TILE, head + chunk * HEAD_TILE < HEADS, KIND, DIM, UNITS
        )[3]
    wide_vectors = tl.reshape(wide_vectors, (ROWS // INNER, HEAD_TILE // LOW, INNER, LOW))
    rows_are_wide = tl.reshape(tl.max(tl.max(wide_vectors, 3), 1), (ROWS,))
    member = tl.arange(0, ROWS)
    ends = tl.load(visible_end + first + member, member < rows, 0)
    scores = out + (first + member) * out_stride
    # Triton 3.6 and 3.7 cannot start a loop's FP4 product for sm_100 at a zero that they know
    zero = begin.to(tl.float32) * 0.0
    marked = tl.zeros((TILE,), tl.int32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        entry = start + lane
        seen = entry < end
        # nothing of the table or of a page is read behind the end
        page = cache + tl.load(table + entry // 64, seen, 0).to(tl.int64) * page_stride
        key_a, key_b, scale, wide = keys_of_page(page, place, seen, KIND, DIM, TILE, UNITS)
        score = weighted_products(
            key_a, key_b, query_a, query_b, w, is_head, ROWS, INNER, LOW, KIND, HEADS, HEAD_TILE, UNITS, WIDEN, zero
        )
        for chunk in range(1, CHUNKS):
            # more than one does not fit beside the keys
            is_head_of_chunk = head + chunk * HEAD_TILE < HEADS
            a, b, w_chunk, _known = query_vectors(
                q, q_scale, weights, vector + chunk * HEAD_TILE, is_head_of_chunk, KIND, DIM, UNITS
            )
            score += weighted_products(
                key_a,
                key_b,
                a,
                b,
                w_chunk,
                is_head_of_chunk,
                ROWS,
                INNER,
                LOW,
                KIND,
                HEADS,
                HEAD_TILE,
                UNITS,
                WIDEN,
                zero,
            )
        visible = entry[:, None] < tl.minimum(ends, end)[None, :]
        if KIND != "bf16":
            marked |= tl.where(seen, wide, 0)
            score *= scale[:, None]
            visible = visible & ((wide[:, None] | rows_are_wide[None, :]) == 0)
        tl.store(scores[None, :] + entry[:, None], score, visible)

    if KIND != "bf16":  # noqa: SIM102, this one is decided when the kernel is compiled
        if (tl.max(marked, 0) | tl.max(rows_are_wide, 0)) > 0:
            for index in range(rows):
                row = first + index
                row_is_wide = tl.sum(tl.where(member == index, rows_are_wide, 0), 0)
                row_end = tl.minimum(end, tl.load(visible_end + row))
                for start in range(begin, row_end, TILE):
                    entry = start + lane
                    seen = entry < row_end
                    page = cache + tl.load(table + entry // 64, seen, 0).to(tl.int64) * page_stride
                    wide = keys_of_page(page, place, seen, KIND, DIM, TILE, UNITS)[3]
                    wide = seen & ((wide | row_is_wide) > 0)
                    if tl.max(wide.to(tl.int32), 0) > 0:
                        score = exact_scores(q, q_scale, weights, row, page, place, wide, KIND, HEADS, DIM)
                        tl.store(out + row * out_stride + entry, score, wide)


@triton.jit
def indexer_logits_kernel(
    q,
    q_scale,
    weights,
    cache,
    block_tables,
    row_request,
    visible_end,
    units,
    out,
    page_stride,
    table_stride,
    out_stride,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    LOW: tl.constexpr,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    UNITS: tl.constexpr,
    WIDEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One work item. q and cache are bytes, but elements of a bf16 query; out fp32 [R, width].

    ``units`` int32 [slots, 4]: the plan's buffer for ROWS = 1, else its schedule. Strides in elements, those of the
    cache in bytes. A group that is down to one row is scored as a row.
    """
    unit = units + tl.program_id(0) * 4
    first = tl.load(unit).to(tl.int64)
    if first < 0:
        return
    table = block_tables + tl.load(row_request + first).to(tl.int64) * table_stride
    if ROWS == 1:
        begin = tl.load(unit + 1) * 256
        end = tl.minimum(begin + tl.load(unit + 2) * 256, tl.load(unit + 3))
        _score_rows(
            q, q_scale, weights, cache, table, visible_end, out, first, 1, begin, end, page_stride, out_stride,
            1, 1, LOW, KIND, HEADS, DIM, TILE, HEAD_TILE, UNITS, WIDEN, STAGES,
        )  # fmt: skip
    else:
        # a group may have more rows than go together here: then it is several programs'
        skipped = tl.program_id(1) * ROWS
        first += skipped
        rows = tl.minimum(tl.load(unit + 1) - skipped, ROWS)
        begin = tl.load(unit + 2) * 256
        member = tl.arange(0, ROWS)
        furthest = tl.max(tl.load(visible_end + first + member, member < rows, 0), 0)
        end = tl.minimum(begin + tl.load(unit + 3) * 256, furthest)
        if begin >= end:
            return
        if rows == 1:
            _score_rows(
                q, q_scale, weights, cache, table, visible_end, out, first, 1, begin, end, page_stride, out_stride,
                1, 1, LOW, KIND, HEADS, DIM, TILE, HEAD_TILE, UNITS, WIDEN, STAGES,
            )  # fmt: skip
        else:
            _score_rows(
                q, q_scale, weights, cache, table, visible_end, out, first, rows, begin, end, page_stride, out_stride,
                ROWS, INNER, LOW, KIND, HEADS, DIM, TILE, HEAD_TILE, UNITS, WIDEN, STAGES,
            )  # fmt: skip
