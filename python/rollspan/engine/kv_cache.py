"""BlockPool: which KV blocks are free, held or cached. Pure bookkeeping; the tensors belong to the model runner."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

#: What begins a chain of blocks: the number of the commit that computed it, and a cache salt.
Root = tuple[int, str | None]
#: What a cached block continues: the root of a chain, or the id of the block before.
Parent = Root | int
#: Identity of a cached block: what it continues, and its own ``block_size`` tokens. Compared exactly, never by hash.
BlockKey = tuple[Parent, tuple[int, ...]]


class BlockPool:
    """A fixed number of KV blocks of ``block_size`` tokens each, some of them cached for requests to come.

    Ids run from 1 to ``num_blocks``; block 0 stays all zeros and pads block tables, so that what a request leaves
    behind in the cache can never reach another one. A full block whose keys and values were computed under one commit
    from its first ancestor on may be :meth:`register`-ed: then later requests with the same commit, salt and tokens
    :meth:`match` it. Nobody writes to a registered block. Invariant: a block is held by as many requests as its
    reference count says; with none it is free, and cached until it is taken for something else, oldest first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * (num_blocks + 1)
        self._blank = list(range(num_blocks, 0, -1))  # free, of no use to anybody
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, but cached; least recently used first
        self._cached: dict[BlockKey, tuple[int, int]] = {}  # block, and its id as a parent
        self._keys: dict[int, BlockKey] = {}  # of each cached block
        self._labels: dict[Root, str] = {}  # of the weights that began a chain
        self._beginnings: dict[Root, int] = {}  # cached blocks at the beginning of a chain
        self._next_parent = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blank) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that a later request may share."""
        return len(self._keys)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_ids: list[int], num_tokens: int) -> bool:
        """Extends ``block_ids`` so that it holds ``num_tokens`` tokens; False, and nothing changed, if it can't."""
        missing = -(-num_tokens // self.block_size) - len(block_ids)
        if missing > len(self._blank) + len(self._idle):
            return False
        for _ in range(missing):
            block = self._blank.pop() if self._blank else self._evict()
            self._references[block] = 1
            block_ids.append(block)
        return True

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._keys.pop(block)
        del self._cached[key]
        if isinstance(root := key[0], tuple):
            self._beginnings[root] -= 1
            if self._beginnings[root] == 0:
                del self._beginnings[root], self._labels[root]
        return block

    def release(self, block_ids: list[int]) -> None:
        """Gives all blocks back and empties the list; the last ones, the least likely to be shared, go first."""
        for block in reversed(block_ids):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._blank.append(block)
        block_ids.clear()

    # The prefix cache

    def match(self, parent: Parent, token_ids: Sequence[int], limit: int) -> tuple[list[int], Parent]:
        """Cached blocks that hold the beginning of ``token_ids``, at most ``limit`` of them; takes none of them.

        Returns:
            The blocks in order, and the parent of the block that would follow.
        """
        blocks: list[int] = []
        for index in range(limit):
            found = self._cached.get(self.key(parent, token_ids, index))
            if found is None:
                break
            block, parent = found
            blocks.append(block)
        return blocks, parent

    def key(self, parent: Parent, token_ids: Sequence[int], index: int) -> BlockKey:
        """Identity of block ``index`` of ``token_ids``, which must reach to its end."""
        return (parent, tuple(token_ids[index * self.block_size : (index + 1) * self.block_size]))

    def share(self, blocks: Sequence[int]) -> None:
        """Holds cached blocks once more; they are given back with :meth:`release`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def label(self, root: Root) -> str | None:
        """What the weights of a chain were called when its first block was cached; None where nothing is."""
        return self._labels.get(root)

    def roots(self, salt: str | None) -> list[Root]:
        """Where chains with that salt begin, those of the newest commit first."""
        return sorted((root for root in self._beginnings if root[1] == salt), reverse=True)

    def register(self, block: int, key: BlockKey, label: str) -> int:
        """Offers a held, full, computed block to later requests; ``label`` is that of the weights that computed it.

        Returns:
            The parent of the next block. When an equal block is cached already that one's, and ``block`` stays private.
        """
        found = self._cached.get(key)
        if found is None:
            self._next_parent += 1
            found = (block, self._next_parent)
            self._cached[key] = found
            self._keys[block] = key
            if isinstance(root := key[0], tuple):
                self._labels.setdefault(root, label)
                self._beginnings[root] = self._beginnings.get(root, 0) + 1
        return found[1]

    def reset(self) -> None:
        """Forgets what is cached; who holds blocks keeps them."""
        self._blank.extend(self._idle)
        self._idle.clear()
        self._cached.clear()
        self._keys.clear()
        self._labels.clear()
        self._beginnings.clear()

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Verifies the invariants against the block lists of all requests.

        Raises:
            RuntimeError: a block is lost, held without being counted, or cached under a wrong key.
        """
        counted = [0] * (self.num_blocks + 1)
        for block_ids in holders:
            for block in block_ids:
                counted[block] += 1
        free = [*self._blank, *self._idle]
        held = [block for block, count in enumerate(counted) if count]
        if counted != self._references or counted[0] or sorted(free + held) != list(range(1, self.num_blocks + 1)):
            raise RuntimeError(f"KV blocks: {len(held)} held, {len(free)} free, {self.num_blocks} in all")
        if {key: self._cached[key][0] for key in self._keys.values()} != {k: b for b, k in self._keys.items()}:
            raise RuntimeError("KV blocks: the prefix cache names other blocks than it holds")
        if len(self._cached) != len(self._keys) or not self._keys.keys() >= self._idle.keys():
            raise RuntimeError("KV blocks: the prefix cache holds a block that is not cached")
        if self._beginnings != Counter(key[0] for key in self._cached if isinstance(key[0], tuple)):
            raise RuntimeError("KV blocks: the prefix cache has lost count of where chains begin")
        if self._labels.keys() != self._beginnings.keys():
            raise RuntimeError("KV blocks: the prefix cache does not know whose KV it holds")
