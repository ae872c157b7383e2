"""Scheduler and block manager together, without a model: what must hold in every step of every history.

The caches are played by arrays of token ids. A step writes its tokens where the plans have said, and every sequence
must then find its own tokens at every position that it will still read: a block with two writers, a fork that copies
too little, or a delta that goes to the wrong row shows as a wrong id. Only plans reach the arrays, as they would reach
a runner in another process.
"""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tetrad.core.block_manager import BlockManager
from tetrad.core.messages import Add, AddSequence, Sampling
from tetrad.core.plan import NEXT, StepPlan
from tetrad.core.scheduler import Scheduler
from tetrad.core.sequence import NONE, Sequence, Status
from tetrad.geometry.sizes import BLOCK_SIZE, blocks_for

RING = 16
"""Tokens that a ring remembers here."""


class World:
    """A scheduler, the arrays that play its caches, and the checks."""

    def __init__(self, *, max_model_len: int, spare_blocks: int, max_num_seqs: int, budget: int, chunked: bool) -> None:
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        self.budget = budget if chunked else max(budget, max_model_len)
        blocks = blocks_for(max_model_len) + spare_blocks
        self.manager = BlockManager(blocks, max_num_seqs)
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=self.budget, chunked_prefill=chunked
        )
        self.blocks = np.full((blocks, BLOCK_SIZE), -1)
        self.rings = np.full((max_num_seqs, RING), -1)
        self.table = np.full((max_num_seqs, blocks_for(max_model_len)), -1)
        self.length = np.full(max_num_seqs, -1)
        self.last_token = np.full(max_num_seqs, -1)
        self.final_length: dict[int, int] = {}
        self.next_token = self.numbers = 0

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.scheduler.sequences.values() if sequence.draws]

    def new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def add(self, prompt: int, output: int) -> None:
        self._queue(0, [self._sequence(self.new_tokens(prompt), output)])

    def add_family(self, prefix: int, ends: list[tuple[int, int]]) -> None:
        """Sequences with a common beginning, as the engine queues them."""
        beginning = self.new_tokens(prefix)
        self._queue(prefix, [self._sequence(beginning + self.new_tokens(prompt), output) for prompt, output in ends])

    def _sequence(self, tokens: list[int], output: int) -> AddSequence:
        self.numbers += 1
        tokens = tokens[: self.max_model_len - 1]
        self.final_length[self.numbers] = min(len(tokens) + output, self.max_model_len)
        return AddSequence(self.numbers, tuple(tokens), Sampling(), 0, self.final_length[self.numbers] - len(tokens))

    def _queue(self, shared: int, sequences: list[AddSequence]) -> None:
        self.scheduler.add(Add(tuple(sequences), shared))

    def abort(self, sequence: Sequence) -> None:
        sequence.finish("abort")
        self.scheduler.leave(sequence)

    def step(self) -> StepPlan:
        was_running = list(self.scheduler.running)
        plan = self.scheduler.schedule()
        chosen = self.scheduler.chosen
        self.check_choice(plan, chosen, was_running)
        self.apply(pickle.loads(pickle.dumps(plan)), chosen)
        self.scheduler.commit([segment.count for segment in plan.segments])
        self.check_reading()
        for sequence, segment in zip(chosen, plan.segments, strict=True):
            if segment.wanted:
                (token,) = self.new_tokens(1)
                self.last_token[segment.request] = token
                sequence.append([token], [])
                if sequence.status is Status.FINISHED:
                    assert sequence.length == self.final_length[sequence.number]
                    self.scheduler.leave(sequence)
        return plan

    # ---- what must hold ----

    def check_choice(self, plan: StepPlan, chosen: list[Sequence], was_running: list[Sequence]) -> None:
        assert plan.segments, "a step that does nothing while there is work never ends"
        assert plan.rows <= self.budget
        assert len(set(map(id, chosen))) == len(chosen)
        assert len(self.scheduler.running) <= self.max_num_seqs
        for sequence, segment in zip(chosen, plan.segments, strict=True):
            assert sequence in self.scheduler.running
            assert segment.request == sequence.request
            assert segment.start in (NEXT, sequence.computed)
            assert 0 < segment.count <= sequence.remaining
            assert segment.wanted == (sequence.draws and segment.count == sequence.remaining)
            if not self.scheduler.chunked_prefill:
                assert segment.count == sequence.remaining, "without chunks a prompt is computed whole"
        order = [sequence.order for sequence in [*self.scheduler.running, *self.scheduler.waiting.values()]]
        assert order == sorted(order), "first come, first served, preempted ones included"
        if plan.rows < self.budget and self.scheduler.chunked_prefill:
            idle = [s for s in self.scheduler.running if s.remaining and s not in chosen]
            assert not idle, "there was budget left for these"
        starved = [s for s in was_running if s.remaining == 1 and s.status is Status.RUNNING and s not in chosen]
        if starved:
            assert plan.rows == self.budget
            assert all(s.remaining == 1 for s in chosen), "a prompt went before a decode row"

    def check_owners(self) -> None:
        running = self.scheduler.running
        assert all(not sequence.blocks and sequence.request == NONE for sequence in self.scheduler.waiting.values())
        requests = [sequence.request for sequence in running]
        assert len(set(requests)) == len(requests), "a row of the request table has one owner"
        assert all(len(set(sequence.blocks)) == len(sequence.blocks) for sequence in running)
        for pool, owned in (
            (self.manager.blocks, {block for sequence in running for block in sequence.blocks}),
            (self.manager.requests, set(requests)),
        ):
            assert all(0 <= number < pool.size for number in owned)
            assert pool.free_count == pool.size - len(owned), "some are nobody's, or free and owned"
            assert set(pool._free).isdisjoint(owned)

    def apply(self, plan: StepPlan, chosen: list[Sequence]) -> None:
        for array, pairs in ((self.blocks, plan.block_copies), (self.rings, plan.request_copies)):
            before = array.copy()
            assert len({target for _, target in pairs}) == len(pairs), "two copies into one place"
            for source, target in pairs:
                array[target] = before[source]
        assert len({delta[:2] for delta in plan.blocks}) == len(plan.blocks), "two changes of one place"
        for request, index, block in plan.blocks:
            self.table[request, index] = block
        for admission in plan.admissions:
            self.length[admission.request] = admission.computed
        for sequence, segment in zip(chosen, plan.segments, strict=True):
            request = segment.request
            start, tokens = segment.start, segment.tokens
            if start == NEXT:
                start, tokens = self.length[request], (self.last_token[request],)
            end = start + segment.count
            assert plan.width * BLOCK_SIZE >= end
            assert list(tokens) == [*sequence.tokens(start, end)]
            for position, token in zip(range(start, end), tokens, strict=True):
                block, place = self.table[request, position // BLOCK_SIZE], position % BLOCK_SIZE
                assert self.manager.blocks.references(block) == 1, "a shared block was written to"
                self.blocks[block, place] = token
                self.rings[request, position % RING] = token
            self.length[request] = end

    def check_reading(self) -> None:
        for sequence in self.scheduler.running:
            computed, request = sequence.computed, sequence.request
            position = np.arange(computed)
            expected = np.array(sequence.tokens(0, computed), dtype=np.int64)
            assert self.length[request] == computed
            assert np.array_equal(
                self.blocks[self.table[request, position // BLOCK_SIZE], position % BLOCK_SIZE], expected
            )
            last = position[-RING:]
            assert np.array_equal(self.rings[request, last % RING], expected[-RING:])

    def drain(self) -> None:
        """Everything that is queued comes to its end, and everything that was held is free."""
        for _ in range(20_000):
            if not self.scheduler.has_work:
                break
            self.step()
            self.check_owners()
        assert not self.unfinished
        for pool in (self.manager.blocks, self.manager.requests):
            assert pool.free_count == pool.size


WORLDS = {
    "max_model_len": st.sampled_from([256, 300, 600, 1000]),
    "spare_blocks": st.integers(0, 4),
    "max_num_seqs": st.integers(1, 6),
    "budget": st.sampled_from([1, 3, 64, 200, 700]),
    "chunked": st.booleans(),
}
# lengths around the edges of a block, where a growing sequence needs another one
LENGTHS = st.one_of(st.integers(1, 20), st.sampled_from([200, 250, 254, 255, 256, 257, 511, 512, 513, 999]))
OUTPUTS = st.integers(1, 12)


class Machine(RuleBasedStateMachine):
    """Any order of arrivals, aborts, steps and restarts."""

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

    @rule(planned=st.booleans())
    def restart(self, planned: bool) -> None:
        if planned and self.world.scheduler.has_work:
            self.world.scheduler.schedule()  # a step that an exception ends before it is done
        self.world.scheduler.restart()

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
    world = World(max_model_len=512, spare_blocks=1, max_num_seqs=max_num_seqs, budget=64, chunked=chunked)
    for _ in range(12):
        world.add(250, 30)
    sequences = list(world.unfinished)
    ended: list[int] = []
    while world.scheduler.has_work:
        world.step()
        world.check_owners()
        ended += [s.order for s in sequences if s.status is Status.FINISHED and s.order not in ended]
    assert world.scheduler.preemptions > 5
    assert ended == sorted(ended), "equal work that came earlier ends earlier"
    assert all(sequence.length == 280 for sequence in sequences)


def test_a_long_prompt_does_not_hold_up_running_requests():
    """While a prompt of 900 tokens goes through in chunks, the others get a token in every step."""
    world = World(max_model_len=1000, spare_blocks=8, max_num_seqs=4, budget=64, chunked=True)
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
    """Six decode rows, room for two: the earliest go first, and all come to their end."""
    world = World(max_model_len=256, spare_blocks=8, max_num_seqs=6, budget=2, chunked=True)
    for _ in range(6):
        world.add(1, 9)
    world.drain()


@pytest.mark.parametrize("seed", range(24))
def test_long_histories_with_few_blocks(seed):
    """Blocks for little more than one sequence and more arrivals than rows: preemptions of prefixes and their forks."""
    rng = random.Random(seed)
    world = World(
        max_model_len=600,
        spare_blocks=rng.randint(0, 2),
        max_num_seqs=rng.randint(2, 6),
        budget=rng.choice([1, 40, 150, 700]),
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


def test_rejected_drafts_are_computed_again():
    """``commit`` advances by what was accepted; blocks stay, and the next step goes on behind it."""
    world = World(max_model_len=600, spare_blocks=2, max_num_seqs=2, budget=600, chunked=True)
    world.add(250, 9)
    world.step()
    (sequence,) = world.unfinished
    plan = world.scheduler.schedule()
    assert [segment.count for segment in plan.segments] == [1]
    world.scheduler.commit([0])
    assert sequence.computed == 250
    assert world.scheduler.schedule().segments == plan.segments
    world.scheduler.commit([1])
    assert sequence.computed == 251
