"""Does the suite notice? Makes one mistake at a time in a copy of the package and expects the tests to fail.

    python tests/mutations.py [--only TEXT] [--source FOLDER] [--processes N]

Every mistake of ``tests.mutants`` is made in a copy of its own and checked in a process of its own; the package itself
is never touched. The unchanged copy must pass first. The exit status is 1 if a mistake survives, if its source text is
no longer there, or if it breaks the code in a way that no test had to notice (an exception, not a wrong number).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)
sys.dont_write_bytecode = True

# imported here so that the processes, which are forks of this one, share them; tetrad itself must not be among them
import numpy  # noqa: E402, F401
import pytest  # noqa: E402
import safetensors.torch  # noqa: E402, F401
import torch  # noqa: E402

from tests.mutants import MUTANTS, Mutant  # noqa: E402

SECONDS_PER_MUTANT = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant: ``killed``, ``survived``, ``broken`` or ``stale``, and the line that says why."""

    status: str
    by: str = ""
    line: str = ""
    seconds: float = 0.0


class Stale(Exception):
    """A mutant's source text does not stand exactly once in the package."""


def apply(mutant: Mutant, package: Path) -> None:
    """Make the mistake in a copy of the package."""
    for edit in mutant.edits:
        path = package / edit.file
        count = path.read_text(encoding="utf-8").count(edit.old) if path.is_file() else 0
        if count != 1:
            raise Stale(f"{edit.file} holds {count} times, not once: {edit.old}")
        path.write_text(path.read_text(encoding="utf-8").replace(edit.old, edit.new), encoding="utf-8")


def check_subset(folder: Path) -> Outcome:
    """Run the oracle subset on the package that is first on the path."""
    from tests.oracle_subset import CHECKS

    for check in CHECKS:
        try:
            check(folder)
        except AssertionError as error:
            return Outcome("killed", check.__name__, str(error).partition("\n")[0])
    return Outcome("survived")


class FirstFailure:
    """A pytest plugin that remembers the first failure."""

    def __init__(self) -> None:
        self.outcome = Outcome("survived")

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        error = call.excinfo.value
        expected = isinstance(error, AssertionError | pytest.fail.Exception)
        line = f"{call.excinfo.typename}: {error}".partition("\n")[0]
        self.outcome = Outcome("killed" if expected else "broken", node.nodeid.rpartition("/")[2], line)


def check_tests(names: tuple[str, ...]) -> Outcome:
    """Run tests by name on the package that is first on the path."""
    plugin = FirstFailure()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *names], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return Outcome("broken", "pytest", f"{code!r}: {output.getvalue().strip().splitlines()[-1]}")
    return plugin.outcome


def examine(job: tuple[str, Mutant, str, str]) -> Outcome:
    """In a process of its own: copy the package, make the mistake, run what must notice it."""
    where, mutant, source, oracle = job
    start = time.monotonic()
    package = Path(where) / "tetrad"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    signal.alarm(SECONDS_PER_MUTANT)
    try:
        apply(mutant, package)
        os.chdir(ROOT)
        sys.path.insert(0, where)
        import tetrad

        if Path(str(tetrad.__file__)).parent != package:
            return Outcome("broken", "set-up", f"the package came from {tetrad.__file__}")
        outcome = check_tests(mutant.tests) if mutant.tests else check_subset(Path(oracle))
    except Stale as stale:
        outcome = Outcome("stale", "", str(stale))
    except Exception as error:
        outcome = Outcome("broken", type(error).__name__, str(error).partition("\n")[0])
    finally:
        shutil.rmtree(where)
    return Outcome(outcome.status, outcome.by, outcome.line, time.monotonic() - start)


def time_out(signum: int, frame: Any) -> None:
    raise TimeoutError(f"not done after {SECONDS_PER_MUTANT} s")


def main() -> int:
    """Run the mutants that were asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only the mutants whose name contains this")
    parser.add_argument("--source", type=Path, default=ROOT / "src" / "tetrad", help="the package to make mistakes in")
    parser.add_argument("--processes", type=int, default=2, help="mutants examined at a time (default: 2)")
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if not mutants:
        print(f"no mutant's name contains {options.only!r}")
        return 1

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, time_out)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tetrad-mutations-") as scratch:
        folder = Path(scratch)
        # a snapshot: the package may change while this runs
        source = folder / "source" / "tetrad"
        shutil.copytree(options.source, source, ignore=shutil.ignore_patterns("__pycache__"))
        oracle = folder / "oracle"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(source.parent), str(ROOT)))}
        command = [sys.executable, "-m", "tests.oracle_subset", str(oracle)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)

        tests = tuple(dict.fromkeys(name for mutant in mutants for name in mutant.tests))
        unchanged = [Mutant("the oracle subset", ()), *([Mutant("the tests named", (), tests)] if tests else [])]
        jobs = [
            (str(folder / str(number)), mutant, str(source), str(oracle))
            for number, mutant in enumerate([*unchanged, *mutants])
        ]
        # a fork for every mutant: what is imported above need not be imported again
        with multiprocessing.get_context("fork").Pool(options.processes, maxtasksperchild=1) as pool:
            for (_, mutant, *_), outcome in zip(jobs[: len(unchanged)], pool.imap(examine, jobs[: len(unchanged)])):
                if outcome.status != "survived":
                    print(f"{mutant.name} must pass on the unchanged package: {outcome.by}: {outcome.line}")
                    return 1
                print(f"{mutant.name}, package unchanged: passes in {outcome.seconds:.1f} s")
            outcomes = []
            for mutant, outcome in zip(mutants, pool.imap(examine, jobs[len(unchanged) :], chunksize=1), strict=True):
                outcomes.append(outcome)
                print(f"{outcome.status:8}  {mutant.name}\n          {outcome.by}: {outcome.line}", flush=True)

    killed = sum(outcome.status == "killed" for outcome in outcomes)
    print(f"{killed} of {len(mutants)} mutants killed in {time.monotonic() - start:.0f} s")
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        if outcome.status != "killed":
            print(f"{outcome.status}: {mutant.name}: {outcome.line or 'no test noticed it'}")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
