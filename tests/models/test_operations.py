"""How many operations a step launches: each costs a launch on a GPU and some microseconds of the host everywhere."""

from __future__ import annotations

import collections
import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tetrad import EngineArgs, LLMEngine, SamplingParams

SEQUENCES = 8
LIMIT = 5500


class Calls(TorchDispatchMode):
    """Counts the ATen calls, and the function of this package that each came from."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.callers: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        frame = sys._getframe(1)
        while frame is not None and "/tetrad/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            file = frame.f_code.co_filename.rpartition("/tetrad/")[2]
            self.callers[f"{file} {frame.f_code.co_name}"] += 1
        return func(*args, **(kwargs or {}))


def test_operations_of_a_decode_step():
    """Once a decode step of the bundled model launched 8,150 small operations. Several steps are counted, since one
    that completes an entry of a compressor, or calls more experts, launches more; the line holds for all."""
    engine = LLMEngine(EngineArgs("bundled", device="cpu", max_model_len=512, max_num_seqs=SEQUENCES))
    for number in range(SEQUENCES):
        ids = [5 + (place * 7 + number) % 250 for place in range(300 + number)]
        engine.add_request(ids, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    while any(not choice.token_ids for request in engine.requests.values() for choice in request.choices):
        engine.step()
    engine.step()
    steps = []
    for _ in range(4):
        with Calls() as calls:
            engine.step()
        steps.append(calls)
    most = max(steps, key=lambda calls: calls.count)
    table = "\n".join(f"{count:6} {caller}" for caller, count in most.callers.most_common(25))
    assert most.count <= LIMIT, f"{[calls.count for calls in steps]} calls; the largest callers:\n{table}"
    assert most.count > 1000, "nothing was counted"
