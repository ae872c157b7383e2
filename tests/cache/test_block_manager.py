"""Who owns which block: taking, growing, leaving behind, forking and giving back."""

from __future__ import annotations

import pytest
from tetrad.cache.block_manager import ABSENT, BlockManager, CacheCopies, Holding, IdPool
from tetrad.cache.spec import CacheSizes


def manager(blocks: int = 4, window_blocks: int = 8, states: int = 2, window: int = 128) -> BlockManager:
    return BlockManager(CacheSizes(blocks, window_blocks, states), window)


def grown(of: BlockManager, end: int) -> Holding:
    holding = of.admit()
    assert of.grow(holding, 0, end)
    return holding


def free(of: BlockManager) -> tuple[int, int, int]:
    return of.blocks.free, of.window_blocks.free, of.state_slots.free


# ---- the pool ----


def test_a_pool_gives_each_number_once():
    pool = IdPool(5)
    taken = [pool.take() for _ in range(5)]
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert pool.free == 0
    with pytest.raises(IndexError):
        pool.take()


def test_the_last_given_back_comes_first():
    """Its bytes are the likeliest to be in a cache of the processor."""
    pool = IdPool(4)
    first, second = pool.take(), pool.take()
    pool.give_back(first)
    pool.give_back(second)
    assert pool.take() == second
    assert pool.take() == first


def test_giving_back_twice_is_a_bug():
    """It would hand one block to two owners, who would then overwrite each other."""
    pool = IdPool(3)
    taken = pool.take()
    pool.give_back(taken)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(taken)
    with pytest.raises(AssertionError):
        pool.share(taken)


def test_a_shared_number_is_free_after_its_last_owner():
    pool = IdPool(1)
    taken = pool.take()
    assert pool.share(taken) == taken
    pool.give_back(taken)
    assert pool.free == 0
    pool.give_back(taken)
    assert pool.free == 1


# ---- growing ----


def test_growing_takes_what_the_positions_need():
    of = manager()
    holding = of.admit()
    for end, blocks in ((1, 1), (256, 1), (257, 2), (700, 3)):
        start = 0 if end == 1 else end - 1
        assert of.grow(holding, start, end)
        assert len(holding.blocks) == len(holding.window_blocks) == blocks
    assert free(of) == (1, 5, 1)
    assert len(set(holding.blocks)) == 3


def test_growing_takes_all_or_nothing():
    """A half grown sequence would keep blocks that it cannot use from the one it has to wait for."""
    of = manager(blocks=2)
    holding = grown(of, 200)
    before = free(of)
    assert not of.grow(holding, 200, 600)
    assert free(of) == before
    assert len(holding.blocks) == len(holding.window_blocks) == 1
    assert of.grow(holding, 200, 512)


@pytest.mark.parametrize(("tokens", "fits"), [(1, True), (255, True), (256, False), (300, False)])
def test_admission_counts_the_next_token(tokens, fits):
    """256 tokens fill the only free block: the next token would have to preempt the sequence at once."""
    of = manager(blocks=2)
    grown(of, 256)
    assert of.can_admit(tokens) is fits


def test_admission_needs_a_state_slot():
    of = manager(states=1)
    grown(of, 1)
    assert not of.can_admit(1)


# ---- the window ----


def test_window_blocks_are_left_behind():
    """With a window of 128 a query at 383 still sees 256: block 0 goes with position 383, not before."""
    of = manager()
    holding = grown(of, 384)
    of.leave_behind(holding, 382)
    assert ABSENT not in holding.window_blocks
    of.leave_behind(holding, 383)
    assert holding.window_blocks[0] == ABSENT
    assert holding.window_blocks[1] != ABSENT
    assert (of.window_blocks.free, of.blocks.free) == (7, 2)
    of.leave_behind(holding, 383)
    assert of.window_blocks.free == 7


def test_a_long_chunk_leaves_its_own_blocks_behind():
    of = manager(blocks=8)
    holding = grown(of, 2000)
    of.leave_behind(holding, 2000)
    assert [block != ABSENT for block in holding.window_blocks] == [False] * 7 + [True]
    assert len(holding.blocks) == 8
    assert of.grow(holding, 2000, 2048)
    assert of.window_blocks.free == 7


def test_the_largest_window_keeps_two_blocks():
    of = manager(window=256)
    holding = grown(of, 700)
    of.leave_behind(holding, 700)
    assert [block != ABSENT for block in holding.window_blocks] == [False, True, True]


def test_release_gives_everything_back():
    of = manager()
    before = free(of)
    one, two = grown(of, 700), grown(of, 100)
    of.leave_behind(one, 700)
    for holding in (one, two):
        of.release(holding)
    assert free(of) == before
    assert (one.blocks, one.window_blocks) == ([], [])


# ---- forks ----


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 512, 700])
def test_a_fork_owns_what_it_will_write_to(tokens):
    """Full blocks are shared; the block of the next token and the state are copies of its own."""
    of = manager(blocks=8, window_blocks=8)
    everything = free(of)
    stem = grown(of, tokens)
    of.leave_behind(stem, tokens)
    copies = CacheCopies()
    fork = of.fork(stem, tokens, copies)
    full, rest = divmod(tokens, 256)
    assert fork.blocks[:full] == stem.blocks[:full]
    assert fork.window_blocks[:full] == stem.window_blocks[:full]
    assert copies.state_slots == [(stem.state_slot, fork.state_slot)]
    assert stem.state_slot != fork.state_slot
    if rest:
        assert copies.blocks == [(stem.blocks[full], fork.blocks[full])]
        assert copies.window_blocks == [(stem.window_blocks[full], fork.window_blocks[full])]
        assert stem.blocks[full] != fork.blocks[full]
        assert stem.window_blocks[full] != fork.window_blocks[full]
    else:
        assert copies.blocks == copies.window_blocks == []
        assert len(fork.blocks) == full
    assert copies
    of.release(stem)
    assert of.grow(fork, tokens, tokens + 300)
    of.leave_behind(fork, tokens + 300)
    of.release(fork)
    assert free(of) == everything


def test_a_shared_window_block_stays_for_the_other_owner():
    """The fork runs ahead and leaves the block behind; the stem still reads it."""
    of = manager(blocks=8)
    stem = grown(of, 256)
    fork = of.fork(stem, 256, CacheCopies())
    assert of.grow(fork, 256, 600)
    of.leave_behind(fork, 600)
    assert fork.window_blocks[0] == ABSENT
    held = stem.window_blocks[0]
    taken = {of.window_blocks.take() for _ in range(of.window_blocks.free)}
    assert held not in taken


def test_admission_of_a_fork_counts_what_is_shared():
    """600 tokens need three blocks; a fork at 520 shares two of them, at 511 one."""
    of = manager(blocks=4)
    grown(of, 520)
    assert of.can_admit(600, 520)
    assert not of.can_admit(600, 511)
    assert not of.can_admit(600)
