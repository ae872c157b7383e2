"""Queries, scales and pages in the forms that other libraries have them in: the same bytes, so the same results."""

from __future__ import annotations

import pytest
import torch
from tests.ops.indexer_cases import make_case

from tetrad.geometry import IndexLayout
from tetrad.ops import index_topk, indexer_logits, write_index_keys, write_pooled_index_keys
from tetrad.ops.index_keys import read_index_keys

NAMES = ("q", "q_scale", "weights", "cache", "block_tables", "row_request", "visible_end")


def deep_gemm(cache: torch.Tensor) -> torch.Tensor:
    return cache.unflatten(1, (64, 1, -1))


FORMS = {
    "q int8": {"q": lambda q: q.view(torch.int8)},
    "q float4": {"q": lambda q: q.view(torch.float4_e2m1fn_x2)},
    "scales e8m0": {"q_scale": lambda s: s.view(torch.float8_e8m0fnu)},
    "scales int32": {"q_scale": lambda s: s.view(torch.int32)},
    "scales int32 of a head": {"q_scale": lambda s: s.view(torch.int32).squeeze(-1)},
    "pages": {"cache": deep_gemm},
    "all": {
        "q": lambda q: q.view(torch.int8),
        "q_scale": lambda s: s.view(torch.int32).squeeze(-1),
        "cache": deep_gemm,
    },
}


@pytest.mark.parametrize("extra", [0, 48])
@pytest.mark.parametrize("form", FORMS)
def test_scores(form, extra):
    """Pages may lie further apart than they are long, as in a pool of several layers."""
    case = make_case("fp4", 4, 128, [[70, 71], [9]], extra_stride=extra)
    arguments = dict(zip(NAMES, case.arguments, strict=True)) | {"width": case.width}
    given = arguments | {name: change(arguments[name]) for name, change in FORMS[form].items()}
    out, expected = torch.zeros(3, case.width), torch.zeros(3, case.width)
    assert torch.equal(indexer_logits(**given, out=out), indexer_logits(**arguments, out=expected))
    assert torch.equal(index_topk(**given, k=5), index_topk(**arguments, k=5))


@pytest.mark.parametrize("dtype", ["fp4", "fp8", "bf16"])
def test_pages_are_written_and_read_in_place(dtype):
    layout = IndexLayout(dtype, 128)
    keys, slots = torch.randn(90, 128), torch.randperm(3 * 64)[:90]
    plain = torch.zeros((3, layout.page_bytes), dtype=torch.uint8)
    pages = torch.zeros((3, 64, 1, layout.page_bytes // 64), dtype=torch.uint8)
    write_index_keys(keys, plain, slots, layout)
    write_index_keys(keys, pages, slots, layout)
    assert torch.equal(pages.view(3, -1), plain)
    assert torch.equal(read_index_keys(pages, slots, layout), read_index_keys(plain, slots, layout))
    pages.zero_()
    cos, sin = torch.ones(90, 32), torch.zeros(90, 32)
    for target in (plain, pages):
        write_pooled_index_keys(keys, torch.ones(128), 1e-6, cos, sin, torch.bfloat16, target, slots, layout)
    assert torch.equal(pages.view(3, -1), plain)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"cache": lambda c: c.unflatten(1, (32, 2, -1))},
            ValueError,
            r"or \[pages, 64, 1, 68\] as DeepGEMM.*32, 2, 68",
        ),
        (
            {"cache": lambda c: torch.zeros((6, 64, 1, 132), dtype=torch.uint8)},
            ValueError,
            "keys of 128 channels in fp4",
        ),
        (
            {"cache": lambda c: torch.zeros((6, 64, 1, 80), dtype=torch.uint8)[..., :68]},
            ValueError,
            "cache must have the bytes of a page beside each other",
        ),
        ({"q": lambda q: q.view(torch.int8).int()}, TypeError, "q must be uint8"),
        ({"q_scale": lambda s: s.view(torch.int32).view(3, 2, 2)}, ValueError, r"q_scale .*= \[3, 4, 4\]"),
        ({"q_scale": lambda s: s.view(torch.int32).float()}, TypeError, "q_scale must be uint8"),
        ({"q_scale": lambda s: s.view(torch.int8)}, TypeError, "q_scale must be uint8"),
    ],
)
def test_other_forms_are_refused(changes, error, message):
    case = make_case("fp4", 4, 128, [[70, 71], [9]], extra_stride=0)
    arguments = dict(zip(NAMES, case.arguments, strict=True)) | {"width": case.width}
    given = arguments | {name: change(arguments[name]) for name, change in changes.items()}
    with pytest.raises(error, match=message):
        indexer_logits(**given)
