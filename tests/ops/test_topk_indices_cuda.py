"""The CUDA C++ top-k: its layouts, its logic on a CPU, and its results where a device is."""

from __future__ import annotations

import shutil
from importlib import import_module

import pytest
import torch
from tests.ops.cuda_emulation import EmulatedKernel
from tests.ops.hopper import compiled
from tests.ops.test_topk_indices_triton import chosen, hard_rows

from tetrad.errors import ConfigError
from tetrad.ops import nvrtc

pytestmark = pytest.mark.slow

cuda = import_module("tetrad.ops.topk_indices.cuda")
PROBLEMS = [
    (rows, width, k)
    for rows in (1, 16, 32, 64, 4096)
    for width in (100, 8192, 8193, 16384, 32768, 65536, 131072, 262144, 1 << 20)
    for k in (1, 512, 513, 1024, 2048, 5000)
]
LAYOUTS = sorted({cuda.layout_for(*problem) for problem in PROBLEMS}, key=repr)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_rows_fit_their_layout(problem):
    """A row longer than its threads hold would be cut off there; a pool that is too small, or too few groups, would
    send ordinary rows the slow way."""
    _, width, k = problem
    layout = cuda.layout_for(*problem)
    assert width <= layout.columns * (layout.tiles if layout.tiled else 1)
    if k <= 2048:
        groups = layout.threads * layout.groups * layout.cluster
        pooled = layout.capacity * layout.cluster
        if layout.tiled:
            sample = 4 * layout.threads * layout.blocks // layout.step * layout.cluster
            step = -(-width // sample)
            assert 2 * min(k, 2 * k // step + 16) <= groups
            assert 3 * k + 16 * step <= pooled
        else:
            assert 2 * k <= groups
            assert 2 * k <= pooled
    assert layout.groups <= 4 * layout.blocks // layout.step
    assert layout.blocks in (2, 4, 8, 16)
    assert layout.step in (1, 2)
    assert layout.threads % 32 == 0
    assert 64 <= layout.threads <= 1024
    assert 4 * layout.threads * layout.blocks <= 32768, "counts of a tile have 16 bits"
    assert not (layout.early and (layout.tiled or layout.cluster > 1))
    assert not (layout.tiled and layout.stage)
    assert not layout.tiled or (layout.blocks >= 4 and layout.blocks * layout.tiles <= 128)
    assert layout.resident * layout.threads <= 2048
    assert layout.resident * (layout.shared_bytes + 1024) <= 228 * 1024


EMULATED = [
    (cuda.Layout(64, 2, 2, 1, 256, early=True), [(509, 7), (512, 64)]),
    (cuda.Layout(128, 8, 4, 2, 512, stage=True, early=True), [(4096, 300), (2047, 90)]),
    (cuda.Layout(64, 8, 8, 1, 256, stage=True), [(2048, 128)]),
    (cuda.Layout(64, 16, 2, 2, 512, stage=True, early=True), [(4096, 64), (2051, 70)]),
    (cuda.Layout(64, 4, 2, 2, 128, stage=True, cluster=2), [(2048, 64), (1021, 33)]),
    (cuda.Layout(64, 4, 1, 1, 128, cluster=2, tiled=True, tiles=3), [(5999, 33), (8001, 100)]),
    (cuda.Layout(64, 4, 2, 2, 512, tiled=True, tiles=9), [(8999, 50), (9300, 100)]),
    (cuda.Layout(64, 16, 4, 2, 512, tiled=True, tiles=4), [(4097, 33), (13000, 100)]),
    (cuda.Layout(64, 8, 4, 2, 256, cluster=4, tiled=True, tiles=2), [(12999, 70), (515, 100)]),
    (cuda.Layout(64, 4, 4, 1, 64, cluster=8), [(8191, 200), (300, 20)]),
]
"""(layout, (width, k)) with pools that some of the rows overflow. 8001 and 9300 columns are longer than their maps."""


def misleading_row(layout, width, generator):
    """The highest scores are where the kernel takes its sample of a long row, so that few others reach the bound. A
    kernel that trusts its sample would choose too few."""
    span = -(-width // (32 * layout.cluster)) * 32
    step = -(-span // (4 * layout.threads * layout.blocks // layout.step))
    sampled = torch.arange(width) % span // 16 % step == 0
    return 10.0 * sampled + torch.randn(width, generator=generator)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("layout", "problems"), EMULATED, ids=str)
def test_the_sources_logic(layout, problems, tmp_path):
    """Small thread blocks with the whole of the source, so that every way through it is taken: ties beyond what a pool
    holds, NaN among the best, rows of any end and alignment, several rows for one team."""
    kernel = EmulatedKernel(layout, tmp_path)
    generator = torch.Generator().manual_seed(layout.threads)
    seed = 0
    for width, k in problems:
        rows = torch.cat((hard_rows(width, k, generator), misleading_row(layout, width, generator)[None]))
        ends = torch.randint(0, width + 1, (rows.shape[0],), generator=generator, dtype=torch.int32)
        special = torch.tensor([0, k - 1, k, k + 1, 2 * k, width - 1], dtype=torch.int32)
        for case in (torch.full_like(ends, width), torch.cat((special, ends))[: len(ends)]):
            for stride in (width + (-width) % 4, width + 1 + width % 2):
                memory = torch.full((rows.shape[0] * stride + 4,), torch.inf)
                start = -memory.data_ptr() // 4 % 4
                logits = memory[start : start + rows.shape[0] * stride].view(-1, stride)[:, :width]
                out = torch.full((rows.shape[0], k + 3), -12345, dtype=torch.int32)
                for index, end in enumerate(case.tolist()):
                    logits[index, :end] = rows[index, :end]
                seed += 1
                kernel.topk_indices(logits, case, k, out, teams=1 + seed % 3, seed=seed)
                assert (out[:, k:] == -12345).all()
                for index, end in enumerate(case.tolist()):
                    got = out[index, :k].tolist()
                    assert got == chosen(rows[index, :end].tolist(), k), f"row {index}, width {width}, end {end}"


@pytest.mark.parametrize("layout", LAYOUTS[::4], ids=str)
def test_compiles_without_a_device(layout, tmp_path):
    assert compiled(cuda.source(), cuda.macros(layout), tmp_path).read_bytes()[:4] == b"\x7fELF"


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.version, "hip", None)
    nvrtc._cuda_core.cache_clear()
    with pytest.raises(ConfigError, match=r"cuda-core package is not installed; pip install 'tetrad\[cuda\]'"):
        nvrtc.compile_cubin("", "sm_90a")


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9 or nvrtc.unavailable() is not None,
    reason="needs a Hopper GPU and cuda-core",
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("width", "k"),
    [(8192, 512), (16384, 600), (32768, 2048), (50001, 1024), (70000, 100), (131073, 512), (300001, 9), (100, 7)],
)
@pytest.mark.parametrize("count", [5, 19, 40, 133])
def test_equals_the_reference(width, k, count):
    """Row counts that get different layouts; `count` hard rows go into a launch."""
    reference = import_module("tetrad.ops.topk_indices.reference")
    generator = torch.Generator().manual_seed(width)
    rows = hard_rows(width, k, generator)
    rows = rows[torch.arange(max(count, len(rows))) % len(rows)]
    ends = torch.randint(0, width + 1, (rows.shape[0],), generator=generator, dtype=torch.int32)
    ends[::2] = width
    for stride in (width, width + 3, width + 4 - width % 4):
        logits = torch.full((rows.shape[0], stride), torch.inf)[:, :width].copy_(rows).cuda()
        got = torch.full((rows.shape[0], k + 3), -12345, dtype=torch.int32, device="cuda")
        want = got.clone()
        reference.topk_indices(logits, ends.cuda(), k, want[:, :k])
        for _ in range(5):
            got.fill_(-12345)
            for some in torch.arange(len(rows)).split(count):
                part = slice(int(some[0]), int(some[-1]) + 1)
                cuda.topk_indices(logits[part], ends[part].cuda(), k, got[part, :k])
            assert torch.equal(got, want)


@pytest.mark.gpu
@needs_hopper
def test_replays_in_a_graph():
    """New scores in the same place: a capture that had looked at values, or allocated, would repeat the old choice."""
    logits = torch.randn(5, 1000, device="cuda")
    ends = torch.full((5,), 1000, dtype=torch.int32, device="cuda")
    out = torch.empty(5, 37, dtype=torch.int32, device="cuda")
    cuda.topk_indices(logits, ends, 37, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.topk_indices(logits, ends, 37, out)
    logits.normal_()
    ends.fill_(999)
    graph.replay()
    assert out.tolist() == [chosen(row[:999], 37) for row in logits.tolist()]
