"""Kernels that begin while the one before them ends must not touch what that one still writes or reads."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
from tests.ops.hopper import compiled, machine_code, on_hopper

from tetrad.bench.cases import Case, Kind, Op, Shape
from tetrad.bench.inputs import make_inputs
from tetrad.geometry import IndexDtype
from tetrad.ops import indexer_logits, nvrtc, plan_indexer, topk_indices
from tetrad.ops.indexer_logits import sm90 as scorer
from tetrad.ops.plan_indexer import sm90 as plan
from tetrad.ops.topk_indices import cuda as topk

K = 100


KERNELS = {
    **{f"plan of {threads} threads": (plan.source(), plan.defines(threads)) for threads in (128, 1024)},
    **{
        f"scorer of {dtype}, {heads} heads, {rows} rows": (
            scorer.source(),
            scorer.variant(dtype, rows, 1).defines(dtype, heads),
        )
        for dtype, heads, rows in (
            (IndexDtype.FP4, 64, 1),
            (IndexDtype.FP4, 32, 1),
            (IndexDtype.FP4, 64, 2),
            (IndexDtype.FP8, 64, 1),
            (IndexDtype.FP8, 64, 2),
        )
    },
    **{
        f"top-k of {rows} x {width}": (topk.source(), topk.macros(topk.layout_for(rows, width, 512)))
        for rows, width in ((1, 8192), (200, 8192), (1, 32768), (200, 32768), (1, 131072), (64, 131072), (1, 262144))
    },
}


@pytest.mark.parametrize("name", KERNELS)
def test_machine_code_waits_before_it_loads(name, tmp_path):
    """Compilers move loads of what they take for constant: none may come before the wait (ACQBULK)."""
    code = machine_code(compiled(*KERNELS[name], tmp_path))
    before, after = code.split("ACQBULK")
    assert "PREEXIT" in before
    memory = re.compile(r"\b(LDG|STG|LD|ST|RED|ATOM|ATOMG|UBLKCP|UBLKPF)\b[. ]")
    assert not memory.search(before)
    assert memory.search(after)


class FakeCore:
    """What a launch asks of cuda.core; remembers the options."""

    def __init__(self):
        self.options = {}
        self.Stream = SimpleNamespace(from_handle=lambda handle: handle)

        def config(**options):
            self.options = options

        config.programmatic_stream_serialization = None
        self.LaunchConfig = config

    def launch(self, *arguments):
        pass


@pytest.mark.parametrize("early", [True, False])
def test_launches_ask_for_it(monkeypatch, early):
    """One that did not would only be slow; a kernel without the wait that was launched so would read old scores."""
    core = FakeCore()
    driver = SimpleNamespace(cuDriverGetVersion=lambda: (0, 13000))
    monkeypatch.setattr(nvrtc, "_cuda_core", lambda: core)
    monkeypatch.setattr(nvrtc, "_make_current", lambda index: None)
    monkeypatch.setattr(nvrtc.importlib, "import_module", lambda name: {"cuda.bindings.driver": driver}[name])
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=7))
    nvrtc.CudaKernel(None, None, 0, 100, early).launch((3,), (64,), 1)
    assert core.options["grid"] == (3, 1, 1)
    assert core.options.get("programmatic_stream_serialization", False) is early


def test_a_source_without_the_wait_is_refused():
    with pytest.raises(AssertionError, match="run into the kernel before"):
        nvrtc.cuda_kernel("__global__ void f() {}", "f", torch.device("cuda", 0), early_start=True)


@pytest.mark.parametrize(
    ("known", "error", "version", "wanted"),
    [(True, 0, 13000, True), (True, 0, 12030, True), (True, 0, 12020, False), (True, 1, 13000, False),
     (False, 0, 13000, False)],
)  # fmt: skip
def test_only_where_it_can_be_captured(monkeypatch, known, error, version, wanted):
    """An older driver refuses such a launch while a graph is captured, and the step would fail."""
    core = SimpleNamespace(
        LaunchConfig=SimpleNamespace(**({"programmatic_stream_serialization": None} if known else {}))
    )
    driver = SimpleNamespace(cuDriverGetVersion=lambda: (error, version))
    monkeypatch.setattr(nvrtc.importlib, "import_module", lambda name: {"cuda.bindings.driver": driver}[name])
    assert nvrtc.can_start_early(core) is wanted


@on_hopper
@pytest.mark.parametrize("dtype", [IndexDtype.FP4, IndexDtype.FP8])
@pytest.mark.parametrize("shape", [(64, 9000, 1), (7, 3000, 3), (1, 40_000, 1), (200, 300, 1)])
def test_layers_that_share_their_buffers(dtype, shape):
    """Every layer's scores go where the last one's were, which its top-k may still be reading; twenty times."""
    device = torch.device("cuda", 0)
    case = Case(Op.TOTAL, Shape(Kind.DECODE, *shape), dtype, 64, 128, K)
    layers = make_inputs(case, 8, device)
    wanted, chosen = [], [torch.empty((each.q.shape[0], K), dtype=torch.int32, device=device) for each in layers]
    scores = torch.empty_like(layers[0].logits)
    for each in layers:
        own = indexer_logits(*each.scorer_arguments, width=each.width)
        torch.cuda.synchronize()
        wanted.append(topk_indices(own, each.visible_end, K))
        torch.cuda.synchronize()
    first = layers[0]
    made = plan_indexer(first.row_request, first.visible_end, width=first.width)

    def step():
        plan_indexer(first.row_request, first.visible_end, width=first.width, out=made)
        for each, places in zip(layers, chosen, strict=True):
            indexer_logits(*each.scorer_arguments, width=each.width, plan=made, out=scores)
            topk_indices(scores, each.visible_end, K, out=places)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for run in [step] * 10 + [graph.replay] * 10:
        for places in chosen:
            places.fill_(-7)
        run()
        for got, want in zip(chosen, wanted, strict=True):
            assert torch.equal(got, want)
