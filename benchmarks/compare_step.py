"""CPU prefill and decode of the bundled model by two checkouts, side by side.

    python benchmarks/compare_step.py OLD_SRC NEW_SRC

Each argument is the folder that holds the package ``tetrad``. Both are loaded in processes of their own, which take
turns of a fraction of a second, so that whatever else the machine does slows both alike. Printed are the medians in
milliseconds and their ratio, new over old.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SEQUENCES = 8
DECODE_PROMPT = 300
PREFILL_PROMPT = 700
STEPS = 8
"""Decode steps in one turn."""


class Checkout:
    """A process over one checkout that does a turn when it is told to."""

    def __init__(self, source: Path, threads: int) -> None:
        environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.package = self._answer()
        if not Path(str(self.package)).is_relative_to(source.resolve()):
            raise SystemExit(f"{source} holds no package tetrad: {self.package} was loaded")
        self.milliseconds: dict[str, list[float]] = {"decode": [], "prefill": []}

    def turn(self, kind: str, *, counts: bool) -> None:
        """One turn; the first ones warm up and do not count."""
        assert self._process.stdin is not None
        self._process.stdin.write(kind + "\n")
        self._process.stdin.flush()
        answer = float(self._answer())
        if counts:
            self.milliseconds[kind].append(answer)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a checkout failed; its error stands above")
        return line.strip()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work(threads: int) -> None:
    """The process over one checkout: a line in, milliseconds out."""
    import torch

    import tetrad
    from tetrad import EngineArgs, LLMEngine, SamplingParams

    torch.set_num_threads(threads)
    engine = LLMEngine(EngineArgs(model="bundled", device="cpu", max_model_len=2048, max_num_seqs=SEQUENCES))
    print(Path(tetrad.__file__).resolve(), flush=True)

    def add(count: int, length: int, tokens: int) -> None:
        for number in range(count):
            ids = [5 + (place * 7 + number) % 250 for place in range(length + number)]
            engine.add_request(ids, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))

    def step() -> float:
        begin = time.perf_counter()
        engine.step(finished_only=True)
        return 1e3 * (time.perf_counter() - begin)

    for line in sys.stdin:
        if line.strip() == "decode":
            add(SEQUENCES, DECODE_PROMPT, 16 + STEPS)
            while len(engine.step()) < SEQUENCES:
                pass
            print(statistics.median(step() for _ in range(STEPS)), flush=True)
        else:
            add(1, PREFILL_PROMPT, 1)
            total = 0.0
            while engine.has_unfinished_requests:
                total += step()
            print(total, flush=True)
        while engine.has_unfinished_requests:
            engine.step(finished_only=True)


def compare(old: Path, new: Path, rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Milliseconds of both and their ratio, for decode and prefill."""
    checkouts = [Checkout(old, threads), Checkout(new, threads)]
    for number in range(rounds + 1):
        for kind in ("decode", "prefill"):
            for checkout in checkouts if number % 2 else reversed(checkouts):
                checkout.turn(kind, counts=number > 0)
    for checkout in checkouts:
        checkout.close()
    result = {}
    for kind in ("decode", "prefill"):
        before, after = (statistics.median(checkout.milliseconds[kind]) for checkout in checkouts)
        result[kind] = {"old_ms": round(before, 2), "new_ms": round(after, 2), "ratio": round(after / before, 3)}
    return result


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each checkout (default: 15)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.work:
        work(parsed.work)
    elif parsed.old is None or parsed.new is None:
        parser.error("two source folders are needed")
    else:
        result = compare(parsed.old.resolve(), parsed.new.resolve(), parsed.rounds, parsed.threads)
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
