"""The part of the measurement that a CPU cannot run: events, graphs, a cold cache, and the kernels themselves."""

from __future__ import annotations

import pytest
import torch

from tetrad.bench.cases import BenchSettings, Kind, Op, Shape
from tetrad.bench.device import cache_bytes
from tetrad.bench.measurement import Status, run_bench
from tetrad.bench.peers import Own
from tetrad.bench.report import table
from tetrad.bench.timing import time_calls
from tetrad.geometry import IndexDtype

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_all_back_ends_of_this_device():
    """Every back end that serves this device is right and timed. The reference waits for its device, so it cannot be
    captured; everything else is, and finds a cold cache."""
    device = torch.device("cuda", 0)
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    named = [("triton",), ("reference",), *([("sm90", "cuda")] if hopper else [])]
    settings = BenchSettings(
        shapes=(Shape(Kind.DECODE, 9, 5000, 2), Shape(Kind.PREFILL, 1, 3000, 300)), repeats=5, k=300
    )
    result = run_bench(settings, device, [Own(device, names) for names in named])
    text = table(result)
    print(text)
    assert {each.status for each in result.results} <= {Status.OK, Status.REFUSED}, text
    assert result.ceilings is not None
    assert result.ceilings.read.per_second > 1e11
    for each in result.results:
        if each.timing is not None and each.contender == "reference" and each.case.op is Op.SCORE:
            assert each.timing.method == "events", text
        if each.timing is not None and each.contender != "reference" and each.case.op in (Op.SCORE, Op.TOPK):
            assert (each.timing.method, each.cold) == ("graph", True), text
        if each.timing is not None and each.case.op is Op.SCORE and each.case.dtype is not IndexDtype.BF16:
            assert each.percent_of_floor(result.ceilings) < 105, text


@pytest.mark.gpu
@needs_gpu
def test_a_graph_runs_every_call():
    """Each of the captured calls works on inputs of its own, whatever the warm-up did."""
    device = torch.device("cuda", 0)
    counters = torch.zeros(5, 64, device=device)
    timing = time_calls([lambda row=row: row.add_(1) for row in counters], device, 5)
    assert (timing.method, timing.calls) == ("graph", 5)
    assert (counters[1:4] == counters[1, 0]).all()
    assert counters[1, 0] >= 5 + 1
    waiting = time_calls([lambda: counters.sum().item()], device, 5)
    assert waiting.method == "events"
    assert cache_bytes(device) > 0
    # and nothing is left in a state that forbids to wait
    assert counters.sum().item() > 0
