"""Extents: who owns which stretch of a linear space."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection


class Extents:
    """First-fit allocation in a space of `capacity` units; neighbouring free stretches are always one.

    Not thread-safe: its owner has the lock.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._held: dict[int, int] = {}  # offset -> size
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []  # (offset, size), by offset

    def alloc(self, size: int) -> int | None:
        """The offset of `size` > 0 units, from now on the caller's; None if no free stretch is that long."""
        assert size > 0
        for i, (offset, length) in enumerate(self._free):
            if length >= size:
                self._free[i : i + 1] = [(offset + size, length - size)] if length > size else []
                self._held[offset] = size
                self.used += size
                return offset
        return None

    def fits(self, size: int, without: Collection[int] = ()) -> bool:
        """Whether `alloc(size)` would succeed once what it gave at the offsets `without` is free."""
        run = end = 0
        for offset, length in sorted([*self._free, *((offset, self._held[offset]) for offset in without)]):
            run = run + length if offset == end else length
            end = offset + length
            if run >= size:
                return True
        return False

    def free(self, offset: int) -> None:
        """Takes back what `alloc` gave at `offset`."""
        size = self._held.pop(offset)
        self.used -= size
        first, last = offset, offset + size
        at = bisect_left(self._free, (offset, 0))
        begin, end = at, at
        if end < len(self._free) and self._free[end][0] == last:
            last += self._free[end][1]
            end += 1
        if begin > 0 and sum(self._free[begin - 1]) == first:
            begin -= 1
            first = self._free[begin][0]
        self._free[begin:end] = [(first, last - first)]

    def check_integrity(self) -> None:
        """Asserts that free and held stretches tile the space, and that no two free ones touch."""
        stretches = [(*free, True) for free in self._free] + [(*held, False) for held in self._held.items()]
        end, after_free = 0, False
        for offset, size, is_free in sorted(stretches):
            assert offset == end, f"{end} to {offset} is lost or doubly owned"
            assert size > 0
            assert not (is_free and after_free), f"free stretches touch at {offset}"
            end, after_free = offset + size, is_free
        assert end == self.capacity
        assert self.used == sum(self._held.values())
        assert self._free == sorted(self._free)
