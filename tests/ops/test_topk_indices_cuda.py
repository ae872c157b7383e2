"""The CUDA C++ top-k: its shapes, its logic on a CPU, and its results where a device is."""

from __future__ import annotations

import re
import shutil
from importlib import import_module

import pytest
import torch
from tests.ops.cuda_emulation import EmulatedKernel
from tests.ops.test_topk_indices_triton import chosen, hard_rows

from tetrad.errors import ConfigError
from tetrad.ops import nvrtc

cuda = import_module("tetrad.ops.topk_indices.cuda")
PROBLEMS = [
    (rows, width, k)
    for rows in (1, 64, 4096)
    for width in (100, 8192, 8193, 16384, 32768, 131072, 1 << 20)
    for k in (1, 512, 513, 1024, 2048, 5000)
]
SHAPES = sorted({cuda.shape_for(*problem) for problem in PROBLEMS}, key=repr)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_rows_fit_their_shape(problem):
    """A row longer than its thread block's shared memory would be cut off there; a pool smaller than 2 k would send
    ordinary rows the slow way, and so would a k larger than the sets of groups allow."""
    _, width, k = problem
    shape = cuda.shape_for(*problem)
    if shape.cluster == 1:
        assert width <= 4 * shape.threads * shape.blocks
    elif k <= 2048:
        assert shape.capacity >= 2 * k
    assert k > 2048 or k <= 16 * shape.cluster * shape.groups * shape.threads // 32
    assert 1024 % shape.threads == 0
    assert shape.blocks <= 8
    assert shape.resident * shape.threads <= 2048
    assert shape.resident * (shape.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shared_bytes_hold_the_struct(shape):
    """Too few would let the kernel write into its neighbour's shared memory. The struct's size, added up from its
    own text."""
    macros = {
        "CHUNK": 4 * shape.threads * shape.blocks,
        "CAPACITY": getattr(shape, "capacity", 0),
        "BLOCKS": shape.blocks,
        **{name: int(value) for name, value in re.findall(r"#define (BINS|LIST) (\d+)", shape.source)},
    }
    text = re.search(r"struct alignas\(16\) Shared \{(.*?)\n\};", shape.source, re.DOTALL).group(1)
    sizes = {"float": 4, "u32": 4, "u64": 8}
    end = 0
    members = re.findall(r"(float|u32|u64) \w+(?:\[([\w /]+)\])?;", text)
    for kind, count in members:
        size = sizes[kind]
        end = (end + size - 1) // size * size
        end += size * (int(eval(count, {}, macros)) if count else 1)
    assert text.count(";") == len(members)
    assert (end + 15) // 16 * 16 <= shape.shared_bytes


EMULATED = [
    (cuda.RowShape(64, 2, 1, 1), [(512, 64), (509, 7)]),
    (cuda.RowShape(128, 4, 4, 1), [(2047, 256), (700, 90)]),
    (cuda.ClusterShape(64, 2, 1, 1, cluster=2, capacity=128), [(1024, 64), (3001, 33)]),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("shape", "problems"), EMULATED, ids=str)
def test_the_sources_logic(shape, problems, tmp_path):
    """Small thread blocks with the whole of the source, so that every way through it is taken: ties beyond what the
    fast way takes, NaN among the best, rows of any end and alignment, rows longer than shared memory."""
    kernel = EmulatedKernel(shape, tmp_path, most=300)
    generator = torch.Generator().manual_seed(shape.threads)
    for width, k in problems:
        rows = hard_rows(width, k, generator)
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
                kernel.topk_indices(logits, case, k, out)
                assert (out[:, k:] == -12345).all()
                for index, end in enumerate(case.tolist()):
                    got = out[index, :k].tolist()
                    assert got == chosen(rows[index, :end].tolist(), k), f"row {index}, width {width}, end {end}"


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))
@pytest.mark.parametrize("shape", SHAPES[::4], ids=str)
def test_compiles_without_a_device(shape):
    try:
        code = nvrtc.compile_cubin(shape.source, "sm_90a", defines=cuda.macros(shape))
    except Exception as error:
        if "libnvrtc" in str(error):
            pytest.skip("the NVRTC library is not installed")
        raise
    assert code[:4] == b"\x7fELF"


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
    ("width", "k"), [(8192, 512), (16384, 600), (16385, 512), (32768, 2048), (131073, 512), (300001, 9)]
)
def test_equals_the_reference(width, k):
    reference = import_module("tetrad.ops.topk_indices.reference")
    generator = torch.Generator().manual_seed(width)
    rows = hard_rows(width, k, generator)
    ends = torch.randint(0, width + 1, (rows.shape[0],), generator=generator, dtype=torch.int32)
    ends[::2] = width
    for stride in (width, width + 3, width + 4 - width % 4):
        logits = torch.full((rows.shape[0], stride), torch.inf)[:, :width].copy_(rows).cuda()
        got = torch.full((rows.shape[0], k + 3), -12345, dtype=torch.int32, device="cuda")
        want = got.clone()
        reference.topk_indices(logits, ends.cuda(), k, want[:, :k])
        for _ in range(20):
            cuda.topk_indices(logits, ends.cuda(), k, got[:, :k])
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
