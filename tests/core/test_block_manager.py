"""Who owns which block: allocating, growing, sharing, forking and freeing."""

from __future__ import annotations

import pytest

from tetrad.core.block_manager import BlockManager, IdPool


def grown(of: BlockManager, end: int) -> tuple[list[int], int]:
    """(blocks, row) of a new sequence."""
    blocks: list[int] = []
    request = of.requests.allocate()
    assert of.grow(blocks, end)
    return blocks, request


def free(of: BlockManager) -> tuple[int, int]:
    return of.blocks.free_count, of.requests.free_count


# ---- the pool ----


def test_a_pool_gives_each_number_once():
    pool = IdPool(5)
    allocated = [pool.allocate() for _ in range(5)]
    assert sorted(allocated) == [0, 1, 2, 3, 4]
    assert pool.free_count == 0
    with pytest.raises(IndexError):
        pool.allocate()


def test_the_last_freed_comes_first():
    """Its bytes are the likeliest to be in a cache of the processor."""
    pool = IdPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.free(first)
    pool.free(second)
    assert pool.allocate() == second
    assert pool.allocate() == first


def test_freeing_twice_is_a_bug():
    """It would hand one block to two owners, who would then overwrite each other."""
    pool = IdPool(3)
    allocated = pool.allocate()
    pool.free(allocated)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(allocated)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(allocated)


def test_a_shared_number_is_free_after_its_last_reference():
    pool = IdPool(1)
    allocated = pool.allocate()
    assert pool.share(allocated) == allocated
    assert pool.references(allocated) == 2
    pool.free(allocated)
    assert (pool.free_count, pool.references(allocated)) == (0, 1)
    pool.free(allocated)
    assert (pool.free_count, pool.references(allocated)) == (1, 0)


def test_a_reset_frees_everything():
    """What a failed step has left half done is forgotten, references included."""
    of = BlockManager(4, 2)
    blocks, _ = grown(of, 700)
    of.fork(blocks, 512)
    of.reset()
    assert free(of) == (4, 2)
    assert sorted(of.blocks.allocate() for _ in range(4)) == [0, 1, 2, 3]


# ---- growing ----


def test_growing_allocates_what_the_positions_need():
    of = BlockManager(4, 2)
    blocks: list[int] = []
    for end, count in ((1, 1), (256, 1), (257, 2), (700, 3)):
        assert of.grow(blocks, end)
        assert len(blocks) == count
    assert len(set(blocks)) == 3
    assert of.blocks.free_count == 1
    assert of.grow(blocks, 100)
    assert len(blocks) == 3


def test_growing_allocates_all_or_nothing():
    """A half grown sequence would keep blocks that it cannot use from the one it has to wait for."""
    of = BlockManager(2, 2)
    blocks, _ = grown(of, 200)
    before = free(of)
    assert not of.grow(blocks, 600)
    assert free(of) == before
    assert len(blocks) == 1
    assert of.grow(blocks, 512)


@pytest.mark.parametrize(("tokens", "fits"), [(1, True), (255, True), (256, False), (300, False)])
def test_admission_counts_the_next_token(tokens, fits):
    """256 tokens fill the only free block: the next token would have to preempt the sequence at once."""
    of = BlockManager(2, 2)
    grown(of, 256)
    assert of.can_admit(tokens) is fits


def test_admission_needs_a_row_of_the_request_table():
    of = BlockManager(4, 1)
    grown(of, 1)
    assert not of.can_admit(1)


def test_freeing_returns_everything():
    of = BlockManager(4, 2)
    before = free(of)
    held = [grown(of, 700), grown(of, 100)]
    assert free(of) == (0, 0)
    for blocks, request in held:
        of.free(blocks, request)
    assert free(of) == before


# ---- forks ----


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 512, 700])
def test_a_fork_owns_what_it_will_write_to(tokens):
    """Full blocks are shared; the block of the next token is a copy of its own."""
    of = BlockManager(8, 2)
    everything = free(of)
    blocks, request = grown(of, tokens)
    forked_request = of.requests.allocate()
    forked, copy = of.fork(blocks, tokens)
    full, rest = divmod(tokens, 256)
    assert forked[:full] == blocks[:full]
    assert [of.blocks.references(block) for block in blocks] == [2] * full + [1] * bool(rest)
    assert request != forked_request
    if rest:
        assert copy == (blocks[full], forked[full])
        assert blocks[full] != forked[full]
    else:
        assert copy is None
    assert len(forked) == len(blocks)
    of.free(blocks, request)
    assert of.grow(forked, tokens + 300)
    assert len(set(forked)) == len(forked)
    of.free(forked, forked_request)
    assert free(of) == everything


def test_admission_of_a_fork_counts_what_is_shared():
    """600 tokens need three blocks; a fork at 520 shares two of them, at 511 one."""
    of = BlockManager(4, 2)
    grown(of, 520)
    assert of.can_admit(600, 520)
    assert not of.can_admit(600, 511)
    assert not of.can_admit(600)
