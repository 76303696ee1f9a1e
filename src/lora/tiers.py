"""AdapterTiers: which adapters lie on the device and in host memory, and who leaves first. Knows no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import TYPE_CHECKING

from motet.errors import AdapterLoadError
from motet.lora.generation import Generation

if TYPE_CHECKING:
    from motet.lora.arena import AdapterArena


class AdapterTiers:
    """Adapters leave the device for host memory, and that for the disk, least recently used first.

    Not thread-safe: the `AdapterPool` has the lock.
    """

    def __init__(self, arena: AdapterArena, host_bytes: int) -> None:
        self.live: set[Generation] = set()
        """All that were read and are not free again."""
        self._arena = arena
        self._host_bytes = host_bytes

    def victims(self, generation: Generation, making_way: Collection[Generation]) -> list[Generation] | None:
        """Who must leave the device for it: idle ones first, then those that make way already, then others.

        None if it had no room even without all that may leave.
        """
        may_leave = [other for other in self.live if other.slot >= 0 and not other.pinned]
        may_leave.sort(key=lambda other: (other.holds > 0, other not in making_way, other.last_used))

        def fits_without(count: int) -> bool:
            return self._arena.fits(generation.nbytes, [other.slot for other in may_leave[:count]])

        count = bisect_left(range(len(may_leave) + 1), True, key=fits_without)
        return may_leave[:count] if count <= len(may_leave) else None

    def store(self, generation: Generation) -> bool:
        """Whether host memory has room for its copy, after idle others have left that; now it is counted there."""
        stored = [other for other in self.live if other.stored]
        room = self._host_bytes - sum(other.nbytes for other in stored)
        idle = [other for other in stored if not other.busy and not other.waiting]
        if room + sum(other.nbytes for other in idle) < generation.nbytes:
            return False
        for other in sorted(idle, key=lambda other: other.last_used):
            if room >= generation.nbytes:
                break
            other.copy, other.stored = None, False
            room += other.nbytes
        generation.stored = True
        return True

    def leave_device(self, generation: Generation) -> None:
        """Gives its slot back. No step in flight may use it."""
        if generation.slot >= 0:
            self._arena.remove(generation.slot)
            generation.slot = -1

    def free(self, generation: Generation) -> None:
        """Gives back all that it takes, if anything. The only way out."""
        self.live.discard(generation)
        self.leave_device(generation)
        generation.copy, generation.stored = None, False

    def no_room(self, generation: Generation) -> AdapterLoadError:
        """What to tell of an adapter that `victims` finds no room for."""
        capacity = self._arena.capacity_bytes
        pinned = sum(other.nbytes for other in self.live if other.pinned and other.slot >= 0)
        takes = (
            f"no room for adapter {generation.name!r}: it takes {generation.nbytes} bytes in one piece, and "
        )
        if generation.nbytes > capacity:
            return AdapterLoadError(f"{takes}adapter_bytes is {capacity}: raise EngineConfig.adapter_bytes")
        return AdapterLoadError(
            f"{takes}of adapter_bytes = {capacity} pinned adapters hold {pinned}: raise "
            "EngineConfig.adapter_bytes, or load some of those again without `pin`"
        )

    def check_integrity(self) -> None:
        """Asserts that each is in one place at most, and that both memories hold what they may."""
        placed = [generation for generation in self.live if generation.slot >= 0]
        assert len({generation.slot for generation in placed}) == len(placed)
        for generation in placed:
            assert generation.nbytes == self._arena.nbytes(generation.slot)
            assert generation.copy is None, "on the device and in host memory"
        # More is used while one is being placed.
        assert self._arena.used_bytes >= sum(generation.nbytes for generation in placed)
        stored = [generation for generation in self.live if generation.stored]
        assert sum(generation.nbytes for generation in stored) <= self._host_bytes
        for generation in stored:
            assert (generation.copy is not None) != (generation.busy and generation.slot >= 0)
        self._arena.check_integrity()
