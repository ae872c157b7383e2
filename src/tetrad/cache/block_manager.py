"""Who owns which block, window block and state slot. Plain integers; never a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from tetrad.cache.spec import CacheSizes
from tetrad.geometry import BLOCK_SIZE, blocks_for, first_window_block

ABSENT = -1
"""A window block that has been given back, in a window table."""


class IdPool:
    """Hands out the integers 0 .. size - 1; the one given back last comes first. An owner may share its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._owners = [0] * size

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self) -> int:
        """Take one. There must be one: ask ``free`` first."""
        taken = self._free.pop()
        self._owners[taken] = 1
        return taken

    def share(self, taken: int) -> int:
        """One more owner for one that was taken."""
        assert self._owners[taken], f"{taken} is nobody's"
        self._owners[taken] += 1
        return taken

    def give_back(self, taken: int) -> None:
        """One owner less; without any it is free."""
        assert self._owners[taken], f"{taken} was given back twice"
        self._owners[taken] -= 1
        if not self._owners[taken]:
            self._free.append(taken)


@dataclass(slots=True)
class Holding:
    """What one sequence owns. ``window_blocks`` is as long as ``blocks``, with ABSENT where none is held."""

    state_slot: int
    blocks: list[int] = field(default_factory=list)
    window_blocks: list[int] = field(default_factory=list)
    window_held_from: int = 0


@dataclass(slots=True)
class CacheCopies:
    """What must be copied inside the caches before the next step writes: (from, to) of each kind."""

    blocks: list[tuple[int, int]] = field(default_factory=list)
    window_blocks: list[tuple[int, int]] = field(default_factory=list)
    state_slots: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.blocks or self.window_blocks or self.state_slots)


class BlockManager:
    """Blocks of the compressed caches, window blocks and state slots of all running sequences.

    Window blocks are as many as any step can need (``geometry.window_blocks_bound``), so only blocks and state slots
    can run out.
    """

    def __init__(self, sizes: CacheSizes, window: int) -> None:
        self.window = window
        self.blocks = IdPool(sizes.blocks)
        self.window_blocks = IdPool(sizes.window_blocks)
        self.state_slots = IdPool(sizes.state_slots)

    def can_admit(self, tokens: int, shared: int = 0) -> bool:
        """Whether a sequence of ``tokens`` tokens, and the one after them, can start now; ``shared`` are forked."""
        return self.state_slots.free > 0 and self.blocks.free >= blocks_for(tokens + 1) - shared // BLOCK_SIZE

    def admit(self) -> Holding:
        """Begin to hold things for a new sequence."""
        return Holding(self.state_slots.take())

    def grow(self, holding: Holding, start: int, end: int) -> bool:
        """Make room for the positions ``start`` to ``end`` - 1. False, and nothing taken, if blocks are short."""
        missing = blocks_for(end) - len(holding.blocks)
        if missing > self.blocks.free:
            return False
        for _ in range(missing):
            holding.blocks.append(self.blocks.take())
            holding.window_blocks.append(ABSENT)
        for block in range(start // BLOCK_SIZE, blocks_for(end)):
            if holding.window_blocks[block] == ABSENT:
                holding.window_blocks[block] = self.window_blocks.take()
        return True

    def fork(self, holding: Holding, tokens: int, copies: CacheCopies) -> Holding:
        """A second holding of the first ``tokens`` tokens of ``holding``; there must be room: ask ``can_admit`` first.

        Full blocks are shared, since nothing writes to them any more. The block that the next token falls into and the
        compressor state are the new owner's alone; ``copies`` is told what to copy.
        """
        full = tokens // BLOCK_SIZE
        partial = tokens % BLOCK_SIZE > 0
        forked = Holding(self.state_slots.take(), window_held_from=holding.window_held_from)
        copies.state_slots.append((holding.state_slot, forked.state_slot))
        for block in range(full):
            forked.blocks.append(self.blocks.share(holding.blocks[block]))
            window = holding.window_blocks[block]
            forked.window_blocks.append(window if window == ABSENT else self.window_blocks.share(window))
        if partial:
            forked.blocks.append(self.blocks.take())
            copies.blocks.append((holding.blocks[full], forked.blocks[full]))
            forked.window_blocks.append(self.window_blocks.take())
            copies.window_blocks.append((holding.window_blocks[full], forked.window_blocks[full]))
        return forked

    def leave_behind(self, holding: Holding, position: int) -> None:
        """Give back the window blocks that no query at ``position`` or later reads."""
        keep = min(first_window_block(position, self.window), len(holding.window_blocks))
        for block in range(holding.window_held_from, keep):
            if holding.window_blocks[block] != ABSENT:
                self.window_blocks.give_back(holding.window_blocks[block])
                holding.window_blocks[block] = ABSENT
        holding.window_held_from = max(holding.window_held_from, keep)

    def release(self, holding: Holding) -> None:
        """Give back everything."""
        for block in holding.blocks:
            self.blocks.give_back(block)
        for block in holding.window_blocks:
            if block != ABSENT:
                self.window_blocks.give_back(block)
        self.state_slots.give_back(holding.state_slot)
        holding.blocks.clear()
        holding.window_blocks.clear()
