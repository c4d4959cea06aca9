"""BlockPool: which KV blocks are free. Pure bookkeeping; the tensors belong to the model runner."""

from __future__ import annotations


class BlockPool:
    """A fixed number of KV blocks of ``block_size`` tokens each.

    Ids run from 1 to ``num_blocks``; block 0 stays all zeros and pads block tables, so that what a request leaves
    behind in the cache can never reach another one. Invariant: every block is free or held by exactly one request.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_ids: list[int], num_tokens: int) -> bool:
        """Extends ``block_ids`` so that it holds ``num_tokens`` tokens; False, and nothing changed, if it can't."""
        missing = self.blocks_for(num_tokens) - len(block_ids)
        if missing > len(self._free):
            return False
        block_ids.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, block_ids: list[int]) -> None:
        """Takes all blocks back and empties the list."""
        self._free.extend(reversed(block_ids))
        block_ids.clear()
