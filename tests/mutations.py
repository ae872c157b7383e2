"""Does the suite notice? Makes one mistake at a time in a copy of the package and expects the tests to fail.

    python tests/mutations.py [--only TEXT] [--processes N]

Every mistake of ``tests.mutants`` is made in a copy of its own and checked in a process of its own; the package itself
is never touched. The unchanged copy must pass first. The exit status is 1 if a mistake survives, if its source text is
no longer there, or if it breaks the code in a way that needs no test to be noticed (an exception, not a wrong number).
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)
sys.dont_write_bytecode = True

# imported here because the processes that examine mutants are forks of this one: they need not import it again. The
# package itself must not be among it
import numpy  # noqa: E402, F401
import pytest  # noqa: E402
import safetensors.torch  # noqa: E402, F401
import torch  # noqa: E402

from tests.mutants import MUTANTS, Mutant  # noqa: E402
from tests.mutants.mutant import StaleError  # noqa: E402

SECONDS_PER_MUTANT = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant: killed, survived, broken or stale; by what, and the first line of the reason."""

    status: str
    by: str = ""
    line: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """A mutant to examine in the folder ``where``, made from the package in ``source``."""

    mutant: Mutant
    where: Path
    source: Path
    oracle: Path


def check_subset(oracle: Path) -> Outcome:
    """Run the oracle subset on the package that is first on the path."""
    from tests.oracle_subset import CHECKS

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
    """Run tests by name on the package that is first on the path."""
    plugin, output = FirstFailure(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *names], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        errors = [line for line in output.getvalue().splitlines() if line.startswith("ERROR")]
        return Outcome("broken", "pytest", " ".join([str(code), *errors[:1]]))
    return plugin.outcome


def examine(job: Job) -> Outcome:
    """In a process of its own: copy the package, make the mistake, run what must notice it."""
    start = time.monotonic()
    package = job.where / "tetrad"
    shutil.copytree(job.source, package)
    signal.alarm(SECONDS_PER_MUTANT)
    try:
        for edit in job.mutant.edits:
            edit.apply(package)
        os.chdir(ROOT)
        sys.path.insert(0, str(job.where))
        import tetrad

        if Path(str(tetrad.__file__)).parent != package:
            return Outcome("broken", "set-up", f"the package came from {tetrad.__file__}")
        outcome = check_tests(job.mutant.tests) if job.mutant.tests else check_subset(job.oracle)
    except StaleError as error:
        outcome = Outcome("stale", "set-up", str(error))
    except Exception as error:
        outcome = Outcome("broken", type(error).__name__, str(error).partition("\n")[0])
    finally:
        signal.alarm(0)
        shutil.rmtree(job.where)
    return replace(outcome, seconds=time.monotonic() - start)


def time_out(signum: int, frame: Any) -> None:
    """The alarm's handler."""
    raise TimeoutError(f"not done after {SECONDS_PER_MUTANT} s")


def ask_oracle(source: Path, oracle: Path) -> None:
    """Let transformers, in a process of its own, write what the mutants are compared with."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(source.parent), str(ROOT)))}
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
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="tetrad-mutations-") as scratch:
        folder = Path(scratch)
        # a snapshot, since the package may be edited while this runs
        source, oracle = folder / "source" / "tetrad", folder / "oracle"
        shutil.copytree(ROOT / "src" / "tetrad", source, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(source, quiet=2)
        ask_oracle(source, oracle)
        jobs = [Job(mutant, folder / str(n), source, oracle) for n, mutant in enumerate([*unchanged, *mutants])]
        with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
            waiting = [pool.apply_async(examine, (job,)) for job in jobs]
            for number, (job, result) in enumerate(zip(jobs, waiting, strict=True)):
                try:
                    outcome = result.get(timeout=2 * SECONDS_PER_MUTANT)
                except multiprocessing.TimeoutError:  # its process died
                    outcome = Outcome("broken", "set-up", "no answer")
                print(f"{outcome.status:9}{job.mutant.name:70}{outcome.by}: {outcome.line}".rstrip(": "), flush=True)
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
