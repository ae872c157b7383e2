"""The Hopper scorer and its schedule. Their own source runs here on the CPU, thread by thread, in an emulator that
knows the instructions from their definition (tests/ops/emulator); the arithmetic on bytes is redone in numpy over all
values; the machine code is read. On a Hopper device the same cases run there, and are skipped elsewhere."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.ops.emulator import emulated_scores
from tests.ops.hopper import compiled, machine_code, on_hopper, tool
from tests.ops.indexer_cases import E2M1, bits, calc_diff, is_poison, logits_fp64, make_case, poisoned_output

from tetrad.geometry import IndexDtype
from tetrad.ops import indexer_logits, nvrtc
from tetrad.ops.backends import Problem, support
from tetrad.ops.indexer_logits import sm90
from tetrad.platforms import Platform

pytestmark = pytest.mark.slow

VARIANTS = [sm90.variant(IndexDtype.FP4, 1, 1), sm90.variant(IndexDtype.FP4, 2, 1)]
SMALL = sm90.Variant(2, 6, True, 216, 72)


# ---- arithmetic on bytes ------------------------------------------------------------------------------------------


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """The PRMT instruction: byte i of the result is byte (selector nibble i) of b:a; bit 3 would replicate a sign."""
    joined = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    result = np.zeros(np.broadcast(joined, selector).shape, np.uint64)
    for i in range(4):
        nibble = (selector.astype(np.uint64) >> np.uint64(4 * i)) & np.uint64(15)
        assert (nibble < 8).all()
        result |= ((joined >> (nibble * np.uint64(8))) & np.uint64(0xFF)) << np.uint64(8 * i)
    return result.astype(np.uint32)


def convert(codes: np.ndarray, r: int) -> np.ndarray:
    """uint32 [N] of eight codes each -> uint8 [N, 8], as the kernel's ``convert`` does it."""
    low = np.array([(0x72706C00 - r * 0x04040400) & 0xFFFFFFFF], np.uint32)
    high = np.array([(0x7A787674 - r * 0x04040404) & 0xFFFFFFFF], np.uint32)
    magnitudes, shifted = codes & np.uint32(0x77777777), codes << np.uint32(4)
    a, b = permute(low, high, magnitudes & np.uint32(0xFFFF)), permute(low, high, magnitudes >> np.uint32(16))
    sign = np.uint32(0x80808080)
    first = a | (permute(codes, shifted, np.array([0x1504], np.uint32)) & sign)
    second = b | (permute(codes, shifted, np.array([0x3726], np.uint32)) & sign)
    return np.stack((first, second), 1).view(np.uint8)


def e5m2(byte: np.ndarray) -> np.ndarray:
    return (byte.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float64)


@pytest.mark.parametrize("r", range(27))
def test_conversion_is_exact(r):
    """Every code in every place of a word, at every distance from the largest scale: one wrong byte in a table, or a
    sign in the wrong place, would be a wrong score for some keys only."""
    codes = np.random.default_rng(r).integers(0, 2**32, 4096, dtype=np.uint32)
    codes[:16] = np.arange(16, dtype=np.uint32) * np.uint32(0x11111111)
    nibbles = (codes[:, None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
    expected = E2M1[nibbles] * 2.0 ** (13 - r)
    got = e5m2(convert(codes, r))
    assert np.array_equal(got, expected)
    assert np.array_equal(np.signbit(got), np.signbit(expected))


def test_conversion_ends_where_the_kernel_says():
    """At a distance of 27 half of the smallest code would be lost: the kernel must not take this route there."""
    assert re.search(r"WIDEST = 26;", sm90.source())
    assert not np.array_equal(e5m2(convert(np.array([0x11111111], np.uint32), 27))[0], np.full(8, 0.5 * 2.0**-14))


def halves(x: np.ndarray) -> np.ndarray:
    return np.stack((x & np.uint32(0xFFFF), x >> np.uint32(16)), -1)


def test_scales_of_two_keys_at_once():
    """The largest of four bytes, the distances from it, the row scale and the three conditions of the exact path, for
    two keys packed in one register: a carry from one into the other would spoil a key only beside certain others."""
    generator = np.random.default_rng(0)
    scales = generator.integers(0, 256, (200_000, 2, 4), dtype=np.uint8)
    scales[100_000:] = np.clip(
        generator.integers(70, 185, (100_000, 2, 1)) + generator.integers(-30, 31, (100_000, 2, 4)), 0, 255
    ).astype(np.uint8)
    x, y = (np.ascontiguousarray(scales[:, key]).view(np.uint32)[:, 0] for key in range(2))

    def chosen(selector: int) -> np.ndarray:
        return permute(x, y, np.array([selector], np.uint32))

    most = halves(chosen(0x5410))
    for selector in (0x4501, 0x7632, 0x6723):
        most = np.maximum(most, halves(chosen(selector)))
    most = most[:, 0] | most[:, 1] << np.uint32(16)
    most = permute(most, np.zeros(1, np.uint32), np.array([0x4341], np.uint32))
    largest = scales.max(2).astype(np.int64)
    assert np.array_equal(halves(most), largest)
    for t in range(4):
        own = chosen(0x4400 + t * 0x1111) & np.uint32(0x00FF00FF)
        assert np.array_equal(halves(own), scales[:, :, t])
        r = most - own
        assert np.array_equal(halves(r), largest - scales[:, :, t])
        odd = (
            (r + np.uint32((255 - 26) * 0x00010001))
            | (most + np.uint32((255 - 173) * 0x00010001))
            | (np.uint32((255 + 81) * 0x00010001) - most)
        ) & np.uint32(0x01000100)
        wide = (largest - scales[:, :, t] > 26) | (largest > 173) | (largest < 81)
        assert np.array_equal(halves(odd) != 0, wide)
    for key, selector in ((0, 0x4440), (1, 0x4442)):
        byte = permute(most, np.zeros(1, np.uint32), np.array([selector], np.uint32))
        scale = (byte << np.uint32(23)).view(np.float32)
        ordinary = (largest[:, key] >= 81) & (largest[:, key] <= 173)
        assert np.array_equal(scale[ordinary], np.exp2(largest[ordinary, key] - 127.0).astype(np.float32))
        # whatever its scale, an all-zero key must score zero: zero times this
        assert np.isfinite(scale[largest[:, key] < 255]).all()


# ---- the kernels' own source, on the CPU ---------------------------------------------------------------------------

RAGGED = [[257], [256], [255, 256], [65, 65, 65], [64], [63], [1], [0]]
PREFILL = [[(position + 1) // 4 for position in range(1000, 1041)], list(range(3, 520, 47))]


def cpu_scores(case, variant=VARIANTS[0], **options):
    """(out, the allocation around it)."""
    if case.dtype == "fp8":
        variant = sm90.variant(IndexDtype.FP8, 1 + variant.pairs, 1) if variant in VARIANTS else variant
    out, memory = poisoned_output(case.q.shape[0], case.width)
    emulated_scores(case.arguments, out, variant, IndexDtype(case.dtype), **options)
    return out, memory


def check(case, scores):
    """Every row against fp64; nothing else written."""
    out, memory = scores
    seen = torch.arange(case.width) < case.visible_end.unsqueeze(1)
    for row, values in enumerate(logits_fp64(case)):
        got = out[row, : len(values)].numpy()
        assert np.array_equal(np.isnan(got), np.isnan(values)), f"row {row}"
        size = np.abs(values)
        normal = ~np.isnan(values) & (size < 2.0**127) & ((size > 2.0**-126) | (size == 0))
        assert calc_diff(got[normal], values[normal]) < 5e-6, f"row {row}"
    assert is_poison(out[~seen]).all(), "columns behind the visible end were written"
    guard = (memory.numel() - out.numel()) // 2
    assert is_poison(memory[:guard]).all()
    assert is_poison(memory[-guard:]).all()


@pytest.mark.parametrize("variant", [*VARIANTS, SMALL], ids=["rows", "pairs", "small"])
@pytest.mark.parametrize(("dtype", "heads"), [("fp4", 64), ("fp8", 32)])
def test_equals_fp64(variant, dtype, heads):
    """Everything that no row sees is NaN, and every other table entry far out of range. An odd number of rows has a
    last one alone; groups begin and end inside shares; whole blocks have nothing to do."""
    for ends in (RAGGED, PREFILL, PREFILL[1:] + RAGGED + PREFILL[1:], [[5000], [3000, 3001, 7], [900]], [[1]], [[0]]):
        case = make_case(dtype, heads, 128, ends, padding=2)
        check(case, cpu_scores(case, variant))


@pytest.mark.parametrize("dtype", ["fp4", "fp8"])
@pytest.mark.parametrize("spread", [13, 14, 26, 27, 46, 47, 60, 127])
def test_wide_spreads(dtype, spread):
    """Groups too far apart for one FP8 row, and scales at the ends of fp32, take the exact path. A key or query that
    the fast path kept by mistake would lose its small groups."""
    case = make_case(dtype, 64 if dtype == "fp4" else 32, 128, [[300, 290], [70], list(range(60, 75))], spread=spread,
                     seed=spread)  # fmt: skip
    check(case, cpu_scores(case, VARIANTS[spread % 2]))


def test_usual_and_unusual_scales_give_the_same_bits():
    """Keys with scales in the usual range have one scale for all, others one each: a power of two must be all that
    differs, or a score would depend on how large the other keys of its tile are."""
    case = make_case("fp4", 64, 128, [[300, 290], [70]], seed=3)
    expected, _ = cpu_scores(case)
    for shift in (25, -30):
        cache = case.cache.clone()
        scales = cache[:, 4096 : 4096 + 256].to(torch.int32)
        moved = torch.where(torch.arange(256) // 4 % 16 == 0, scales, scales + shift)
        cache[:, 4096 : 4096 + 256] = moved.to(torch.uint8)
        out, _ = cpu_scores(replace(case, cache=cache))
        size = torch.full((case.width,), 2.0**shift)
        size[torch.arange(case.width) % 64 % 16 == 0] = 1.0
        for row, end in enumerate(case.visible_end.tolist()):
            assert torch.equal(out[row, :end], expected[row, :end] * size[:end])


def test_nan_scales():
    """A relu that turns NaN into zero would hide a broken key, whatever its weight."""
    case = make_case("fp4", 64, 128, [[300] * 3, [70]])
    cache, weights, scale = case.cache.clone(), case.weights.clone(), case.q_scale.clone()
    cache[int(case.block_tables[0, 2]), 4096 + 2 * 4] = 255
    weights[0] = 0.0
    for variant in VARIANTS:
        broken = replace(case, cache=cache, weights=weights)
        check(broken, cpu_scores(broken, variant))
    scale[1, 2, 1] = 255
    check(replace(case, q_scale=scale), cpu_scores(replace(case, q_scale=scale)))


def test_zero_groups():
    """Zeros are zeros under any scale: under the writer's byte 1, which is far from the others', they must not spoil
    the key, and under 254 they must not push the others away."""
    case = make_case("fp4", 64, 128, [[100]])
    page = case.cache[int(case.block_tables[0, 0])]
    for entry, group, byte in ((1, 0, 1), (2, 3, 1), (3, 2, 254), (4, 1, 0)):
        page[entry * 64 + group * 16 : entry * 64 + group * 16 + 16] = 0x80 if entry == 4 else 0
        page[4096 + entry * 4 + group] = byte
    for entry, byte in enumerate((0, 1, 11, 12, 13, 14, 200, 254), 5):
        page[entry * 64 : entry * 64 + 64] = 0
        page[4096 + entry * 4 : 4096 + entry * 4 + 4] = byte
    check(case, cpu_scores(case))
    nothing = replace(case, q=torch.zeros_like(case.q), q_scale=torch.ones_like(case.q_scale))
    check(nothing, cpu_scores(nothing))


def test_rows_do_not_depend_on_the_others():
    """Alone, together, in another order, one or two at a time, in other shares, and whatever order warps run in: the
    same bits. A missing barrier shows as bits that move."""
    case = make_case("fp4", 64, 128, RAGGED + PREFILL, padding=1)
    expected, _ = cpu_scores(case)
    for seed, shares, variant in ((1, 1, VARIANTS[0]), (2, 7, VARIANTS[0]), (3, 2, VARIANTS[1]), (4, 40, VARIANTS[1])):
        assert torch.equal(bits(cpu_scores(case, variant, seed=seed, shares=shares)[0]), bits(expected))
    order = list(range(case.q.shape[0] - 1, -1, -1))
    assert torch.equal(bits(cpu_scores(case.rows(order), VARIANTS[1])[0]), bits(expected[order]))
    for row in (3, 12, 20, 40, 52):
        assert torch.equal(bits(cpu_scores(case.rows([row]))[0][0]), bits(expected[row]))


def test_pages_apart_and_rows_apart():
    """Interleaved layers, and a buffer of the largest width."""
    case = make_case("fp4", 64, 128, [[70] * 3, [80] * 12], extra_stride=0)
    check(case, cpu_scores(case))
    memory, _ = poisoned_output(case.q.shape[0], case.width + 19)
    emulated_scores(case.arguments, memory[:, : case.width], VARIANTS[0], IndexDtype.FP4)
    assert torch.equal(bits(memory[:, : case.width]), bits(cpu_scores(case)[0]))
    assert is_poison(memory[:, case.width :]).all()


@pytest.mark.parametrize(("groups", "ring"), [(3, 20), (3, 10), (4, 5)])
def test_places_of_the_ring_have_one_owner(groups, ring):
    """With a ring of ten for three warpgroups one of them, a page ahead of a slower copy, took a place's previous phase
    for its own, read the page before it was there, and the kernel died."""
    with pytest.raises(AssertionError):
        sm90.Variant(groups, ring, True, 144, 80)


# ---- machine code -------------------------------------------------------------------------------------------------


def build(variant: sm90.Variant, dtype: IndexDtype, heads: int, folder: Path) -> tuple[str, str]:
    """(SASS, resource usage) of a variant."""
    cuobjdump = tool("cuobjdump")
    if cuobjdump is None:
        pytest.skip("needs cuobjdump")
    cubin = compiled(sm90.source(), variant.defines(dtype, heads), folder)
    usage = subprocess.run([cuobjdump, "-res-usage", str(cubin)], check=True, capture_output=True, text=True)
    return machine_code(cubin), usage.stdout + usage.stderr


@pytest.mark.parametrize("rows", [1, 2], ids=["rows", "pairs"])
@pytest.mark.parametrize(("dtype", "heads"), [("fp4", 64), ("fp4", 32), ("fp8", 64)])
def test_machine_code(rows, dtype, heads, tmp_path):
    """FP8 tensor cores with the keys from registers, bulk copies, and registers that add up: the consumers wait for
    ever for those that the launch does not have."""
    variant = sm90.variant(IndexDtype(dtype), rows, 1)
    sass, usage = build(variant, IndexDtype(dtype), heads, tmp_path)
    kind = "E5M2.E5M2" if dtype == "fp4" else "E4M3.E4M3"
    for columns in (heads, heads * rows):
        assert re.search(rf"QGMMA\.64x{columns}x32\.F32\.{kind} R\d+, R\d+, gdesc", sass)
    assert "UBLKCP" in sass
    # one wait for four products: where registers run short the compiler waits after each
    assert sass.count("QGMMA") == 4 * sass.count("WARPGROUP.DEPBAR")
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    assert registers <= variant.launch_registers
    # a few bytes of the helpers, once a group of rows
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 64
    more, fewer = (int(re.search(rf"MAXREG\.{word}[^;]*0x(\w+)", sass)[1], 16) for word in ("TRY_ALLOC", "DEALLOC"))
    assert (more, fewer) == (variant.consumer_registers, variant.helper_registers)
    assert variant.groups * more + fewer <= (variant.groups + 1) * variant.launch_registers
    assert variant.shared_bytes(IndexDtype(dtype), heads) <= 232_448


# ---- who serves what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "dtype", "heads", "dim", "served"),
    [
        ("sm_90", "fp4", 64, 128, True),
        ("sm_90", "fp8", 32, 128, True),
        ("sm_90", "bf16", 64, 128, False),
        ("sm_90", "fp4", 16, 128, False),
        ("sm_90", "fp4", 64, 64, False),
        ("sm_100", "fp4", 64, 128, False),
        ("cpu", "fp4", 64, 128, False),
    ],
)
def test_offers(arch, dtype, heads, dim, served, monkeypatch, all_proven):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    platform = Platform("cpu" if arch == "cpu" else "cuda", arch, "test")
    answer = next(o for o in support("indexer_logits", platform, Problem(dtype, dim, heads)) if o.name == "sm90")
    assert answer.supported is served
    assert answer.reason


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "cuda-core is not there")
    for op in ("indexer_logits", "plan_indexer"):
        given = support(op, Platform("cuda", "sm_90", "test"), Problem("fp4", 128, 64))
        assert next(o for o in given if o.name == "sm90").reason == "cuda-core is not there"


# ---- on the device ------------------------------------------------------------------------------------------------


def device_scores(case, plan=None):
    """(out, the allocation around it), both on the host."""
    _, memory = poisoned_output(case.q.shape[0], case.width, 64)
    memory = memory.cuda()
    out = memory[64:-64].view(case.q.shape[0], case.width)
    stride = case.cache.stride(0)
    pages = torch.as_strided(case.cache, (case.cache.shape[0], stride), (stride, 1)).cuda()[:, : case.cache.shape[1]]
    q, q_scale, weights, _, *rest = (None if x is None else x.cuda() for x in case.arguments)
    indexer_logits(q, q_scale, weights, pages, *rest, width=case.width, plan=plan, out=out)
    return out.cpu(), memory.cpu()


def check_on_device(case):
    check(case, device_scores(case))


@on_hopper
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("dtype", ["fp4", "fp8"])
def test_equals_fp64_on_hopper(dtype, heads):
    for ends in (RAGGED, PREFILL, PREFILL + RAGGED + PREFILL[1:], [[9000, 9001, 7]] + [[300]] * 5):
        check_on_device(make_case(dtype, heads, 128, ends, padding=2))


@on_hopper
@pytest.mark.parametrize("dtype", ["fp4", "fp8"])
@pytest.mark.parametrize("spread", [13, 14, 27, 46, 60, 127])
def test_wide_spreads_on_hopper(dtype, spread):
    """Groups too far apart for one FP8 row, and scales at the ends of fp32, take the exact path."""
    check_on_device(make_case(dtype, 64, 128, [[300, 290], list(range(60, 75))], spread=spread, seed=spread))


@on_hopper
def test_nan_scales_on_hopper():
    """A relu that turns NaN into zero would hide a broken key."""
    case = make_case("fp4", 64, 128, [[300] * 3, [70]])
    cache, weights, scale = case.cache.clone(), case.weights.clone(), case.q_scale.clone()
    cache[int(case.block_tables[0, 2]), 4096 + 2 * 4] = 255
    weights[0] = 0.0
    check_on_device(replace(case, cache=cache, weights=weights))
    scale[1, 2, 1] = 255
    check_on_device(replace(case, q_scale=scale))


@on_hopper
def test_rows_do_not_depend_on_the_others_on_hopper():
    """Alone, together, in another order, and twenty times: the same bits."""
    case = make_case("fp4", 64, 128, RAGGED + PREFILL, padding=1)
    expected, _ = device_scores(case)
    for _ in range(19):
        assert torch.equal(bits(device_scores(case)[0]), bits(expected))
    order = list(range(case.q.shape[0] - 1, -1, -1))
    assert torch.equal(bits(device_scores(case.rows(order))[0]), bits(expected[order]))
    for row in (3, 12, 20, 40, 52):
        assert torch.equal(bits(device_scores(case.rows([row]))[0][0]), bits(expected[row]))
