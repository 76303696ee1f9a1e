"""Extents against a list that says who owns each unit."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motet.lora.extents import Extents


class ExtentsMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(0, 30))
    def start(self, capacity: int) -> None:
        self.extents = Extents(capacity)
        self.owner: list[int | None] = [None] * capacity
        self.held: dict[int, int] = {}

    def first_fit(self, size: int) -> int | None:
        return next(
            (
                at
                for at in range(len(self.owner) - size + 1)
                if all(owner is None for owner in self.owner[at : at + size])
            ),
            None,
        )

    @rule(size=st.integers(1, 15))
    def alloc(self, size: int) -> None:
        expected = self.first_fit(size)
        offset = self.extents.alloc(size)
        assert offset == expected
        if offset is not None:
            self.held[offset] = size
            self.owner[offset : offset + size] = [offset] * size

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.held)))
        size = self.held.pop(offset)
        self.extents.free(offset)
        self.owner[offset : offset + size] = [None] * size

    @rule(size=st.integers(1, 30), data=st.data())
    def ask_what_fits(self, size: int, data: st.DataObject) -> None:
        without = data.draw(st.sets(st.sampled_from(sorted(self.held)))) if self.held else set()
        space = "".join(" " if owner is None or owner in without else "x" for owner in self.owner)
        assert self.extents.fits(size, without) == (" " * size in space)

    @invariant()
    def free_and_held_make_the_capacity(self) -> None:
        self.extents.check_integrity()
        assert self.extents.used == sum(self.held.values())


class TestExtents(ExtentsMachine.TestCase):  # type: ignore[misc]  # hypothesis makes the class
    settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestExtentsLong(ExtentsMachine.TestCase):  # type: ignore[misc]  # hypothesis makes the class
    settings = settings(max_examples=2000, stateful_step_count=50, deadline=None)


def test_what_was_not_given_out_cannot_be_taken_back() -> None:
    extents = Extents(8)
    offset = extents.alloc(4)
    assert offset == 0
    extents.free(offset)
    for wrong in (0, 2, 8):
        with pytest.raises(KeyError):
            extents.free(wrong)


def test_the_integrity_check_sees_lost_and_untidy_stretches() -> None:
    for spoil in (
        lambda e: e._held.clear(),
        lambda e: e._free.append((0, 2)),
        lambda e: e._free.__setitem__(slice(None), [(6, 1), (7, 1)]),
    ):
        extents = Extents(8)
        extents.alloc(6)
        extents.check_integrity()
        spoil(extents)
        with pytest.raises(AssertionError):
            extents.check_integrity()
