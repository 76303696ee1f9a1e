"""The KV blocks of one engine: reference counts, the free queue and the index of cached contents.

A block is *held* (by one or more requests) or *free*. A free block may still be *cached*: its content is
known by its hash and can be held again. Free blocks are reused in this order: those without known content
first, then cached ones, the least recently held first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from motet.runtime.block_hash import BlockHash


class BlockPool:
    """`num_blocks` blocks with ids 0 to num_blocks - 1. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        """Free blocks whose content can still be held again."""
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block with that content, held or free. It is not held by being found."""
        return self._by_hash.get(block_hash)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, each held once. The caller has made sure that there are as many."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self._forget(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def hold(self, block_ids: Sequence[int]) -> None:
        """One more reference on each block, free cached ones included."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
                self.num_cached -= 1  # a free block can only be found by its content
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less on each block of a request's table, given in the table's order.

        The last blocks of a table are reused before the first ones, which more requests may share.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} is released but not held"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
                else:
                    self.num_cached += 1

    def publish(self, block_id: int, block_hash: BlockHash) -> None:
        """Makes a held, full block findable. If another block has that content already, that one stays."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is published but not held"
        if block_hash not in self._by_hash and self._hashes[block_id] is None:
            self._by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None
            self.num_cached -= 1

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        assert all(count >= 0 for count in self._ref_counts)
        assert set(self._free) == {i for i, count in enumerate(self._ref_counts) if count == 0}, (
            "free xor held"
        )
        assert self._by_hash == {h: i for i, h in enumerate(self._hashes) if h is not None}, (
            "one block per hash"
        )
        assert self.num_cached == sum(self._hashes[i] is not None for i in self._free)
