"""Every argument of the indexer's ops that is wrong in a way that the host can see, with its error."""

from __future__ import annotations

import pytest
import torch
from tests.ops.indexer_cases import make_case

from tetrad.ops import IndexerPlan, indexer_logits, plan_indexer, topk_indices

NAMES = ("q", "q_scale", "weights", "cache", "block_tables", "row_request", "visible_end")
INT32 = torch.int32


def call(dtype: str, **changes):
    case = make_case(dtype, 4, 64, [[70, 71], [9]], extra_stride=16)
    arguments = dict(zip(NAMES, case.arguments, strict=True)) | {"width": case.width, "plan": None, "out": None}
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return indexer_logits(**arguments)


def misaligned(cache: torch.Tensor) -> torch.Tensor:
    """The same pages, 8 bytes further on."""
    memory = torch.zeros(cache.shape[0] * cache.stride(0) + 8, dtype=torch.uint8)
    return memory[8:].view(cache.shape[0], -1)[:, : cache.shape[1]]


def odd_stride(cache: torch.Tensor) -> torch.Tensor:
    return torch.zeros(cache.shape[0], cache.shape[1] + 8, dtype=torch.uint8)[:, : cache.shape[1]]


TABLE = [
    ("fp4", {"q": None}, TypeError, "q must be a tensor, uint8 or float8_e4m3fn or bfloat16 or float32"),
    ("fp4", {"q": lambda q: q.int()}, TypeError, "q must be uint8 or .*; got torch.int32"),
    ("fp4", {"q": lambda q: q[0]}, ValueError, r"q must be .* \[rows, heads, channels\].*; got the shape \[4, 32\]"),
    ("fp4", {"q": lambda q: q[:, :, ::2]}, ValueError, "q must be contiguous; got strides"),
    ("fp4", {"q": lambda q: q[:, :, :20].contiguous()}, ValueError, "40 FP4 channels.* multiple of 32"),
    ("fp4", {"q": lambda q: q[:, :0]}, ValueError, r"at least one head and one channel; got the shape \[3, 0, 32\]"),
    ("fp32", {"q": lambda q: q[:, :, :0].contiguous()}, ValueError, "at least one head and one channel"),
    ("fp4", {"q": lambda q: q.to("meta")}, ValueError, "q_scale must be on meta, where the other .*; got cpu"),
    ("fp4", {"q_scale": None}, TypeError, r"q_scale must be a tensor, uint8 \[.*\] = \[3, 4, 2\]; got NoneType"),
    ("fp4", {"q_scale": lambda s: s.float()}, TypeError, "q_scale must be uint8 .*; got torch.float32"),
    ("fp4", {"q_scale": lambda s: s[:, :, :1]}, ValueError, r"q_scale must be .* got the shape \[3, 4, 1\]"),
    ("fp8", {"q_scale": None}, TypeError, r"q_scale must be a tensor, float32 \[rows, heads\] = \[3, 4\]"),
    ("fp8", {"q_scale": lambda s: s.double()}, TypeError, "q_scale must be float32 .*; got torch.float64"),
    ("fp8", {"q_scale": lambda s: s.unsqueeze(-1)}, ValueError, r"q_scale must be .* got the shape \[3, 4, 1\]"),
    ("bf16", {"q_scale": torch.ones(3, 4)}, TypeError, "q_scale must be None for a query in bf16; got Tensor"),
    ("fp32", {"q_scale": torch.ones(3, 4)}, TypeError, "q_scale must be None for a query in fp32"),
    ("fp4", {"weights": lambda w: w.bfloat16()}, TypeError, "weights must be float32 .*; got torch.bfloat16"),
    ("fp4", {"weights": lambda w: w[:2]}, ValueError, r"weights must be .* = \[3, 4\]; got the shape \[2, 4\]"),
    ("fp4", {"weights": lambda w: w.T.contiguous().T}, ValueError, "weights must be contiguous"),
    ("fp4", {"weights": lambda w: w.to("meta")}, ValueError, "weights must be on cpu, .*; got meta"),
    ("fp4", {"cache": lambda c: c.view(torch.int8)}, TypeError, "cache must be uint8 .*; got torch.int8"),
    ("fp4", {"cache": lambda c: c.unflatten(1, (64, -1))}, ValueError, "cache must be uint8 .*got the shape"),
    ("fp4", {"cache": lambda c: c[:, :-1]}, ValueError, "pages of 2176 bytes .*; got 2175"),
    ("fp4", {"cache": torch.zeros(9, 4352, dtype=torch.uint8)}, ValueError, "pages of 2176 bytes.*sliced to"),
    ("fp8", {"cache": torch.zeros(9, 2176, dtype=torch.uint8)}, ValueError, "pages of 4352 bytes .*fp8.*; got 2176"),
    ("fp4", {"cache": lambda c: c[:, ::2].repeat(1, 2)[:, ::2]}, ValueError, "cache must have adjacent elements"),
    ("fp4", {"cache": lambda c: c[:1].expand(9, -1)}, ValueError, "pages 0 bytes apart overlap"),
    ("fp4", {"cache": odd_stride}, ValueError, "pages a multiple of 16 bytes apart; got 2184"),
    ("fp4", {"cache": misaligned}, ValueError, "cache must start at a multiple of 16 bytes"),
    ("fp4", {"block_tables": lambda t: t.long()}, TypeError, "block_tables must be int32 .*; got torch.int64"),
    ("fp4", {"block_tables": lambda t: t[0]}, ValueError, "block_tables must be .*got the shape"),
    ("fp4", {"block_tables": lambda t: t.T.contiguous().T}, ValueError, "block_tables must have adjacent elements"),
    ("fp4", {"row_request": lambda r: r.long()}, TypeError, "row_request must be int32 .*; got torch.int64"),
    ("fp4", {"row_request": lambda r: r[:2]}, ValueError, r"row_request must be .* = \[3\]; got the shape \[2\]"),
    ("fp4", {"visible_end": lambda e: e.long()}, TypeError, "visible_end must be int32 .*; got torch.int64"),
    ("fp4", {"visible_end": lambda e: e.repeat(2)}, ValueError, r"visible_end must be .*; got the shape \[6\]"),
    ("fp4", {"visible_end": lambda e: e.repeat_interleave(2)[::2]}, ValueError, "visible_end must have adjacent"),
    ("fp4", {"width": -1}, ValueError, "width must be at least 0; got -1"),
    ("fp4", {"width": 71.0}, TypeError, "width must be a plain int; got float"),
    ("fp4", {"width": torch.tensor(71)}, TypeError, "width must be a plain int; got Tensor"),
    ("fp4", {"width": True}, TypeError, "width must be a plain int; got bool"),
    ("fp4", {"plan": torch.zeros((512, 4), dtype=INT32)}, TypeError, "plan must be an IndexerPlan; got Tensor"),
    ("fp4", {"plan": IndexerPlan(torch.zeros((512, 4), dtype=INT32), 3, 70)}, ValueError, "width 70"),
    ("fp4", {"plan": IndexerPlan(torch.zeros((512, 4), dtype=INT32), 2, 71)}, ValueError, "made for 2 rows"),
    ("fp4", {"plan": IndexerPlan(torch.zeros((512, 4), dtype=INT32), 3, 71, 64)}, ValueError, "blocks of 64"),
    ("fp4", {"plan": lambda _: IndexerPlan(torch.zeros((512, 4)), 3, 71)}, TypeError, "buffer must be int32"),
    ("fp4", {"out": torch.zeros(3, 72)}, ValueError, r"out must be .* = \[3, 71\]; got the shape \[3, 72\]"),
    ("fp4", {"out": torch.zeros(3, 71).double()}, TypeError, "out must be float32 .*; got torch.float64"),
    ("fp4", {"out": torch.zeros(71, 3).T}, ValueError, "out must have adjacent elements"),
    ("fp4", {"out": torch.zeros(1, 71).expand(3, -1)}, ValueError, "rows 0 elements apart overlap"),
    ("fp4", {"out": torch.zeros(3, 71, device="meta")}, ValueError, "out must be on cpu"),
]


@pytest.mark.parametrize(("dtype", "changes", "error", "message"), TABLE, ids=[row[3][:40] for row in TABLE])
def test_indexer_logits(dtype, changes, error, message):
    with pytest.raises(error, match=message):
        call(dtype, **changes)


@pytest.mark.parametrize("dtype", ["fp4", "fp8", "bf16", "fp32"])
def test_the_unchanged_call_is_right(dtype):
    """Otherwise the table above would prove nothing."""
    assert call(dtype).shape == (3, 71)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": torch.zeros(3, 5).double()}, TypeError, "logits must be float32"),
        ({"logits": torch.zeros(5)}, ValueError, r"logits must be .*; got the shape \[5\]"),
        ({"logits": torch.zeros(5, 3).T}, ValueError, "logits must have adjacent"),
        ({"visible_end": torch.zeros(2, dtype=INT32)}, ValueError, "visible_end must be"),
        ({"visible_end": torch.zeros(3)}, TypeError, "visible_end must be int32"),
        ({"k": 0}, ValueError, "k must be at least 1; got 0"),
        ({"k": 2.0}, TypeError, "k must be a plain int; got float"),
        ({"out": torch.zeros(3, 2)}, TypeError, "out must be int32"),
        ({"out": torch.zeros(3, 3, dtype=INT32)}, ValueError, r"out must be .* = \[3, 2\]"),
        ({"out": torch.zeros(1, 2, dtype=INT32).expand(3, -1)}, ValueError, "overlap"),
    ],
)
def test_topk_indices(changes, error, message):
    arguments = {"logits": torch.zeros(3, 5), "visible_end": torch.zeros(3, dtype=INT32), "k": 2, "out": None} | changes
    with pytest.raises(error, match=message):
        topk_indices(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"row_request": torch.zeros(3)}, TypeError, "row_request must be int32"),
        ({"row_request": torch.zeros((3, 1), dtype=INT32)}, ValueError, "row_request must be"),
        ({"visible_end": torch.zeros(4, dtype=INT32)}, ValueError, r"visible_end must be .* = \[3\]"),
        ({"visible_end": torch.zeros(3, dtype=INT32, device="meta")}, ValueError, "visible_end must be on cpu"),
        ({"width": -1}, ValueError, "width must be at least 0"),
        ({"width": torch.tensor(4)}, TypeError, "width must be a plain int"),
        ({"out": "plan"}, TypeError, "out must be a tensor"),
        ({"out": torch.zeros((9, 4))}, TypeError, "out must be int32"),
        ({"out": torch.zeros((9, 6), dtype=INT32)}, ValueError, "out must be int32"),
        ({"out": torch.zeros((9, 8), dtype=INT32)[:, :4]}, ValueError, "out must be contiguous"),
    ],
)
def test_plan_indexer(changes, error, message):
    zeros = torch.zeros(3, dtype=INT32)
    arguments = {"row_request": zeros, "visible_end": zeros, "width": 5, "out": None} | changes
    with pytest.raises(error, match=message):
        plan_indexer(**arguments)
