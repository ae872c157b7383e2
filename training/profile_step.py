"""Times one training step at several lengths on a GPU, and lists the kernels that take longest.

python profile_step.py [tokens per step]
"""

from __future__ import annotations

import sys
import time

import torch
from data import Batches, Stage
from model import Model, Shape
from optimise import make_optimisers
from torch.profiler import ProfilerActivity, profile
from train import Stepper, parse, train_step


def main(tokens: int) -> None:
    torch.set_float32_matmul_precision("high")
    model = Model(Shape(), 1, torch.bfloat16).to("cuda")
    options = parse(["--out", "unused", "--muon", "--graphs", "--rate", "1e-4"])
    optimisers = make_optimisers(model, 1e-4, 0.02, True)
    stepper = Stepper(model, optimisers, options)
    for lengths, selection, quantised in (((256,), False, False), ((2048,), True, False), ((32768,), True, True)):
        stage = Stage(4, lengths, selection=selection, quantised=quantised, tokens=tokens)
        data = [Batches([stage], 1)[i].to("cuda") for i in range(2)]
        times = []
        for turn in range(9):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            stepper(data[turn % 2], stage)
            torch.cuda.synchronize()
            times.append(round(1000 * (time.perf_counter() - begun), 1))
        memory = torch.cuda.max_memory_allocated() / 2**30
        print(f"{lengths} selection {selection}: {times} ms, {memory:.1f} GiB", flush=True)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            train_step(model, optimisers, data[0], stage, options)
            torch.cuda.synchronize()
        rows = [e for e in trace.key_averages() if e.self_device_time_total > 0 and not e.key.startswith("aten::")]
        rows.sort(key=lambda e: -e.self_device_time_total)
        print(f"  {sum(e.self_device_time_total for e in rows) / 1000:.1f} ms in {sum(e.count for e in rows)} kernels")
        for event in rows[:24]:
            print(f"    {event.self_device_time_total / 1000:8.2f} ms {event.count:5d} {event.key[:150]}")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("profile_step.py: error: it lists the kernels of a GPU, and torch sees none here")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32768)
