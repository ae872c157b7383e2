"""Who owns which block and which row of the request table: reference counts."""

from __future__ import annotations

from collections.abc import Iterable

from tetrad.geometry.sizes import BLOCK_SIZE, blocks_for


class IdPool:
    """Allocates the integers 0 .. size - 1; the one freed last comes first. An id may have several references."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._references = [0] * size

    @property
    def free_count(self) -> int:
        """How many can be allocated."""
        return len(self._free)

    def references(self, allocated: int) -> int:
        """The reference count of an id."""
        return self._references[allocated]

    def allocate(self) -> int:
        """Allocate one. There must be one: ask ``free_count`` first."""
        allocated = self._free.pop()
        self._references[allocated] = 1
        return allocated

    def share(self, allocated: int) -> int:
        """One more reference to an id."""
        assert self._references[allocated], f"{allocated} is free"
        self._references[allocated] += 1
        return allocated

    def free(self, allocated: int) -> None:
        """One reference less; without any the id is free."""
        assert self._references[allocated], f"{allocated} was freed twice"
        self._references[allocated] -= 1
        if not self._references[allocated]:
            self._free.append(allocated)

    def reset(self) -> None:
        """Free everything, whoever refers to it."""
        self._free = list(range(self.size - 1, -1, -1))
        self._references = [0] * self.size


class BlockManager:
    """Blocks of the context caches, and rows of the request table with the rings that belong to them."""

    def __init__(self, blocks: int, requests: int) -> None:
        self.blocks = IdPool(blocks)
        self.requests = IdPool(requests)

    def can_admit(self, tokens: int, shared: int = 0) -> bool:
        """Whether a sequence of ``tokens`` tokens, and the one after them, can start now; ``shared`` are forked."""
        needed = blocks_for(tokens + 1) - shared // BLOCK_SIZE
        return self.requests.free_count > 0 and self.blocks.free_count >= needed

    def grow(self, blocks: list[int], end: int) -> bool:
        """Make room for the positions up to ``end`` - 1. False, and nothing allocated, if blocks are short."""
        missing = blocks_for(end) - len(blocks)
        if missing > self.blocks.free_count:
            return False
        blocks.extend(self.blocks.allocate() for _ in range(missing))
        return True

    def fork(self, blocks: list[int], tokens: int) -> tuple[list[int], tuple[int, int] | None]:
        """Blocks for a second sequence that begins with the first ``tokens`` tokens of ``blocks``.

        Full blocks are shared, since nothing writes to them any more; the block that the next token falls into is the
        new sequence's own. Returns the blocks, and (from, to) of the page that must be copied, None if there is none.
        """
        full = tokens // BLOCK_SIZE
        forked = [self.blocks.share(block) for block in blocks[:full]]
        if tokens % BLOCK_SIZE == 0:
            return forked, None
        forked.append(self.blocks.allocate())
        return forked, (blocks[full], forked[full])

    def free(self, blocks: Iterable[int], request: int) -> None:
        """Free what a sequence held."""
        for block in blocks:
            self.blocks.free(block)
        self.requests.free(request)

    def reset(self) -> None:
        """Free everything."""
        self.blocks.reset()
        self.requests.reset()
