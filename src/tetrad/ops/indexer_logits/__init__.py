"""The lightning indexer's scores, straight out of the paged key cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.errors import check_whole
from tetrad.formats import mxfp4
from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops.arguments import as_pages, check_output, check_pages, check_tensor
from tetrad.ops.backends import Problem, backend_module, choose_backend
from tetrad.ops.checked import check_rows, check_tables, checked
from tetrad.ops.indexer_logits.packed import packed_query, scale_bytes
from tetrad.ops.plan_indexer import IndexerPlan
from tetrad.ops.plan_indexer.stale import check_plan
from tetrad.platforms import Platform
from tetrad.torch_settings import without_autocast

__all__ = ["check_indexer_arguments", "indexer_logits", "uses_plan"]

_INDEX_DTYPES = {
    torch.uint8: IndexDtype.FP4,
    torch.float8_e4m3fn: IndexDtype.FP8,
    torch.bfloat16: IndexDtype.BF16,
    torch.float32: IndexDtype.FP32,
}


@without_autocast
def indexer_logits(
    q: Tensor,
    q_scale: Tensor | None,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    visible_end: Tensor,
    *,
    width: int,
    plan: IndexerPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """fp32 [R, width]: how well every visible index key fits every row.

        logit[r, j] = SUM_h weights[r, h] * relu(<q[r, h, :], k[j, :]>)      for j < visible_end[r]

    with q and k dequantised, and k[j] the key of entry j of request ``row_request[r]``: entry ``j % 64`` of page
    ``block_tables[row_request[r], j // 64]``. Sums are fp32. Columns from ``visible_end`` on are not touched. A scale
    byte 255 in a key or in the query makes that logit NaN, with any weight. The dtype of the cache follows from that
    of ``q``:

    ==============  ==========================  ======================  ==========================================
    cache           q                           q_scale                 bytes of a page
    ==============  ==========================  ======================  ==========================================
    fp4             uint8 [R, H, D/2]           uint8 [R, H, D/32]      64 * D/2 packed E2M1, 64 * D/32 e8m0
    fp8             float8_e4m3fn [R, H, D]     fp32 [R, H]             64 * D E4M3, 64 fp32 scales
    bf16, fp32      bf16 or fp32 [R, H, D]      None                    64 * D elements
    ==============  ==========================  ======================  ==========================================

    The forms that other libraries use are taken as they are, without a copy: fp4 queries as int8 or
    ``torch.float4_e2m1fn_x2`` and their scales as ``torch.float8_e8m0fnu``, or as int32 [R, H, D/128] of four bytes
    each (also [R, H] where D is 128); and DeepGEMM's pages, uint8 [pages, 64, 1, page bytes / 64]. A query of
    [requests, rows, heads, ...] is passed as ``q.flatten(0, 1)``.

    Only what the host knows is checked (types, shapes, strides, devices). That requests and page ids are in range, that
    visible ends do not exceed ``width``, and that rows of one request are adjacent is the caller's duty;
    :func:`tetrad.ops.checked` checks it, at the price of a synchronisation.

    Source: the lightning indexer of DeepSeek-V4's compressed sparse attention.

    Args:
        q: the quantised query, contiguous; see :func:`tetrad.ops.quantize_index_query`
        q_scale: its scales, contiguous
        weights: fp32 [R, H], contiguous: the projected head weights times D^-0.5 * H^-0.5, signed, nothing else folded
            in
        cache: uint8 [pages, page bytes], 64 keys a page; adjacent bytes, base and ``stride(0)`` multiples of 16 bytes;
            ``stride(0)`` may exceed the page
        block_tables: int32 [requests, blocks]; of a request's row the first ceil(visible_end / 64) ids are read
        row_request: int32 [R], -1 for padding; rows of one request are adjacent
        visible_end: int32 [R], the entries that a row sees: 0 for padding, at most ``width``
        width: columns of the scores, a plain int
        plan: the schedule of :func:`tetrad.ops.plan_indexer` for these rows and this width; without it a back end that
            needs one makes its own
        out: fp32 [R, width] to write into; None allocates it, and what no row sees is then uninitialised

    Raises:
        ValueError: for a wrong shape, stride, device or width, or a plan for other sizes
        TypeError: for a wrong type or dtype
    """
    q, q_scale, cache, layout = check_indexer_arguments(
        q, q_scale, weights, cache, block_tables, row_request, visible_end, width=width, plan=plan, out=out
    )
    if out is None:
        out = torch.empty((q.shape[0], width), dtype=torch.float32, device=q.device)
    backend = backend_module("indexer_logits", q.device, Problem(str(layout.dtype), layout.head_dim, q.shape[1]))
    try:
        backend.indexer_logits(
            q, q_scale, weights, cache, block_tables, row_request, visible_end, out, layout=layout, plan=plan
        )
    except IndexError:
        # a CPU notices what a GPU would not: say which row it was
        with checked():
            _check_values(cache, block_tables, row_request, visible_end, width, plan, layout)
        raise
    return out


def check_indexer_arguments(
    q: Tensor,
    q_scale: Tensor | None,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    visible_end: Tensor,
    *,
    width: int,
    plan: IndexerPlan | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, IndexLayout]:
    """Check the arguments of :func:`indexer_logits` as it says.

    Returns:
        q, q_scale and cache in the form of its table, and the layout of the cache that they imply
    """
    q = packed_query(q)
    check_tensor("q", q, tuple(_INDEX_DTYPES), (None, None, None), "rows, heads, channels", contiguous=True)
    dtype, device, (rows, heads, _) = _INDEX_DTYPES[q.dtype], q.device, q.shape
    head_dim = q.shape[2] * 2 if dtype is IndexDtype.FP4 else q.shape[2]
    if not heads or not head_dim:
        raise ValueError(f"q must have at least one head and one channel; got the shape {list(q.shape)}")
    if dtype is IndexDtype.FP4:
        groups, rest = divmod(head_dim, mxfp4.GROUP_SIZE)
        if rest:
            raise ValueError(
                f"q holds {head_dim} FP4 channels, two to a byte, but needs a multiple of {mxfp4.GROUP_SIZE}; got the "
                f"shape {list(q.shape)}"
            )
        scale_shape = (rows, heads, groups)
        q_scale = scale_bytes(q_scale)
        check_tensor("q_scale", q_scale, torch.uint8, scale_shape, "rows, heads, groups of 32", device, contiguous=True)
    elif dtype is IndexDtype.FP8:
        check_tensor("q_scale", q_scale, torch.float32, (rows, heads), "rows, heads", device, contiguous=True)
    elif q_scale is not None:
        raise TypeError(f"q_scale must be None for a query in {dtype}; got {type(q_scale).__name__}")
    check_tensor("weights", weights, torch.float32, (rows, heads), "rows, heads", device, contiguous=True)
    # whether keys are rotated does not show in a page
    layout = IndexLayout(dtype, head_dim, hadamard=False)
    cache = as_pages("cache", cache, layout)
    check_pages("cache", cache, layout.page_bytes, f"{layout.entries} {dtype} keys of {head_dim} channels", device)
    if cache.shape[1] != layout.page_bytes:
        raise ValueError(
            f"cache must have pages of {layout.page_bytes} bytes, {layout.entries} {dtype} keys of {head_dim} channels "
            f"as q says; got {cache.shape[1]}. A pool with wider strides is sliced to [:, :{layout.page_bytes}]"
        )
    check_tensor("block_tables", block_tables, torch.int32, (None, None), "requests, blocks", device)
    check_tensor("row_request", row_request, torch.int32, (rows,), "rows", device)
    check_tensor("visible_end", visible_end, torch.int32, (rows,), "rows", device)
    check_whole("width", width, 0)
    if plan is not None:
        if not isinstance(plan, IndexerPlan):
            raise TypeError(f"plan must be an IndexerPlan; got {type(plan).__name__}")
        plan.check(rows, width)
        check_tensor("plan", plan.buffer, torch.int32, (None, 4), "slots, 4", device)
    if out is not None:
        check_output("out", out, torch.float32, rows, width, "rows, width", device)
    _check_values(cache, block_tables, row_request, visible_end, width, plan, layout)
    return q, q_scale, cache, layout


def _check_values(
    cache: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    visible_end: Tensor,
    width: int,
    plan: IndexerPlan | None,
    layout: IndexLayout,
) -> None:
    """What is the caller's duty; only inside of :func:`tetrad.ops.checked`."""
    check_rows(row_request, visible_end, width)
    check_tables(block_tables, row_request, visible_end, pages=cache.shape[0], entries=layout.entries)
    if plan is not None:
        check_plan(plan, row_request, visible_end)


def uses_plan(platform: Platform, problem: Problem) -> bool:
    """Whether the back end that scores such keys on this platform makes use of a plan; else none need be made."""
    return choose_backend("indexer_logits", platform, problem).name != "reference"
