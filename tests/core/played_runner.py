"""A runner whose caches are arrays of token ids and whose model reads them all: a wrong cache gives wrong tokens."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np

from tetrad.core.engine_core import Drawn, EngineCore
from tetrad.core.messages import Add, AddSequence, Sampling, Tokens
from tetrad.core.plan import NEXT, StepPlan
from tetrad.geometry.sizes import BLOCK_SIZE, blocks_for

RING = 16
VOCABULARY = 9973


def next_token(tokens: list[int]) -> int:
    """What the model draws behind these tokens."""
    return (sum((place + 1) * token for place, token in enumerate(tokens)) + 7 * len(tokens)) % VOCABULARY


class PlayedRunner:
    """Carries out plans on arrays. ``trouble`` is called with a place's name and may raise."""

    def __init__(self, *, blocks: int, requests: int, max_model_len: int) -> None:
        self.blocks = np.full((blocks, BLOCK_SIZE), -1)
        self.rings = np.full((requests, RING), -1)
        self.table = np.full((requests, blocks_for(max_model_len)), -1)
        self.length = np.full(requests, -1)
        self.last_token = np.full(requests, -1)
        self.trouble: Callable[[str], None] = lambda place: None

    def execute(self, plan: StepPlan) -> list[Drawn]:
        plan = pickle.loads(pickle.dumps(plan))
        self.trouble("copies")
        for array, pairs in ((self.blocks, plan.block_copies), (self.rings, plan.request_copies)):
            before = array.copy()
            for source, target in pairs:
                array[target] = before[source]
        self.trouble("deltas")
        for request, index, block in plan.blocks:
            self.table[request, index] = block
        for admission in plan.admissions:
            self.length[admission.request] = admission.computed
        drawn = []
        for segment in plan.segments:
            request, start, tokens = segment.request, segment.start, list(segment.tokens)
            if start == NEXT:
                start, tokens = int(self.length[request]), [int(self.last_token[request])]
            for position, token in enumerate(tokens, start):
                self.blocks[self.table[request, position // BLOCK_SIZE], position % BLOCK_SIZE] = token
                self.rings[request, position % RING] = token
            self.trouble("segment")
            self.length[request] = start + segment.count
            if segment.wanted:
                drawn.append(Drawn((self._draw(request),)))
        self.trouble("sampled")
        return drawn

    def _draw(self, request: int) -> int:
        position = np.arange(self.length[request])
        tokens = self.blocks[self.table[request, position // BLOCK_SIZE], position % BLOCK_SIZE]
        last = position[-RING:]
        if not np.array_equal(self.rings[request, last % RING], tokens[-RING:]):
            return -1
        self.last_token[request] = next_token(tokens.tolist())
        return int(self.last_token[request])


def build(
    *, blocks: int, requests: int, budget: int = 64, max_model_len: int = 1024
) -> tuple[EngineCore, PlayedRunner]:
    """A core over a played runner."""
    runner = PlayedRunner(blocks=blocks, requests=requests, max_model_len=max_model_len)
    core = EngineCore.build(
        runner, blocks=blocks, max_num_seqs=requests, max_num_batched_tokens=budget, chunked_prefill=True
    )
    return core, runner


def add(core: EngineCore, prompts: dict[int, list[int]], tokens: int, shared: int = 0) -> None:
    """Queue prompts by number; each is continued by so many tokens."""
    core.add(
        Add(
            tuple(AddSequence(number, tuple(prompt), Sampling(), 0, tokens) for number, prompt in prompts.items()),
            shared,
        )
    )


def expected(prompt: list[int], tokens: int) -> list[int]:
    """What an undisturbed run draws."""
    known = list(prompt)
    for _ in range(tokens):
        known.append(next_token(known))
    return known[len(prompt) :]


class Collected:
    """What a core has told of each sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str | None] = {}
        self.errors: dict[int, str] = {}

    def take(self, messages: list[Tokens]) -> None:
        for message in messages:
            self.tokens.setdefault(message.number, []).extend(message.token_ids)
            if message.finish_reason is not None:
                assert message.number not in self.ends, "an end was told twice"
                self.ends[message.number] = message.finish_reason
            if message.error is not None:
                self.errors[message.number] = message.error


def assert_all_free(core: EngineCore) -> None:
    """Nothing is unfinished, and no block or row is lost."""
    assert not core.has_work
    manager = core.scheduler.manager
    for pool in (manager.blocks, manager.requests):
        assert pool.free_count == pool.size
