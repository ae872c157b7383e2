"""Does the suite notice? Makes one mistake at a time in the package and expects the tests to fail.

    python tests/mutations.py [--only TEXT] [--processes N]

Every mistake of ``tests.mutants`` is made and checked in a process of its own, where it replaces what the package does;
no file is touched. The unchanged package must pass first. The exit status is 1 if a mistake survives, if what it
replaces is no longer there, or if it breaks the code in a way that needs no test to be noticed (an exception, not a
wrong number).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
sys.path[0] = str(ROOT)
sys.path.insert(0, str(SOURCE))
sys.dont_write_bytecode = True

# imported here because the processes that examine mutants are forks of this one: they need not import it again
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.mutants import CONTROLS, MUTANTS, Mutant  # noqa: E402
from tests.mutants.mutant import StaleError  # noqa: E402
from tests.oracle_subset import CHECKS  # noqa: E402

SECONDS_PER_MUTANT = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant: killed, survived, broken or stale; by what, and the first line of the reason."""

    status: str
    by: str = ""
    line: str = ""
    seconds: float = 0.0


def check_subset(oracle: Path) -> Outcome:
    """Run the oracle subset."""
    for check in CHECKS:
        try:
            check(oracle)
        except AssertionError as error:
            return Outcome("killed", check.__name__, str(error).partition("\n")[0])
    return Outcome("survived")


class FirstFailure:
    """A pytest plugin that remembers the first failure."""

    def __init__(self) -> None:
        self.outcome = Outcome("survived")

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        """Called by pytest for every exception; with -x that is one."""
        error = call.excinfo.value
        expected = isinstance(error, (AssertionError, pytest.fail.Exception))
        line = f"{call.excinfo.typename}: {error}".partition("\n")[0]
        self.outcome = Outcome("killed" if expected else "broken", node.nodeid.rpartition("/")[2], line)


def check_tests(names: tuple[str, ...]) -> Outcome:
    """Run tests by name."""
    plugin, output = FirstFailure(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *names], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        errors = [line for line in output.getvalue().splitlines() if line.startswith("ERROR")]
        return Outcome("broken", "pytest", " ".join([str(code), *errors[:1]]))
    return plugin.outcome


JOBS: list[Mutant] = []
"""What there is to examine: known to forks, where it could not be sent."""


def examine(number: int, oracle: Path) -> Outcome:
    """In a process of its own: make the mistake, run what must notice it."""
    mutant, start = JOBS[number], time.monotonic()
    signal.alarm(SECONDS_PER_MUTANT)
    try:
        for patch in mutant.patches:
            patch.apply()
        outcome = check_tests(mutant.tests) if mutant.tests else check_subset(oracle)
    except StaleError as error:
        outcome = Outcome("stale", "set-up", str(error))
    except Exception as error:
        outcome = Outcome("broken", type(error).__name__, str(error).partition("\n")[0])
    finally:
        signal.alarm(0)
    return replace(outcome, seconds=time.monotonic() - start)


def time_out(signum: int, frame: Any) -> None:
    """The alarm's handler."""
    raise TimeoutError(f"not done after {SECONDS_PER_MUTANT} s")


def ask_oracle(oracle: Path) -> None:
    """Let transformers, in a process of its own, write what the mutants are compared with."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(SOURCE), str(ROOT)))}
    command = [sys.executable, "-m", "tests.oracle_subset", str(oracle)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the oracle failed:\n{done.stderr}")


def run(mutants: list[Mutant], processes: int) -> list[Outcome]:
    """Examine the unchanged package, then every mutant, and say so line by line."""
    tests = tuple(dict.fromkeys(name for mutant in mutants for name in mutant.tests))
    unchanged = [Mutant("unchanged: the oracle subset", ())]
    if tests:
        unchanged.append(Mutant("unchanged: the tests that mutants name", (), tests))
    unchanged += [replace(control, name=f"unchanged: {control.name}") for control in CONTROLS]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="tetrad-mutations-") as scratch:
        oracle = Path(scratch)
        ask_oracle(oracle)
        JOBS[:] = [*unchanged, *mutants]
        with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
            waiting = [pool.apply_async(examine, (number, oracle)) for number in range(len(JOBS))]
            for number, (job, result) in enumerate(zip(JOBS, waiting, strict=True)):
                try:
                    outcome = result.get(timeout=2 * SECONDS_PER_MUTANT)
                except multiprocessing.TimeoutError:  # its process died
                    outcome = Outcome("broken", "set-up", "no answer")
                print(f"{outcome.status:9}{job.name:70}{outcome.by}: {outcome.line}".rstrip(": "), flush=True)
                if number >= len(unchanged):
                    outcomes.append(outcome)
                elif outcome.status != "survived":
                    sys.exit("the unchanged package must survive; nothing can be said about mutants")
    return outcomes


def main() -> int:
    """Run the mutants that were asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only the mutants whose name contains this")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="examined at a time (default: 2)")
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if not mutants:
        parser.error(f"no mutant's name contains {options.only!r}")
    torch.set_num_threads(1)
    gc.freeze()  # else the collector touches, and so copies, in every fork what they could share
    signal.signal(signal.SIGALRM, time_out)

    start = time.monotonic()
    outcomes = run(mutants, options.processes)
    killed = sum(outcome.status == "killed" for outcome in outcomes)
    print(f"\n{killed} of {len(mutants)} mutants killed in {time.monotonic() - start:.0f} s")
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        if outcome.status != "killed":
            print(f"{outcome.status}: {mutant.name}: {outcome.line or 'no test noticed it'}")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
