"""AdapterPool: adapters by name, the generations behind the names, and who uses them. Knows no torch."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from motet.errors import AdapterExists, AdapterNotFound
from motet.lora.adapter import AdapterRef, LoRAWeights

if TYPE_CHECKING:
    from motet.lora.arena import AdapterArena


@dataclass(frozen=True)
class AdapterInfo:
    """A snapshot of one loaded adapter."""

    name: str
    generation: int
    """Counts the loads of the engine; never used twice."""
    digest: str
    """Hexadecimal; equal ones compute the same."""
    rank: int
    """The largest of its modules."""
    bytes: int
    """On the device."""
    residency: Literal["device"]
    pinned: bool
    in_use: int
    """Requests that hold it."""


@dataclass
class _Generation:
    """One load of an adapter: alive from `add` until it is retired and nobody uses it."""

    ref: AdapterRef
    slot: int
    rank: int
    bytes: int
    pinned: bool
    in_use: int = 0


class AdapterPool:
    """Every adapter in an arena. Thread-safe; the lock is never held while weights are copied.

    A name stands for its newest generation. Removing or replacing it retires that generation: it can no
    longer be acquired, those who hold it keep it, and the last `release` frees its memory.
    """

    def __init__(self, arena: AdapterArena) -> None:
        self._arena = arena
        self._lock = threading.Lock()  # over all below
        self._numbers = itertools.count(1)
        self._live: dict[int, _Generation] = {}
        self._current: dict[str, _Generation] = {}

    def add(
        self, name: str, weights: LoRAWeights, *, replace: bool = False, pin: bool = False
    ) -> AdapterInfo:
        """Places `weights` in the arena, on the calling thread, as the new generation of `name`.

        With `replace` the old generation, if any, is retired once the new one is there: both need room.
        Raises `AdapterExists` if the name is taken and not `replace`, `AdapterLoadError` if there is no room.
        """
        with self._lock:  # refuse before the work where that can be known
            self._check_free(name, replace)
        slot = self._arena.place(weights)
        with self._lock:
            try:
                self._check_free(name, replace)
            except AdapterExists:  # another thread was faster
                self._arena.remove(slot)
                raise
            if name in self._current:
                self._retire(name)
            ref = AdapterRef(name, next(self._numbers), weights.digest)
            generation = _Generation(ref, slot, weights.rank, self._arena.nbytes(slot), pin)
            self._live[ref.generation] = self._current[name] = generation
            return _info(generation)

    def remove(self, name: str) -> AdapterRef:
        """Retires the name's generation and returns it. Raises `AdapterNotFound`."""
        with self._lock:
            self._find(name)
            return self._retire(name)

    def acquire(self, name: str) -> AdapterRef:
        """The name's generation, to be kept until `release`. Raises `AdapterNotFound`."""
        with self._lock:
            generation = self._find(name)
            generation.in_use += 1
            return generation.ref

    def release(self, ref: AdapterRef) -> None:
        """Gives back what one `acquire` returned; no step in flight uses it any longer on that behalf."""
        with self._lock:
            generation = self._live[ref.generation]
            assert generation.in_use > 0, f"{ref} is released more often than acquired"
            generation.in_use -= 1
            self._free_if_done(generation)

    def slot(self, ref: AdapterRef) -> int:
        """The adapter slot of an acquired `ref`."""
        with self._lock:
            return self._live[ref.generation].slot

    def infos(self) -> list[AdapterInfo]:
        """The loaded adapters, by name; retired generations have no name."""
        with self._lock:
            return [_info(generation) for _, generation in sorted(self._current.items())]

    def check_integrity(self) -> None:
        """Asserts that exactly what has a name or a user is alive, each in a slot of its own in the arena."""
        with self._lock:
            for number, generation in self._live.items():
                assert generation.ref.generation == number
                assert generation.bytes == self._arena.nbytes(generation.slot)
                assert generation.in_use >= 0
                assert generation.in_use or self._current.get(generation.ref.name) is generation
            for name, generation in self._current.items():
                assert generation.ref.name == name
                assert self._live[generation.ref.generation] is generation
            assert len({generation.slot for generation in self._live.values()}) == len(self._live)
            # More is used while an `add` is under way.
            assert self._arena.used_bytes >= sum(generation.bytes for generation in self._live.values())
        self._arena.check_integrity()

    def _check_free(self, name: str, replace: bool) -> None:
        if name in self._current and not replace:
            raise AdapterExists(f"an adapter {name!r} is loaded: pass replace=True, or unload it first")

    def _find(self, name: str) -> _Generation:
        if name not in self._current:
            loaded = ", ".join(map(repr, sorted(self._current))) or "nothing"
            raise AdapterNotFound(
                f"no adapter {name!r} is loaded, only {loaded}; load it with `load_adapter`"
            )
        return self._current[name]

    def _retire(self, name: str) -> AdapterRef:
        generation = self._current.pop(name)
        self._free_if_done(generation)
        return generation.ref

    def _free_if_done(self, generation: _Generation) -> None:
        if not generation.in_use and self._current.get(generation.ref.name) is not generation:
            del self._live[generation.ref.generation]
            self._arena.remove(generation.slot)


def _info(generation: _Generation) -> AdapterInfo:
    ref = generation.ref
    return AdapterInfo(
        name=ref.name,
        generation=ref.generation,
        digest=ref.digest.hex(),
        rank=generation.rank,
        bytes=generation.bytes,
        residency="device",
        pinned=generation.pinned,
        in_use=generation.in_use,
    )
