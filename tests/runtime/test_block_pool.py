from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from motet.runtime.block_pool import BlockPool
from strategies import FEW, MANY


class BlockPoolMachine(RuleBasedStateMachine):
    """A pool beside a model of it: tables that hold blocks, what each block contains, the order of reuse."""

    @initialize(num_blocks=st.integers(1, 8))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}
        self.cached_in_order_of_reuse: list[int] = []

    def count(self, block_id: int) -> int:
        return sum(table.count(block_id) for table in self.tables)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        num_unknown = self.pool.num_free - len(self.cached_in_order_of_reuse)
        block_ids = self.pool.allocate(count)
        assert len(set(block_ids)) == count
        assert all(self.count(block_id) == 0 for block_id in block_ids)
        evicted = block_ids[num_unknown:]
        assert not any(block_id in self.contents for block_id in block_ids[:num_unknown])
        assert evicted == self.cached_in_order_of_reuse[: len(evicted)]
        del self.cached_in_order_of_reuse[: len(evicted)]
        for block_id in evicted:
            del self.contents[block_id]
        self.tables.append(block_ids)

    @rule(content=st.integers(0, 5))
    def hold_what_is_found(self, content: int) -> None:
        block_id = self.pool.lookup(bytes([content]))
        assert block_id == next((b for b, c in self.contents.items() if c == bytes([content])), None)
        if block_id is not None:
            self.pool.hold([block_id])
            self.tables.append([block_id])
            if block_id in self.cached_in_order_of_reuse:
                self.cached_in_order_of_reuse.remove(block_id)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), content=st.integers(0, 5))
    def publish(self, data: st.DataObject, content: int) -> None:
        held = sorted({block_id for table in self.tables for block_id in table})
        block_id = data.draw(st.sampled_from(held))
        self.pool.publish(block_id, bytes([content]))
        if bytes([content]) not in self.contents.values():
            self.contents.setdefault(block_id, bytes([content]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block_id in reversed(table):
            if self.count(block_id) == 0 and block_id in self.contents:
                self.cached_in_order_of_reuse.append(block_id)

    @invariant()
    def reference_counts_are_the_occurrences_in_tables(self) -> None:
        self.pool.check_integrity()
        counts = [self.count(block_id) for block_id in range(self.pool.num_blocks)]
        assert [self.pool.ref_count(block_id) for block_id in range(self.pool.num_blocks)] == counts
        assert self.pool.num_free + sum(count > 0 for count in counts) == self.pool.num_blocks
        assert self.pool.num_cached == len(self.cached_in_order_of_reuse)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                self.pool.release(table)
            assert self.pool.num_free == self.pool.num_blocks
            assert self.pool.num_cached == len(self.contents)


@pytest.mark.parametrize(
    "examples",
    [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["few", "many"],
)
def test_any_history_keeps_free_and_held_blocks_apart_and_counted(examples: settings) -> None:
    run_state_machine_as_test(BlockPoolMachine, settings=examples)


def test_a_free_cached_block_is_found_and_held_again() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, b"x")
    pool.release([block_id])
    assert (pool.num_free, pool.num_cached) == (2, 1)
    assert pool.lookup(b"x") == block_id
    pool.hold([block_id])
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_being_found_does_not_hold_a_block() -> None:
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.publish(block_ids[0], b"x")
    pool.release(block_ids)
    assert pool.lookup(b"x") is not None
    assert pool.allocate(1) == block_ids
    assert pool.lookup(b"x") is None, "a block that is written anew is not found by what it held"


def test_blocks_without_content_are_reused_first_then_the_least_recently_held() -> None:
    pool = BlockPool(4)
    tables = [pool.allocate(1) for _ in range(4)]
    for (block_id,), name in zip(tables[:3], (b"a", b"b", b"c"), strict=True):
        pool.publish(block_id, name)
    for index in (1, 0, 2, 3):
        pool.release(tables[index])
    assert pool.allocate(4) == [tables[3][0], tables[1][0], tables[0][0], tables[2][0]]


def test_the_end_of_a_table_is_reused_before_its_beginning() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for position, block_id in enumerate(table):
        pool.publish(block_id, bytes([position]))
    pool.release(table)
    assert pool.allocate(1) == [table[-1]]
    assert pool.lookup(b"\0") == table[0]


def test_of_two_blocks_with_equal_content_the_first_stays_findable() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    assert pool.lookup(b"x") == first
    pool.release([second])
    assert (pool.num_cached, pool.lookup(b"x")) == (0, first)


def test_faults_of_ours_are_caught() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="published but not held"):
        pool.publish(0, b"x")
    with pytest.raises(AssertionError, match="released but not held"):
        pool.release([0])
