"""AdapterNames: which load of an adapter each name stands for, and the unknown names that requests wait for."""

from __future__ import annotations

from queue import SimpleQueue

from motet.lora.generation import Generation
from motet.lora.refusals import not_found


class AdapterNames:
    """A name stands for its newest generation, or for none; then it may be sought, if somebody resolves names.

    Not thread-safe: the `AdapterPool` has the lock.
    """

    def __init__(self, *, resolving: bool) -> None:
        self.unresolved: SimpleQueue[Generation | None] = SimpleQueue()
        """What is sought, for whoever asks the resolver; only if `resolving`."""
        self._resolving = resolving
        self._current: dict[str, Generation] = {}
        self._sought: dict[str, Generation] = {}

    def get(self, name: str) -> Generation | None:
        """What the name stands for."""
        return self._current.get(name)

    def get_or_seek(self, name: str) -> Generation:
        """What the name stands for, or what is sought for it. Raises `AdapterNotFound` if nobody resolves it."""
        generation = self._current.get(name) or self._sought.get(name)
        if generation is None:
            if not self._resolving:
                raise not_found(name, self._current)
            generation = self._sought[name] = Generation(name)
            self.unresolved.put(generation)
        return generation

    def all(self) -> list[Generation]:
        """Those that a name stands for, by name."""
        return [generation for _, generation in sorted(self._current.items())]

    def is_sought(self, generation: Generation) -> bool:
        """Whether its name is unknown, and requests wait for it."""
        return self._sought.get(generation.name) is generation

    def publish(self, generation: Generation) -> tuple[Generation | None, Generation | None]:
        """The name stands for it from now on. Returns what it stood for, and what else was sought for it."""
        name = generation.name
        old, sought = self._current.get(name), self._sought.pop(name, None)
        self._current[name] = generation
        return old, sought if sought is not generation else None

    def remove(self, name: str) -> Generation:
        """The name stands for nothing any more. Returns what it stood for; raises `AdapterNotFound`."""
        generation = self._current.pop(name, None)
        if generation is None:
            raise not_found(name, self._current)
        return generation

    def give_up(self, generation: Generation) -> None:
        """It is not sought any longer, if it was."""
        if self.is_sought(generation):
            del self._sought[generation.name]

    def check_integrity(self) -> None:
        """Asserts that names and generations agree, and that nothing is sought that is known."""
        for name, generation in self._current.items():
            assert generation.name == name and generation.published
        for name, generation in self._sought.items():
            assert generation.name == name and not generation.published
            assert generation.waiting or generation.busy, "sought for nobody"
        assert not self._sought.keys() & self._current.keys(), "known, but still sought"
