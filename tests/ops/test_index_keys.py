"""Index keys and queries: every byte of a page, and the steps before the quantisation."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from tests.ops.indexer_cases import PAGE, decode_vectors, page_bytes

from tetrad.errors import ConfigError
from tetrad.formats import mxfp4
from tetrad.geometry import IndexDtype, IndexLayout
from tetrad.ops import (
    index_topk,
    indexer_logits,
    quantize_index_query,
    write_index_keys,
    write_pooled_index_keys,
)
from tetrad.ops.index_keys import index_key_vectors, read_index_keys

DTYPES = ["fp4", "fp8", "bf16", "fp32"]


def guarded_pages(layout: IndexLayout, pages: int, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages [pages, page bytes], the whole allocation): 0xEE on both sides and between the pages, and in them."""
    stride = layout.page_bytes + extra
    memory = torch.full((pages * stride + 64,), 0xEE, dtype=torch.uint8)
    return memory[32:-32].view(pages, stride)[:, : layout.page_bytes], memory


def key_bytes(pages: torch.Tensor, slot: int, dtype: str, dim: int) -> tuple[np.ndarray, np.ndarray | None]:
    page = pages[slot // PAGE].numpy()
    scale = {"fp4": dim // 32, "fp8": 4}.get(dtype, 0)
    size, entry = page_bytes(dtype, dim) // PAGE - scale, slot % PAGE
    start = PAGE * size + entry * scale
    return page[entry * size : (entry + 1) * size], page[start : start + scale] if scale else None


def rotary_angles(rows: int, pairs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(rows, pairs, generator=torch.Generator().manual_seed(seed)) * 6.28
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [0, 80])
@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_of_a_page(dtype, dim, extra, compute):
    """Values and scales lie where the layout says, and no other byte is touched: pages are handed over as bytes."""
    torch.manual_seed(1)
    layout = IndexLayout(IndexDtype(dtype), dim, hadamard=False)
    pages, memory = guarded_pages(layout, 5, extra)
    slots = torch.tensor([0, 63, 64, 200, -1, 319, 100, -7])
    keys = (torch.randn(len(slots), dim) * torch.tensor([1, 1e-3, 30, 1, 1, 0, 1, 1]).unsqueeze(1)).to(compute)
    write_index_keys(keys, pages, slots, layout)
    written = np.zeros(memory.numel(), bool)
    base = memory.data_ptr()
    for key, slot in zip(keys, slots.tolist(), strict=True):
        if slot < 0:
            continue
        values, scales = key_bytes(pages, slot, dtype, dim)
        for part in (values, scales):
            if part is not None:
                start = part.__array_interface__["data"][0] - base
                written[start : start + part.size] = True
        got = decode_vectors(values, scales, dtype)
        exact = key.double().numpy()
        largest = np.abs(exact).max()
        bound = {"fp4": largest / 3, "fp8": largest / 14, "bf16": largest / 250, "fp32": 0.0}[dtype]
        assert np.abs(got - exact).max() <= bound, f"slot {slot}"
        if dtype == "fp4":
            packed, e8m0 = mxfp4.quantize(key)
            assert (values == packed.numpy()).all()
            assert (scales == e8m0.numpy()).all()
        if dtype == "fp8":
            power = np.log2(scales.view(np.float32)[0])
            assert power == round(power), "the scale of an FP8 key is a power of two"
            assert largest <= 448 * 2.0**power
            assert power == -22 or largest > 448 * 2.0 ** (power - 1)
    assert (memory.numpy()[~written] == 0xEE).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_read_gives_what_was_stored(dtype):
    """Any shape of slots; a negative slot gives zeros, whatever lies in the first page."""
    layout = IndexLayout(IndexDtype(dtype), 64)
    pages = torch.full((4, layout.page_bytes), 0xFF, dtype=torch.uint8)
    slots = torch.randperm(3 * PAGE)[:50] + PAGE
    write_index_keys(torch.randn(50, 64), pages, slots, layout)
    got = read_index_keys(pages, torch.cat((slots, torch.tensor([-1, -5]))).view(4, 13), layout)
    assert got.shape == (4, 13, 64)
    assert got.dtype == torch.float32
    got = got.view(52, 64)
    for row, slot in enumerate(slots.tolist()):
        assert (got[row].double().numpy() == decode_vectors(*key_bytes(pages, slot, dtype, 64), dtype)).all()
    assert (got[50:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_is_stored_alike_in_any_company(dtype):
    """Written in one call or in several, between other keys or alone: decode must store what prefill stores."""
    layout = IndexLayout(IndexDtype(dtype), 32)
    keys = torch.randn(150, 32)
    whole, parts = (torch.zeros(3, layout.page_bytes, dtype=torch.uint8) for _ in range(2))
    write_index_keys(keys, whole, torch.arange(150), layout)
    for start, end in ((0, 1), (1, 64), (64, 73), (73, 150)):
        write_index_keys(keys[start:end], parts, torch.arange(start, end), layout)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pooled_keys_are_made_and_stored(dtype, compute, hadamard):
    """In one call what the two others do one after the other, with the compute dtype handed on."""
    torch.manual_seed(8)
    layout, cos_sin = IndexLayout(dtype, 64, hadamard=hadamard), rotary_angles(9, 16)
    pooled, weight, slots = (
        torch.randn(9, 64) * 5,
        torch.rand(64) + 0.5,
        torch.tensor([5, 70, -1, 0, 63, 64, 127, -9, 7]),
    )
    pages, memory = guarded_pages(layout, 2, 80)
    write_pooled_index_keys(pooled, weight, 1e-3, *cos_sin, compute, pages, slots, layout)
    expected, expected_memory = guarded_pages(layout, 2, 80)
    keys = index_key_vectors(pooled, weight, 1e-3, *cos_sin, dtype=compute)
    write_index_keys(keys, expected, slots, layout)
    assert torch.equal(memory, expected_memory)
    assert not torch.equal(memory, guarded_pages(layout, 2, 80)[1])
    # rows that complete no entry are padding, or hold anything
    for values in (pooled, *cos_sin):
        values[slots < 0] = float("nan")
    write_pooled_index_keys(pooled, weight, 1e-3, *cos_sin, compute, pages, slots, layout)
    write_index_keys(keys.masked_fill((slots < 0).unsqueeze(1), float("nan")), expected, slots, layout)
    assert torch.equal(memory, expected_memory)


@pytest.mark.parametrize("dtype", ["fp4", "fp8"])
def test_a_broken_key_stays_broken(dtype):
    """NaN or infinity in a key must not become an ordinary score."""
    layout = IndexLayout(IndexDtype(dtype), 64)
    pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    keys = torch.randn(3, 64)
    keys[0, 3], keys[2, 40] = float("nan"), float("inf")
    write_index_keys(keys, pages, torch.arange(3), layout)
    got = read_index_keys(pages, torch.arange(3), layout)
    assert got[0, :32].isnan().all()
    assert got[2, 32:].isnan().all()
    assert got[1].isfinite().all()


def test_nothing_to_write():
    layout = IndexLayout(IndexDtype.FP4, 32)
    pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    write_index_keys(torch.randn(0, 32), pages, torch.zeros(0, dtype=torch.int64), layout)
    write_index_keys(torch.randn(2, 32), pages, torch.tensor([-1, -1]), layout)
    write_index_keys(torch.randn(2, 32), pages[:0], torch.tensor([-1, -1]), layout)
    assert (pages == 0).all()
    assert (read_index_keys(pages[:0], torch.tensor([-1]), layout) == 0).all()
    with pytest.raises(IndexError):
        read_index_keys(pages, torch.tensor([64]), layout)
    with pytest.raises(IndexError):
        read_index_keys(pages[:0], torch.tensor([0]), layout)


def rotated_fp64(x: np.ndarray, cos: torch.Tensor, sin: torch.Tensor) -> np.ndarray:
    """The last channels as complex numbers times e^(i angle). x: [..., D] with one angle row for each first index."""
    turn = cos.double().numpy() + 1j * sin.double().numpy()
    turn = turn.reshape(turn.shape[0], *[1] * (x.ndim - 2), turn.shape[1])
    result, rope = x.copy(), 2 * cos.shape[1]
    pairs = (x[..., -rope::2] + 1j * x[..., x.shape[-1] - rope + 1 :: 2]) * turn
    result[..., -rope::2], result[..., x.shape[-1] - rope + 1 :: 2] = pairs.real, pairs.imag
    return result


def hadamard_matrix(size: int) -> np.ndarray:
    return np.array([[(-1) ** (j & k).bit_count() for k in range(size)] for j in range(size)]) / np.sqrt(size)


def stored_keys(
    pooled: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dtype: torch.dtype,
    *,
    hadamard: bool = True,
) -> torch.Tensor:
    """What lies in pages that round no more: the keys as they are quantised elsewhere."""
    count, dim = pooled.shape
    layout = IndexLayout("fp32", dim, hadamard=hadamard)
    pages = torch.zeros(-(-count // PAGE), layout.page_bytes, dtype=torch.uint8)
    write_pooled_index_keys(pooled, weight, eps, cos, sin, dtype, pages, torch.arange(count), layout)
    return read_index_keys(pages, torch.arange(count), layout)


@pytest.mark.parametrize("dim", [32, 128])
def test_key_vectors_equal_the_formula(dim):
    """RMSNorm, then RoPE on the last channels, then Hadamard over all of them; the order matters for each pair."""
    torch.manual_seed(2)
    pooled, weight, eps = torch.randn(9, dim) * 3, torch.rand(dim) + 0.5, 1e-3
    cos, sin = rotary_angles(9, dim // 4)
    x = pooled.double().numpy()
    x = weight.double().numpy() * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    expected = rotated_fp64(x, cos, sin) @ hadamard_matrix(dim)
    vectors = index_key_vectors(pooled, weight, eps, cos, sin, torch.float32)
    assert vectors.dtype == torch.float32
    np.testing.assert_allclose(vectors.numpy(), rotated_fp64(x, cos, sin), atol=3e-6)
    got = stored_keys(pooled, weight, eps, cos, sin, torch.float32)
    np.testing.assert_allclose(got.numpy(), expected, atol=3e-6)


def bf16_fp64(x: np.ndarray) -> np.ndarray:
    """Rounded to bf16, in fp64 again."""
    return torch.from_numpy(x).float().bfloat16().double().numpy()


def test_key_vectors_round_at_every_step():
    """The reference model rounds to bf16 before the norm, after RoPE and after Hadamard. Rounding only once at the end
    gives other bits, and after FP4 other codes."""
    torch.manual_seed(3)
    pooled, weight = torch.randn(400, 128), torch.rand(128) + 0.5
    cos, sin = rotary_angles(400, 32)
    assert index_key_vectors(pooled, weight, 1e-6, cos, sin, torch.bfloat16).dtype == torch.bfloat16
    got = stored_keys(pooled, weight, 1e-6, cos, sin, torch.bfloat16)

    x = bf16_fp64(pooled.double().numpy())
    x = bf16_fp64(weight.double().numpy() * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))
    once = bf16_fp64(rotated_fp64(x, cos, sin) @ hadamard_matrix(128))
    every = bf16_fp64(bf16_fp64(rotated_fp64(x, cos, sin)) @ hadamard_matrix(128))
    value = got.double().numpy()
    assert (value == every).mean() > 0.995
    assert (value == once).mean() < 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_equals_the_formula(dtype):
    """Every head of a row is turned by that row's angle."""
    torch.manual_seed(4)
    q = torch.randn(6, 5, 64)
    cos, sin = rotary_angles(6, 16)
    expected = rotated_fp64(q.double().numpy(), cos, sin) @ hadamard_matrix(64)
    values, scales = quantize_index_query(q, cos, sin, IndexLayout(dtype, 64))
    stored = values.view(torch.uint8).numpy()
    if dtype == "fp4":
        assert values.shape == (6, 5, 32)
        assert scales.shape == (6, 5, 2)
        assert (values.dtype, scales.dtype) == (torch.uint8, torch.uint8)
        got = decode_vectors(stored, scales.numpy(), dtype)
    elif dtype == "fp8":
        assert scales.shape == (6, 5)
        assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        got = decode_vectors(stored, scales.unsqueeze(-1).view(torch.uint8).numpy(), dtype)
    else:
        assert scales is None
        got = decode_vectors(stored, None, dtype)
    largest = np.abs(expected).max(-1, keepdims=True)
    bound = {"fp4": 1 / 4.9, "fp8": 1 / 16, "bf16": 1 / 256, "fp32": 1e-5}[dtype]
    assert (np.abs(got - expected) <= bound * largest).all()


def test_query_rounds_to_its_own_dtype():
    """A bf16 query is rounded after RoPE and after Hadamard before it is quantised, whatever the cache stores."""
    torch.manual_seed(6)
    q = torch.randn(200, 2, 128).bfloat16()
    cos, sin = rotary_angles(200, 32)
    values, _ = quantize_index_query(q, cos, sin, IndexLayout("fp32", 128))
    assert values.dtype == torch.float32
    once = bf16_fp64(rotated_fp64(q.double().numpy(), cos, sin) @ hadamard_matrix(128))
    every = bf16_fp64(bf16_fp64(rotated_fp64(q.double().numpy(), cos, sin)) @ hadamard_matrix(128))
    assert (values.double().numpy() == every).mean() > 0.995
    assert (values.double().numpy() == once).mean() < 0.9


def test_without_the_rotation():
    """Left out on both sides, to measure what it is worth; channels need no power of two then."""
    torch.manual_seed(7)
    pooled, q = torch.randn(5, 24), torch.randn(5, 3, 24)
    cos, sin = rotary_angles(5, 4)
    x = pooled.double().numpy()
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    keys = stored_keys(pooled, torch.ones(24), 1e-6, cos, sin, torch.float32, hadamard=False)
    np.testing.assert_allclose(keys.numpy(), rotated_fp64(x, cos, sin), atol=3e-6)
    query, _ = quantize_index_query(q, cos, sin, IndexLayout("fp32", 24, hadamard=False))
    np.testing.assert_allclose(query.numpy(), rotated_fp64(q.double().numpy(), cos, sin), atol=3e-6)


def test_the_rotation_cancels_in_the_scores():
    """On one side only it would destroy the scores; on both it is an orthogonal change of basis."""
    torch.manual_seed(5)
    rows, dim, layout = 4, 64, IndexLayout(IndexDtype.FP32, 64)
    pooled, q, weights = torch.randn(70, dim), torch.randn(rows, 3, dim), torch.randn(rows, 3)
    angles_k, angles_q = rotary_angles(70, 8, 1), rotary_angles(rows, 8, 2)
    pages = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    keys = index_key_vectors(pooled, torch.ones(dim), 1e-6, *angles_k, dtype=torch.float32)
    write_index_keys(keys, pages, torch.arange(70), layout)
    query, scale = quantize_index_query(q, *angles_q, layout)
    one, end = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 70, dtype=torch.int32)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    got = indexer_logits(query, scale, weights, pages, table, one, end, width=70)
    k = pooled.double().numpy()
    k = rotated_fp64(k / np.sqrt((k * k).mean(-1, keepdims=True) + 1e-6), *angles_k)
    dots = np.maximum(rotated_fp64(q.double().numpy(), *angles_q) @ k.T, 0)
    expected = (weights.double().numpy()[:, :, None] * dots).sum(1)
    np.testing.assert_allclose(got.numpy(), expected, atol=2e-5)


def test_bad_arguments():
    layout, cos = IndexLayout(IndexDtype.FP4, 32), torch.ones(2, 8)
    pages, slots = torch.zeros(1, layout.page_bytes, dtype=torch.uint8), torch.arange(2)
    with pytest.raises(TypeError, match=r"keys must be float32 or bfloat16 .*; got torch.float64"):
        write_index_keys(torch.zeros(2, 32).double(), pages, slots, layout)
    with pytest.raises(ValueError, match=r"keys must be .*; got the shape \[2, 64\]"):
        write_index_keys(torch.zeros(2, 64), pages, slots, layout)
    with pytest.raises(TypeError, match=r"slots must be int64 .*; got torch.int32"):
        write_index_keys(torch.zeros(2, 32), pages, slots.int(), layout)
    with pytest.raises(ValueError, match=r"slots must be .* = \[2\]; got the shape \[1\]"):
        write_index_keys(torch.zeros(2, 32), pages, slots[:1], layout)
    with pytest.raises(ValueError, match=r"pages must have pages of 1088 bytes .*fp4.*; got 1087"):
        write_index_keys(torch.zeros(2, 32), pages[:, :-1], slots, layout)
    with pytest.raises(TypeError, match="pages must be uint8"):
        read_index_keys(pages.float(), slots, layout)
    with pytest.raises(TypeError, match="slots must be int64"):
        read_index_keys(pages, slots.int(), layout)
    with pytest.raises(TypeError, match="q must be float32 or bfloat16"):
        quantize_index_query(torch.zeros(2, 1, 32).half(), cos, cos, layout)
    with pytest.raises(ValueError, match=r"cos must be .*; got the shape \[2, 8\]"):
        quantize_index_query(torch.zeros(3, 1, 32), cos, cos, layout)
    with pytest.raises(ValueError, match=r"sin must be .* = \[2, 8\]; got the shape \[2, 7\]"):
        quantize_index_query(torch.zeros(2, 1, 32), cos, cos[:, :7], layout)
    with pytest.raises(ValueError, match="turns 16 channels, but there are only 8"):
        quantize_index_query(torch.zeros(2, 1, 8), cos, cos, IndexLayout("fp8", 8))
    with pytest.raises(ValueError, match="q has 64 channels, but the layout is of keys of 32"):
        quantize_index_query(torch.zeros(2, 1, 64), cos, cos, layout)
    with pytest.raises(TypeError, match="pooled must be float32"):
        index_key_vectors(torch.zeros(2, 32).bfloat16(), torch.ones(32), 1e-6, cos, cos, torch.float32)
    with pytest.raises(TypeError, match="dtype must be float32 or bfloat16"):
        index_key_vectors(torch.zeros(2, 32), torch.ones(32), 1e-6, cos, cos, torch.float16)
    for wrong, error, match in (
        ({"pooled": torch.zeros(2, 64), "norm_weight": torch.ones(64)}, ValueError, "64 channels, .* keys of 32"),
        ({"norm_weight": torch.ones(31)}, ValueError, r"norm_weight must be .* = \[32\]"),
        ({"dtype": torch.float16}, TypeError, "dtype must be float32 or bfloat16"),
        ({"sin": cos[:1]}, ValueError, r"sin must be .* = \[2, 8\]"),
        ({"slots": slots[:1]}, ValueError, r"slots must be .* = \[2\]"),
        ({"pages": pages[:, :-1]}, ValueError, "pages must have pages of 1088 bytes"),
    ):
        right = {"pooled": torch.zeros(2, 32), "norm_weight": torch.ones(32), "eps": 1e-6, "cos": cos, "sin": cos}
        right |= {"dtype": torch.float32, "pages": pages, "slots": slots, "layout": layout}
        with pytest.raises(error, match=match):
            write_pooled_index_keys(**(right | wrong))
    with pytest.raises(ConfigError, match="multiple of 32"):
        IndexLayout(IndexDtype.FP4, 40)
    with pytest.raises(ConfigError, match="power of two"):
        IndexLayout(IndexDtype.FP4, 96)


# ---- both sides read one layout -----------------------------------------------------------------------------------


def chosen_and_exact(layout: IndexLayout) -> tuple[set[int], set[int]]:
    """The best 8 of 100 keys by the ops, as an engine of one's own would call them, and by the definition."""
    torch.manual_seed(0)
    keys, query, weights = torch.randn(100, 128), torch.randn(1, 64, 128), torch.rand(1, 64)
    cache = torch.zeros((2, layout.page_bytes), dtype=torch.uint8)
    write_index_keys(keys, cache, torch.arange(100), layout)
    q, q_scale = quantize_index_query(query, torch.ones(1, 32), torch.zeros(1, 32), layout)
    table, request, end = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1]], [0], [100]))
    best = index_topk(q, q_scale, weights, cache, table, request, end, 8, width=100)
    scores = torch.einsum("rhd,jd->rhj", query, keys)
    exact = (weights[:, :, None] * scores.relu()).sum(1).topk(8).indices
    return set(best[0].tolist()), set(exact[0].tolist())


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize(("dtype", "least"), [("fp32", 8), ("bf16", 8), ("fp8", 7), ("fp4", 5)])
def test_what_is_written_is_found(dtype, least, hadamard):
    """Keys were stored as they came while the query was rotated: of the best 8 in fp32 none was found, in FP4 one in
    nine. Now both read in the layout whether to rotate."""
    best, exact = chosen_and_exact(IndexLayout(dtype, 128, hadamard=hadamard))
    assert len(best & exact) >= least


@pytest.mark.parametrize("function", [quantize_index_query, write_index_keys, write_pooled_index_keys])
def test_nobody_says_it_twice(function):
    """A switch beside the layout could say something else than the layout of the other side."""
    parameters = inspect.signature(function).parameters
    assert "hadamard" not in parameters
    assert "layout" in parameters


def test_a_dtype_is_not_enough_for_a_query():
    """It does not say whether the keys are rotated."""
    cos = torch.ones(2, 8)
    with pytest.raises(TypeError, match=r"layout must be an IndexLayout, such as IndexLayout\(.*\); got 'fp4'"):
        quantize_index_query(torch.zeros(2, 1, 32), cos, cos, "fp4")
