"""Which KV blocks each request holds: prefix match, sharing among siblings, growth, publication and give-back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from motet.runtime.block_hash import block_hash
from motet.runtime.block_pool import BlockPool
from motet.runtime.request import Request


class Prefix(NamedTuple):
    """KV that is there already for a request's first tokens."""

    num_tokens: int
    block_ids: list[int]
    """Full blocks, to be shared."""
    tail: int | None = None
    """The block to copy that holds those of the tokens which fill no block; None: there are none."""


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
        self._num_stored: dict[int, int] = {}
        """For each request that holds blocks: of how many of its tokens the KV is in them, plans in flight apart."""

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request: Request) -> list[int]:
        """The ids of the request's blocks, in the order of its tokens; empty if it holds none."""
        return self._tables.get(request.request_id, [])

    def num_stored(self, request: Request) -> int:
        """How many of the request's tokens have their KV in its blocks, plans in flight apart."""
        return self._num_stored.get(request.request_id, 0)

    def match(self, request: Request, siblings: Sequence[Request] = ()) -> Prefix:
        """The most KV that there is for the request's tokens: cached blocks, or those of a sibling.

        Requests of one group (`siblings`) have one prompt. Whoever of them has the KV of all of it but the last
        token shares its full blocks, and lets the one behind them be copied.
        """
        hits: list[int] = []
        if self.enable_prefix_caching:
            for index in range(request.num_reusable_tokens // self.block_size):
                block_id = self.pool.lookup(self._hash(request, index))
                if block_id is None:
                    break
                hits.append(block_id)
        shared = request.num_prompt_tokens - 1
        for sibling in siblings:
            if (
                len(hits) * self.block_size
                < shared
                <= min(self.num_stored(sibling), request.num_reusable_tokens)
            ):
                table, num_full = self.table(sibling), shared // self.block_size
                return Prefix(shared, table[:num_full], table[num_full] if shared % self.block_size else None)
        return Prefix(len(hits) * self.block_size, hits)

    def missing_for(self, request: Request, prefix: Prefix, victims: Sequence[Request] = ()) -> int:
        """How many more blocks must come free before `admit` can succeed (0: now).

        `prefix` is what `match` said; `victims` are taken to have given theirs back.
        """
        wanted = self.num_blocks_for(request.num_tokens) - len(prefix.block_ids)
        return max(0, wanted - self._num_free_without(victims, prefix.block_ids))

    def admit(self, request: Request, prefix: Prefix) -> tuple[int, int] | None:
        """Gives a request that holds nothing the blocks for all its known tokens, the first ones by `prefix`.

        Returns which block must be copied to which before its next token is computed, if any. Only after
        `match` said `prefix` and `missing_for` said 0, with nothing but victims' blocks coming free since.
        """
        assert request.request_id not in self._tables, "admitted twice"
        self.pool.hold(prefix.block_ids)
        fresh = self.pool.allocate(self.num_blocks_for(request.num_tokens) - len(prefix.block_ids))
        self._tables[request.request_id] = [*prefix.block_ids, *fresh]
        self._num_stored[request.request_id] = len(prefix.block_ids) * self.block_size
        return None if prefix.tail is None else (prefix.tail, fresh[0])

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
        """So many of the request's tokens are computed: makes their KV findable for others, full blocks by hash."""
        first = self._num_stored[request.request_id] // self.block_size
        self._num_stored[request.request_id] = num_computed_tokens
        if self.enable_prefix_caching:
            table = self._tables[request.request_id]
            for index in range(first, num_computed_tokens // self.block_size):
                self.pool.publish(table[index], self._hash(request, index))

    def free(self, request: Request) -> None:
        """Gives all of the request's blocks back, if it holds any. The only way out of a table."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            del self._num_stored[request.request_id]
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
        assert self._num_stored.keys() == self._tables.keys()
