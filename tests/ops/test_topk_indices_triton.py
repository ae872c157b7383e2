"""The portable top-k: under Triton's interpreter against Python's sort, and compiled for every architecture."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tests.ops.triton_process import TARGETS, run

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")

INTERPRETED = """
import json, sys
import torch
from tetrad.ops.topk_indices import triton as portable

case = torch.load(sys.argv[1])
portable._LARGEST_BLOCK = case["block"]
results = []
for scores, ends, k in case["problems"]:
    memory = torch.full((scores.shape[0], k + 3), -12345, dtype=torch.int32)
    portable.topk_indices(scores, ends, k, memory[:, :k])
    results.append(memory)
torch.save(results, sys.argv[2])
"""

COMPILED = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tetrad.ops.topk_indices.triton import topk_kernel, warps_for

signature = {"logits": "*fp32", "visible_end": "*i32", "out": "*i32", "k": "i32", "width": "i32",
             "logits_stride": "i64", "out_stride": "i64", "BLOCK": "constexpr"}
results = {}
for name, target in json.loads(sys.argv[1]).items():
    source = ASTSource(topk_kernel, signature, constexprs={"BLOCK": 1024})
    kernel = triton.compile(source, target=GPUTarget(*target), options={"num_warps": warps_for(1024)})
    results[name] = [kernel.metadata.shared, kernel.asm.get("amdgcn", kernel.asm.get("ptx"))]
print(json.dumps(results))
"""


def chosen(row: list[float], k: int) -> list[int]:
    """By Python's sort: numbers before NaN, larger before smaller, lower column first. Ascending, -1 behind."""
    order = sorted(range(len(row)), key=lambda j: (row[j] != row[j], 0.0 if row[j] != row[j] else -row[j], j))
    return sorted(order[:k]) + [-1] * (k - len(row[:k]))


def hard_rows(width: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Rows where a top-k goes wrong: ties cut by k, both zeros, denormals, infinities, NaN of both signs.

    ``steep`` went wrong: where fewer than k scores lay within four octaves of the largest, the CUDA kernel's second
    look counted some of them once more, took too few candidates and wrote past a list. Real scores, of which most are
    negative, did that; normal numbers do not.
    """
    normal = torch.randn(width, generator=generator)
    bits = torch.randint(-(2**31), 2**31 - 1, (width,), generator=generator).int()
    few = torch.zeros(width)
    few[torch.randperm(width, generator=generator)[: k // 2]] = 1.0
    rare = torch.full((width,), -torch.inf)
    rare[::3] = torch.nan
    rare[5::11] = -3.4e38
    # nearly k within four octaves of the largest, most of them at the lower end; k right below these; the rest far
    # below, so that a power of two of steps from there ends in the middle of the former
    places = torch.randperm(width, generator=generator)
    near, below = places[: max(2, k - k // 64 - 2)], places[k : 2 * k]
    steep = torch.full((width,), -517.0)
    steep[near] = 1 + torch.rand(len(near), generator=generator)
    steep[near[0]] = 16
    steep[below] = 0.5 + torch.rand(len(below), generator=generator) / 2
    return torch.stack(
        (
            normal,
            100 + normal / 64,
            normal * 1e-42,
            torch.zeros(width),
            torch.zeros(width).copysign(normal),
            few,
            rare,
            torch.full((width,), torch.nan).copysign(normal),
            torch.arange(width).float(),
            -torch.arange(width).float(),
            torch.randint(-2, 3, (width,), generator=generator).float(),
            torch.where(normal > 1.5, torch.inf, normal),
            bits.view(torch.float32),
            (torch.tensor(1.0).view(torch.int32) + bits % 97).view(torch.float32),
            steep,
            (normal - 1.2) * 3000,
        )
    )


def test_interpreted_equals_a_sort(tmp_path):
    """Widths around the block, and rows that end anywhere, behind which lies the most tempting score."""
    generator = torch.Generator().manual_seed(0)
    problems = []
    for width, k in ((255, 7), (256, 64), (397, 100)):
        rows = hard_rows(width, k, generator)
        ends = torch.randint(k, width + 1, (rows.shape[0],), generator=generator, dtype=torch.int32)
        problems.append((rows, ends.fill_(width) if width == 256 else ends, k))
    width, k = 131, 64
    ends = torch.tensor([0, 1, 63, 64, 65, 130, 131], dtype=torch.int32)
    problems.append((torch.randint(-3, 3, (len(ends), width), generator=generator).float(), ends, k))
    problems.append((torch.empty(2, 0), torch.zeros(2, dtype=torch.int32), 3))
    wide = []
    for rows, ends, k in problems:
        buffer = torch.full((rows.shape[0], rows.shape[1] + 5), torch.inf)
        for index, end in enumerate(ends.tolist()):
            buffer[index, :end] = rows[index, :end]
        wide.append((buffer[:, : rows.shape[1]], ends, k))
    torch.save({"block": 128, "problems": wide}, tmp_path / "case")
    run(INTERPRETED, str(tmp_path / "case"), str(tmp_path / "result"), TRITON_INTERPRET="1")
    for (rows, ends, k), memory in zip(wide, torch.load(tmp_path / "result"), strict=True):
        assert (memory[:, k:] == -12345).all()
        for index, end in enumerate(ends.tolist()):
            row = rows[index, :end].tolist()
            assert memory[index, :k].tolist() == chosen(row, k), f"row {index} of {list(rows.shape)}, end {end}"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return json.loads(run(COMPILED, json.dumps(TARGETS), TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))))


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for(target, compiled):
    """Within the registers of the machine: a spill here would cost more than the search."""
    shared, assembly = compiled[target]
    assert shared <= 64 * 1024
    if target.startswith("gfx"):
        assert int(re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly).group(1)) == 0
    else:
        assert "atom" in assembly
