"""What one sequence costs the scheduler does not grow with the number of those that wait beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tetrad.core.block_manager import BlockManager
from tetrad.core.messages import Add, AddSequence, Sampling
from tetrad.core.scheduler import Scheduler
from tetrad.core.sequence import Sequence

BEGINNING = tuple(range(67))


def scheduler_with(waiting: int, *, shared: bool) -> Scheduler:
    """So many sequences that wait, all with the same beginning."""
    manager = BlockManager(9, 3)
    scheduler = Scheduler(manager, max_num_seqs=3, max_num_batched_tokens=70)
    sequences = (AddSequence(number, (*BEGINNING, number), Sampling(), 0, 5) for number in range(waiting))
    scheduler.add(Add(tuple(sequences), len(BEGINNING) if shared else 0))
    return scheduler


def operations(monkeypatch, work: Callable[[], object]) -> int:
    """Operations of the interpreter, and comparisons of sequences that a container makes on its own."""
    count = 0

    def compare(one: object, other: object) -> bool:
        nonlocal count
        count += 1
        return one is other

    def trace(frame, event, _argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "__eq__", compare)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(before)
    return count


@pytest.mark.parametrize("shared", [False, True])
def test_an_abort(monkeypatch, shared):
    """Every abort looked through all that waited: with 20,000 prompts a Ctrl-C took twelve seconds."""

    def cost(waiting: int) -> int:
        scheduler = scheduler_with(waiting, shared=shared)
        sequence = scheduler.sequences[waiting - 2]
        sequence.finish("abort")
        return operations(monkeypatch, lambda: scheduler.leave(sequence))

    assert cost(211) == cost(11)


def test_a_fork(monkeypatch):
    """Every fork looked through all that waited for the same prefix."""

    def cost(waiting: int) -> int:
        scheduler = scheduler_with(waiting, shared=True)
        scheduler.schedule()  # the prefix
        scheduler.commit([len(BEGINNING)])
        return operations(monkeypatch, scheduler.schedule)

    assert cost(211) == cost(11)
