"""Which KV blocks each request holds: prefix match, growth, publication and give-back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from motet.runtime.block_hash import block_hash
from motet.runtime.block_pool import BlockPool
from motet.runtime.request import Request


class KVCacheManager:
    """Block tables over one `BlockPool`. Not thread-safe: the engine thread owns it.

    A request holds the blocks of the tokens that are known when it is admitted, then one more whenever a
    token needs it: never more than one block beyond what its tokens fill.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._tables: dict[int, list[int]] = {}
        self._num_published: dict[int, int] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request: Request) -> list[int]:
        """The ids of the request's blocks, in the order of its tokens; empty if it holds none."""
        return self._tables.get(request.request_id, [])

    def match(self, request: Request) -> list[int]:
        """The longest chain of cached blocks that the request's tokens begin with, without its last token.

        That token must be computed to have logits.
        """
        hits: list[int] = []
        if self.enable_prefix_caching:
            for index in range((request.num_tokens - 1) // self.block_size):
                block_id = self.pool.lookup(self._hash(request, index))
                if block_id is None:
                    break
                hits.append(block_id)
        return hits

    def missing_for(self, request: Request, hits: Sequence[int], victims: Sequence[Request] = ()) -> int:
        """How many more blocks must come free before `admit` can succeed (0: now).

        `hits` are what `match` said; `victims` are taken to have given theirs back.
        """
        wanted = self.num_blocks_for(request.num_tokens) - len(hits)
        return max(0, wanted - self._num_free_without(victims, hits))

    def admit(self, request: Request, hits: Sequence[int]) -> int:
        """Gives a request that holds nothing the blocks for all its known tokens.

        Returns how many of its tokens have their KV already, from the prefix cache. Only after `match` said
        `hits` and `missing_for` said 0, with nothing but victims' blocks coming free since.
        """
        assert request.request_id not in self._tables, "admitted twice"
        self.pool.hold(hits)
        fresh = self.pool.allocate(self.num_blocks_for(request.num_tokens) - len(hits))
        self._tables[request.request_id] = [*hits, *fresh]
        self._num_published[request.request_id] = len(hits)
        return len(hits) * self.block_size

    def missing_to_grow(self, request: Request, num_tokens: int, victims: Sequence[Request] = ()) -> int:
        """How many more blocks must come free before the request can hold `num_tokens` tokens (0: now).

        `victims` are taken to have given theirs back.
        """
        wanted = self.num_blocks_for(num_tokens) - len(self._tables[request.request_id])
        return max(0, wanted - self._num_free_without(victims))

    def grow(self, request: Request, num_tokens: int) -> None:
        """Extends the request's table to `num_tokens` tokens. Only after `missing_to_grow` said 0."""
        table = self._tables[request.request_id]
        table += self.pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(table)))

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Makes the request's blocks that are full of computed tokens findable for others."""
        if not self.enable_prefix_caching:
            return
        table = self._tables[request.request_id]
        for index in range(self._num_published[request.request_id], num_computed_tokens // self.block_size):
            self.pool.publish(table[index], self._hash(request, index))
            self._num_published[request.request_id] = index + 1

    def free(self, request: Request) -> None:
        """Gives all of the request's blocks back, if it holds any. The only way out of a table."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            del self._num_published[request.request_id]
            self.pool.release(table)

    def _num_free_without(self, victims: Sequence[Request], reserved: Sequence[int] = ()) -> int:
        """How many blocks that are not `reserved` are free once the victims gave theirs back."""
        held = Counter(block_id for victim in victims for block_id in self.table(victim))
        freed = sum(self.pool.ref_count(block_id) == count for block_id, count in held.items())
        taken = sum(self.pool.ref_count(block_id) == held[block_id] for block_id in reserved)
        return self.pool.num_free + freed - taken

    def _hash(self, request: Request, index: int) -> bytes:
        """The hash of the request's block `index`; computed once, since known tokens never change."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            first = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else request.root_hash
            hashes.append(block_hash(parent, request.token_ids[first : first + self.block_size]))
        return hashes[index]

    def check_integrity(self) -> None:
        """Asserts that reference counts equal the occurrences in tables, and that no table names a block twice."""
        self.pool.check_integrity()
        held = Counter(block_id for table in self._tables.values() for block_id in table)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == held[block_id], f"block {block_id}"
        assert all(len(set(table)) == len(table) for table in self._tables.values()), (
            "a block twice in a table"
        )
        assert self._num_published.keys() == self._tables.keys()
