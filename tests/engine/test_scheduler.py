"""Scheduler and block manager together, without a model: what must hold in every step of every history.

The caches are played by arrays of token ids. A step writes its tokens where the holdings say, and every sequence must
then find its own tokens at every position that it will still read: a block with two writers, a fork that copies too
little, or a window block that is given back too early shows as a wrong id.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tetrad.cache.block_manager import ABSENT, BlockManager, Holding
from tetrad.cache.spec import CacheSizes
from tetrad.core.plan import Batch
from tetrad.engine.scheduler import Scheduler
from tetrad.engine.sequence import SequenceStatus
from tetrad.geometry import BLOCK_SIZE, blocks_for, window_blocks_bound

RING = 16
"""Tokens that the state of a sequence remembers here."""


@dataclass(eq=False)
class FakeSequence:
    """As much of a sequence as the scheduler knows."""

    arrival: int
    tokens: list[int]
    final_length: int
    computed: int = 0
    holding: Holding | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    preemptions: int = 0
    is_stem: bool = False
    branches: int = 0
    stem: FakeSequence | None = None
    waited: int = field(default=0)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        return self.length - self.computed


class World:
    """A scheduler, the arrays that play its caches, and the checks."""

    def __init__(
        self, *, max_model_len: int, spare_blocks: int, max_num_seqs: int, budget: int, window: int, chunked: bool
    ) -> None:
        self.window, self.max_model_len, self.max_num_seqs = window, max_model_len, max_num_seqs
        self.budget = budget if chunked else max(budget, max_model_len)
        sizes = CacheSizes(
            blocks_for(max_model_len) + spare_blocks,
            window_blocks_bound(max_num_seqs, self.budget, window),
            max_num_seqs,
        )
        self.manager = BlockManager(sizes, window)
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=self.budget, chunked_prefill=chunked
        )
        self.blocks = np.full((sizes.blocks, BLOCK_SIZE), -1)
        self.window_blocks = np.full((sizes.window_blocks, BLOCK_SIZE), -1)
        self.states = np.full((sizes.state_slots, RING), -1)
        self.unfinished: list[FakeSequence] = []
        self.arrivals = 0
        self.next_token = 0

    def new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def add(self, prompt: int, output: int) -> None:
        self._queue([self._sequence(self.new_tokens(prompt), output)])

    def add_family(self, prefix: int, ends: list[tuple[int, int]]) -> None:
        """Sequences with a common beginning and a stem that computes it, as the engine queues them."""
        beginning = self.new_tokens(prefix)
        stem = self._sequence(beginning, 0)
        stem.is_stem, stem.branches = True, len(ends)
        branches = [self._sequence(beginning + self.new_tokens(prompt), output) for prompt, output in ends]
        for branch in branches:
            branch.stem = stem
        self._queue([stem, *branches])

    def _sequence(self, tokens: list[int], output: int) -> FakeSequence:
        self.arrivals += 1
        tokens = tokens[: self.max_model_len - 1]
        return FakeSequence(self.arrivals, tokens, min(len(tokens) + output, self.max_model_len))

    def _queue(self, sequences: list[FakeSequence]) -> None:
        self.unfinished += [sequence for sequence in sequences if not sequence.is_stem]
        self.scheduler.add(sequences)  # type: ignore[arg-type]

    def abort(self, sequence: FakeSequence) -> None:
        self.scheduler.leave(sequence)  # type: ignore[arg-type]
        sequence.status = SequenceStatus.FINISHED
        self.unfinished.remove(sequence)

    def step(self) -> Batch:
        was_running = list(self.scheduler.running)
        batch = self.scheduler.schedule()
        self.check_choice(batch, was_running)
        self.copy(batch)
        self.write(batch)
        self.scheduler.advance(batch)
        self.check_reading()
        for item in batch.scheduled:
            if item.samples:
                self.sample(item.sequence)  # type: ignore[arg-type]
        return batch

    def sample(self, sequence: FakeSequence) -> None:
        sequence.tokens += self.new_tokens(1)
        if sequence.length >= sequence.final_length:
            self.abort(sequence)

    # ---- what must hold ----

    def check_choice(self, batch: Batch, was_running: list) -> None:
        items = batch.scheduled
        assert items, "a step that does nothing while there is work never ends"
        assert batch.tokens <= self.budget
        assert len({id(item.sequence) for item in items}) == len(items)
        assert len(self.scheduler.running) <= self.max_num_seqs
        for item in items:
            assert item.sequence in self.scheduler.running
            assert item.start == item.sequence.computed
            assert 0 < item.count <= item.sequence.remaining
            if not self.scheduler.chunked_prefill:
                assert item.end == item.sequence.length, "without chunks a prompt is computed whole"
        order = [sequence.arrival for sequence in self.scheduler.running]  # type: ignore[attr-defined]
        order += [sequence.arrival for sequence in self.scheduler.waiting]  # type: ignore[attr-defined]
        assert order == sorted(order), "first come, first served, preempted ones included"
        chosen = {id(item.sequence) for item in items}
        if batch.tokens < self.budget and self.scheduler.chunked_prefill:
            idle = [s for s in self.scheduler.running if s.remaining and id(s) not in chosen]
            assert not idle, "there was budget left for these"
        starved = [
            sequence
            for sequence in was_running
            if sequence.remaining == 1 and sequence.status is SequenceStatus.RUNNING and id(sequence) not in chosen
        ]
        if starved:
            assert batch.tokens == self.budget
            assert all(item.sequence.remaining == 1 for item in items), "a prompt went before a decode token"

    def check_owners(self) -> None:
        holdings = [s.holding for s in self.scheduler.running]
        assert all(holding is not None for holding in holdings)
        assert all(sequence.holding is None for sequence in self.scheduler.waiting)
        for pool, lists in (
            (self.manager.blocks, [holding.blocks for holding in holdings]),
            (self.manager.window_blocks, [holding.window_blocks for holding in holdings]),
            (self.manager.state_slots, [[holding.state_slot] for holding in holdings]),
        ):
            owned = [number for numbers in lists for number in numbers if number != ABSENT]
            assert all(0 <= number < pool.size for number in owned)
            assert pool.free == pool.size - len(set(owned)), "some are nobody's, or free and owned"
            assert set(pool._free).isdisjoint(owned)
            assert all(len(set(numbers) - {ABSENT}) == len(numbers) - numbers.count(ABSENT) for numbers in lists)
        slots = [holding.state_slot for holding in holdings]
        assert len(set(slots)) == len(slots), "a state has one owner"

    def copy(self, batch: Batch) -> None:
        for array, pairs in (
            (self.blocks, batch.copies.blocks),
            (self.window_blocks, batch.copies.window_blocks),
            (self.states, batch.copies.state_slots),
        ):
            before = array.copy()
            for source, target in pairs:
                array[target] = before[source]

    def write(self, batch: Batch) -> None:
        for item in batch.scheduled:
            holding, tokens = item.sequence.holding, item.sequence.tokens
            assert holding is not None
            assert len(holding.blocks) == len(holding.window_blocks) == blocks_for(item.end)
            for position in range(item.start, item.end):
                block, place = divmod(position, BLOCK_SIZE)
                assert self.manager.blocks._owners[holding.blocks[block]] == 1, "a shared block was written to"
                assert self.manager.window_blocks._owners[holding.window_blocks[block]] == 1
                self.blocks[holding.blocks[block], place] = tokens[position]
                self.window_blocks[holding.window_blocks[block], place] = tokens[position]
                self.states[holding.state_slot, position % RING] = tokens[position]

    def check_reading(self) -> None:
        """Everything that a later step reads of what is computed is there, in every running sequence."""
        for sequence in self.scheduler.running:
            holding, computed, tokens = sequence.holding, sequence.computed, np.array(sequence.tokens)
            assert holding is not None
            for block in range(blocks_for(computed)):
                first, end = block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, computed)
                mine = tokens[first:end]
                assert np.array_equal(self.blocks[holding.blocks[block], : end - first], mine)
                seen = max(0, computed - self.window + 1) - first  # the first position that the next query reads
                if seen < len(mine):
                    seen = max(0, seen)
                    assert holding.window_blocks[block] != ABSENT
                    assert np.array_equal(
                        self.window_blocks[holding.window_blocks[block], seen : end - first], mine[seen:]
                    )
            recent = np.arange(max(0, computed - RING), computed)
            assert np.array_equal(self.states[holding.state_slot, recent % RING], tokens[recent])

    def drain(self) -> None:
        """Everything that is left ends, in a number of steps that is bounded by the work."""
        work = sum(sequence.final_length for sequence in self.unfinished)
        limit = 50 + 4 * work
        while self.scheduler.has_work:
            limit -= 1
            assert limit, "no progress"
            self.step()
            self.check_owners()
        assert not self.unfinished
        for pool in (self.manager.blocks, self.manager.window_blocks, self.manager.state_slots):
            assert pool.free == pool.size


WORLDS = {
    "max_model_len": st.sampled_from([256, 300, 600, 1000]),
    "spare_blocks": st.integers(0, 4),
    "max_num_seqs": st.integers(1, 6),
    "budget": st.sampled_from([1, 3, 64, 200, 700]),
    "window": st.sampled_from([1, 8, 128, 256]),
    "chunked": st.booleans(),
}
# lengths around the edges of a block, where a growing sequence needs another one
LENGTHS = st.one_of(st.integers(1, 20), st.sampled_from([200, 250, 254, 255, 256, 257, 511, 512, 513, 999]))
OUTPUTS = st.integers(1, 12)


class Machine(RuleBasedStateMachine):
    """Any order of arrivals, aborts and steps."""

    world: World

    @initialize(**WORLDS)
    def build(self, **sizes) -> None:
        self.world = World(**sizes)

    @rule(prompt=LENGTHS, output=OUTPUTS)
    def add(self, prompt: int, output: int) -> None:
        self.world.add(prompt, output)

    @precondition(lambda self: self.world.max_num_seqs > 1)
    @rule(
        prefix=st.sampled_from([64, 100, 255, 256, 257, 520]),
        ends=st.lists(st.tuples(st.integers(1, 9), OUTPUTS), min_size=2, max_size=4),
    )
    def add_family(self, prefix: int, ends: list[tuple[int, int]]) -> None:
        if prefix + 9 < self.world.max_model_len:
            self.world.add_family(prefix, ends)

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.world.scheduler.has_work:
                self.world.step()
                self.world.check_owners()

    @precondition(lambda self: self.world.unfinished)
    @rule(which=st.integers(0, 10**6))
    def abort(self, which: int) -> None:
        self.world.abort(self.world.unfinished[which % len(self.world.unfinished)])

    @invariant()
    def owners(self) -> None:
        if hasattr(self, "world"):
            self.world.check_owners()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=200, stateful_step_count=25, suppress_health_check=list(HealthCheck), deadline=None
)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("max_num_seqs", [2, 5])
def test_preempted_sequences_resume_and_end_in_order_of_arrival(chunked, max_num_seqs):
    """Two blocks more than one sequence needs, and sequences that all cross into their second block."""
    world = World(max_model_len=512, spare_blocks=1, max_num_seqs=max_num_seqs, budget=64, window=128, chunked=chunked)
    for _ in range(12):
        world.add(250, 30)
    sequences = list(world.unfinished)
    ended: list[int] = []
    while world.scheduler.has_work:
        world.step()
        world.check_owners()
        ended += [s.arrival for s in sequences if s.status is SequenceStatus.FINISHED and s.arrival not in ended]
    assert world.scheduler.preemptions > 5
    assert ended == sorted(ended), "equal work that came earlier ends earlier"
    assert all(sequence.length == 280 for sequence in sequences)


def test_a_long_prompt_does_not_hold_up_running_requests():
    """While a prompt of 900 tokens goes through in chunks, the others get a token in every step."""
    world = World(max_model_len=1000, spare_blocks=8, max_num_seqs=4, budget=64, window=128, chunked=True)
    for _ in range(3):
        world.add(10, 60)
    world.step()
    short = list(world.unfinished)
    world.add(900, 5)
    (long,) = [sequence for sequence in world.unfinished if sequence not in short]
    steps = 0
    while long.remaining > 1 or not long.computed:
        before = [sequence.length for sequence in short]
        world.step()
        steps += 1
        assert [sequence.length for sequence in short] == [length + 1 for length in before]
    assert steps == -(-900 // (64 - 3))


def test_a_budget_below_the_number_of_running_sequences():
    """Six decode tokens, room for two: the earliest go first, and all come to their end."""
    world = World(max_model_len=256, spare_blocks=8, max_num_seqs=6, budget=2, window=8, chunked=True)
    for _ in range(6):
        world.add(1, 9)
    world.drain()


@pytest.mark.parametrize("seed", range(24))
def test_long_histories_with_few_blocks(seed):
    """Blocks for little more than one sequence and more arrivals than places: preemptions of stems and branches."""
    rng = random.Random(seed)
    world = World(
        max_model_len=600,
        spare_blocks=rng.randint(0, 2),
        max_num_seqs=rng.randint(2, 6),
        budget=rng.choice([1, 40, 150, 700]),
        window=rng.choice([1, 128, 256]),
        chunked=seed % 4 > 0,
    )
    for _ in range(150):
        if rng.random() < 0.4 and len(world.unfinished) < 10:
            world.add(rng.choice([3, 70, 250, 255, 300]), rng.randint(1, 12))
        if rng.random() < 0.1 and len(world.unfinished) < 10:
            world.add_family(rng.choice([64, 200, 256, 300]), [(rng.randint(1, 5), rng.randint(1, 9))] * 3)
        if rng.random() < 0.05 and world.unfinished:
            world.abort(rng.choice(world.unfinished))
        if world.scheduler.has_work:
            world.step()
            world.check_owners()
    world.drain()
