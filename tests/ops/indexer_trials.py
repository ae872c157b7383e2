"""Calls of the portable scorer that go wrong in a kernel if they do anywhere, and how their scores are checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from tests.ops.indexer_cases import IndexerCase, calc_diff, is_poison, keys_fp64, logits_fp64, make_case, query_fp64

from tetrad.geometry import IndexDtype, IndexLayout

GUARD = 64
RAGGED = [[257], [256], [255, 256], [65, 65, 65], [64], [63], [1], [0]]
PREFILL = [[(position + 1) // 4 for position in range(1000, 1013)], list(range(3, 520, 94))]
MIXED = [*PREFILL[1:], *RAGGED, [], [300, 7]]


# ---- cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A case, the slots of its plan, and what stands in for tensor cores in the interpreter: "" or "fp4" or "fp8"."""

    case: IndexerCase
    slots: int = 0
    units: str = ""


def key_bytes(case: IndexerCase, request: int, entry: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scales) of one key, in place."""
    layout = IndexLayout(IndexDtype(case.dtype), case.head_dim)
    page, place = case.cache[int(case.block_tables[request, entry // 64])], entry % 64
    size, scale_size = layout.data_row_bytes, layout.scale_row_bytes
    scales = page[64 * size :][place * scale_size : (place + 1) * scale_size]
    return page[place * size : (place + 1) * size], scales


def edges_of_scales() -> IndexerCase:
    """Scale bytes on both sides of every limit, mixed within one key and within one head."""
    case = make_case("fp4", 3, 128, [[200, 70], [64]], seed=5)
    generator = torch.Generator().manual_seed(5)
    choice = torch.tensor([0, 1, 2, 96, 97, 127, 157, 158, 205, 206, 253, 254], dtype=torch.uint8)
    for request, length in ((0, 200), (1, 64)):
        for entry in range(length):
            key_bytes(case, request, entry)[1][:] = choice[torch.randint(len(choice), (4,), generator=generator)]
    scale = case.q_scale.clone()
    scale[0] = torch.tensor([97, 157, 127, 100], dtype=torch.uint8)
    scale[1] = torch.tensor([[96, 157, 127, 100], [127, 127, 127, 158], [0, 254, 1, 127]], dtype=torch.uint8)
    return replace(case, q_scale=scale)


def zero_groups() -> IndexerCase:
    """Zeros under the writer's byte 1, under 0 and under the largest, in keys and in a query, beside ordinary groups;
    and whole vectors of zeros."""
    case = make_case("fp4", 3, 128, [[200, 199]], seed=6)
    for entry, group, byte in ((1, 0, 1), (2, 3, 0), (3, 2, 254), (4, 1, 1), (5, 0, 200)):
        data, scales = key_bytes(case, 0, entry)
        data[group * 16 : group * 16 + 16] = 0x80 if entry == 4 else 0
        scales[group] = byte
    for entry, byte in ((6, 0), (7, 1), (8, 254)):
        data, scales = key_bytes(case, 0, entry)
        data[:], scales[:] = 0, byte
    q, scale = case.q.clone(), case.q_scale.clone()
    for head, group, byte in ((0, 1, 1), (1, 2, 254), (2, 0, 0)):
        q[0, head, group * 16 : group * 16 + 16] = 0x08
        scale[0, head, group] = byte
    q[1, 1], scale[1, 1] = 0, 1
    return replace(case, q=q, q_scale=scale)


def only_fit_together() -> IndexerCase:
    """Two groups of key and query with opposite extremes: each product is 1, though the values span 2^254."""
    case = make_case("fp4", 1, 64, [[1]])
    data, scales = key_bytes(case, 0, 0)
    data[:], scales[:] = 0x22, torch.tensor([0, 253], dtype=torch.uint8)
    q_scale = torch.tensor([[[254, 1]]], dtype=torch.uint8)
    return replace(case, q=torch.full_like(case.q, 0x22), q_scale=q_scale, weights=torch.ones(1, 1))


def broken_keys(dtype: str) -> IndexerCase:
    """NaN scales in two keys of a row without weights and of others, and in E4M3 a key with NaN among its numbers."""
    case = make_case(dtype, 5, 64, [[150] * 3, [70]], seed=7)
    weights = case.weights.clone()
    weights[0] = 0.0
    for entry in (0, 130):
        key_bytes(case, 0, entry)[1][-4:] = 0xFF
    if dtype == "fp8":
        key_bytes(case, 1, 3)[0][17] = 0x7F
        key_bytes(case, 1, 69)[0][63] = 0xFF
    return replace(case, weights=weights)


def broken_query() -> IndexerCase:
    case = make_case("fp4", 5, 64, [[150] * 3, [70]], seed=8)
    scale = case.q_scale.clone()
    scale[1, 4, 1] = 255
    return replace(case, q_scale=scale)


def odd_fp8_scales() -> IndexerCase:
    """Scales that no writer makes: zero, negative, subnormal, at the ends of fp32, in keys and a query."""
    case = make_case("fp8", 3, 64, [[70, 69, 68]], seed=9)
    odd = (0.0, -2.0, 1e-41, 2.0**-126, 3e38, 2.0**-127, 1.7)
    for entry, value in enumerate(odd):
        key_bytes(case, 0, entry)[1][:] = torch.tensor([value]).view(torch.uint8)
    scale = case.q_scale.clone()
    scale[0] = torch.tensor([-1.0, 2.0**-31, 3.0])
    scale[1] = torch.tensor([2.0**-30, 2.0**30, 1.3])
    return replace(case, q_scale=scale)


def odd_weights(dtype: str) -> IndexerCase:
    """Weights that only together with a scale are ordinary numbers."""
    case = make_case(dtype, 4, 64, [[130, 129, 128]], seed=10, spread=20)
    weights = case.weights.clone()
    weights[0] *= 1e-30
    weights[1] *= 1e25
    weights[2, 1:] = torch.tensor([0.0, -0.0, 1e-44])
    return replace(case, weights=weights)


def infinite_key() -> IndexerCase:
    """Heads that only pad the product must not meet an infinity: 0 * inf is NaN."""
    case = make_case("bf16", 3, 32, [[10]])
    key_bytes(case, 0, 5)[0][:2] = torch.tensor([float("inf")], dtype=torch.bfloat16).view(torch.uint8)
    return replace(case, q=case.q.abs(), weights=case.weights.abs())


def shared_pages() -> IndexerCase:
    """Two requests with a common prefix, and the same query: the common scores are the same bits."""
    case = make_case("fp4", 4, 64, [[150], [150]])
    tables = case.block_tables.clone()
    tables[1, :2] = tables[0, :2]
    twice = {name: getattr(case, name)[:1].repeat(2, *[1] * (getattr(case, name).dim() - 1))
             for name in ("q", "q_scale", "weights")}  # fmt: skip
    return replace(case, block_tables=tables, **twice)


def stale_behind_the_end() -> tuple[IndexerCase, IndexerCase]:
    """The same call twice, with poison and with an earlier owner's keys and page ids behind the ends."""
    case = make_case("fp4", 4, 32, [[70, 71, 100], [5]])
    stale = case.cache.clone()
    for request, end in ((0, 100), (1, 5)):
        page, place = int(case.block_tables[request, end // 64]), end % 64
        stale[page, place * 16 : 64 * 16] = 0x55
        stale[page, 64 * 16 + place :] = 0x80
    tables = torch.where(case.block_tables.abs() < case.cache.shape[0], case.block_tables, 0)
    return case, replace(case, cache=stale, block_tables=tables)


@functools.cache
def trials() -> dict[str, Trial]:
    result: dict[str, Trial] = {}
    shapes = [
        ("fp4", 64, 128, MIXED), ("fp4", 1, 32, RAGGED), ("fp4", 32, 64, PREFILL), ("fp4", 70, 64, [[65, 300]]),
        ("fp8", 64, 128, MIXED), ("fp8", 1, 32, RAGGED), ("fp8", 32, 64, PREFILL), ("fp8", 17, 256, [[65, 300]]),
        ("bf16", 64, 128, MIXED), ("bf16", 1, 16, RAGGED), ("bf16", 32, 64, PREFILL), ("bf16", 130, 32, [[65]]),
        ("fp32", 64, 128, MIXED), ("fp32", 1, 16, RAGGED), ("fp32", 32, 64, PREFILL), ("fp32", 65, 32, [[65]]),
    ]  # fmt: skip
    for dtype, heads, dim, ends in shapes:
        result[f"{dtype}-H{heads}-D{dim}"] = Trial(make_case(dtype, heads, dim, ends, padding=2, width=530))
    for length in (0, 1, 7, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513):
        # the width is exactly the length, so the allocation ends where the last column does
        result[f"length-{length}"] = Trial(make_case("fp4", 2, 64, [[length]], seed=length, extra_stride=0))
    for dtype in ("fp4", "fp8"):
        for spread in (13, 31, 60, 127):
            case = make_case(dtype, 3, 64, [[200, 190], list(range(60, 64))], spread=spread, seed=spread)
            result[f"{dtype}-spread-{spread}"] = Trial(case)
        result[f"{dtype}-broken-keys"] = Trial(broken_keys(dtype))
        result[f"{dtype}-odd-weights"] = Trial(odd_weights(dtype))
    result["edges-of-scales"] = Trial(edges_of_scales())
    result["zero-groups"] = Trial(zero_groups())
    result["only-fit-together"] = Trial(only_fit_together())
    result["broken-query"] = Trial(broken_query())
    result["odd-fp8-scales"] = Trial(odd_fp8_scales())
    result["infinite-key"] = Trial(infinite_key())
    result["shared-pages"] = Trial(shared_pages())
    result["poison-behind"], result["stale-behind"] = (Trial(case) for case in stale_behind_the_end())
    for ends, padding in (([], 0), ([[0]], 3), ([], 5)):
        result[f"nothing-{len(ends)}-{padding}"] = Trial(make_case("fp4", 2, 32, ends, padding=padding))
    # the ways that the interpreter's own architecture does not take. It makes numbers of the NaN of E4M3
    for name in ("fp4-H64-D128", "fp4-spread-31", "fp4-spread-127", "edges-of-scales", "zero-groups",
                 "fp4-broken-keys", "broken-query", "length-129", "length-513", "fp8-H64-D128", "fp8-spread-31",
                 "odd-fp8-scales"):  # fmt: skip
        case = result[name].case
        result[f"units-{name}"] = replace(result[name], units=case.dtype)
    return result


def check(case: IndexerCase, out: torch.Tensor, memory: torch.Tensor, relative: float = 2e-6) -> None:
    """Every score against fp64 where that is a normal fp32 number: relative to what is summed up for it, and each row
    by the measure of all back ends. NaN exactly where it belongs, and nothing else written."""
    weights, queries = np.abs(case.weights.numpy().astype(np.float64)), np.abs(query_fp64(case))
    known: dict[int, np.ndarray] = {}
    for row, values in enumerate(logits_fp64(case)):
        request, got = int(case.row_request[row]), out[row, : len(values)].numpy().astype(np.float64)
        assert np.array_equal(np.isnan(got), np.isnan(values)), f"row {row}"
        if request not in known:
            known[request] = np.abs(keys_fp64(case, request, int(case.visible_end[case.row_request == request].max())))
        with np.errstate(invalid="ignore", over="ignore"):
            terms = (weights[row][:, None] * (queries[row] @ known[request][: len(values)].T)).sum(0)
        size = np.abs(values)
        normal = (size < 2.0**127) & ((size > 2.0**-126) | (terms == 0))
        assert (np.abs(got[normal] - values[normal]) <= relative * terms[normal]).all(), f"row {row}"
        # where terms cancel beyond the digits of fp64, the oracle has none to compare with
        known_well = normal & (terms <= 1e9 * size)
        assert calc_diff(got[known_well], values[known_well]) < 5e-6, f"row {row}"
    seen = torch.arange(case.width) < case.visible_end.unsqueeze(1)
    assert is_poison(out[~seen]).all(), "columns behind the visible end were written"
    assert is_poison(memory[:GUARD]).all()
    assert is_poison(memory[-GUARD:]).all()
