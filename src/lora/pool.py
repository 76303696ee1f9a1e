"""AdapterPool: who holds which adapter, and what is to move next. Bookkeeping: no torch, files, threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from motet.errors import AdapterError, MotetError
from motet.lora.adapter import AdapterRef
from motet.lora.answers import Answers
from motet.lora.generation import AdapterInfo, AdapterLease, Bring, Generation, Read
from motet.lora.names import AdapterNames
from motet.lora.refusals import another, exists
from motet.lora.tiers import AdapterTiers

if TYPE_CHECKING:
    from motet.lora.arena import AdapterArena, PackedAdapter


class AdapterPool:
    """Thread-safe; the lock is never held while weights are read or copied.

    A name stands for its newest generation. Removing or replacing it retires that generation: it can no
    longer be acquired, those who hold it keep it, and the last `release` frees its memory.

    Idle adapters leave the device for host memory, and that for the disk, least recently used first. An
    adapter that is wanted while others fill the device waits for its turn, first come first served: those
    that are to make way for the first take nobody new meanwhile, so that its wait has an end.
    """

    def __init__(self, arena: AdapterArena, host_bytes: int, *, resolving: bool = False) -> None:
        self.work: SimpleQueue[bool] = SimpleQueue()
        """True whenever `next_job` may have something new to say."""
        self.loads = self.reloads = self.evictions = 0
        """Totals: adapters loaded, brought back to the device, sent away from it."""
        self._lock = threading.Lock()  # over all below
        self._numbers = itertools.count(1)
        self._ticks = itertools.count(1)
        self._names = AdapterNames(resolving=resolving)
        self.unresolved = self._names.unresolved
        self._tiers = AdapterTiers(arena, host_bytes)
        self._answers = Answers()
        self._unread: list[Generation] = []  # to be read for the first time, in order of arrival
        self._wanted: dict[Generation, None] = {}  # to be brought to the device, in order of arrival
        self._making_way: set[Generation] = set()  # must make way for the first that is wanted
        self._read_last = False
        self._refusal: Callable[[], MotetError] | None = None

    # -- from any thread ---------------------------------------------------------------------------------

    def load(
        self, name: str, source: Path, *, pin: bool = False, replace: bool = False
    ) -> Future[AdapterInfo]:
        """Asks for a new generation of `name`; done when it was read and has found its place.

        Raises `AdapterExists` if the name is taken and not `replace`. The future may fail with that, too (loads
        of one name follow each other), with `AdapterLoadError`, `UnsupportedAdapter`, or what `close` says.
        Cancelled before it was read, or before a pinned one has its place, nothing is loaded.
        """
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            if self._names.get(name) is not None and not replace:
                raise exists(name)
            generation = Generation(name, source, pinned=pin, replace=replace)
            self._unread.append(generation)
            future = self._answers.promise(generation)
            work = self.work
            future.add_done_callback(lambda _: work.put(True))  # cancelled, it stands in nobody's way
            self.work.put(True)
            return future

    def remove(self, name: str) -> AdapterRef:
        """Retires the name's generation and returns it. Raises `AdapterNotFound`."""
        with self._lock:
            generation = self._names.remove(name)
            assert generation.ref is not None
            generation.pinned = False
            self._let_go(generation)
            return generation.ref

    def acquire(self, name: str) -> AdapterLease:
        """A hold on the name's generation, until `release`; on the device at once if it is there.

        Raises `AdapterNotFound` if the name is unknown and nobody resolves it.
        """
        with self._lock:
            generation = self._names.get_or_seek(name)
            lease = AdapterLease(generation)
            self._serve(lease, is_open=generation.is_placed and generation not in self._making_way)
            return lease

    def release(self, lease: AdapterLease) -> None:
        """Gives back what `acquire` returned; no step in flight uses it any longer on its behalf."""
        with self._lock:
            generation = lease.generation
            if lease.slot >= 0:
                assert generation.holds > 0, f"{generation.ref} is released more often than acquired"
                generation.holds -= 1
                generation.last_used = next(self._ticks)
            elif lease in generation.waiting:  # otherwise it was told that it gets none
                generation.waiting.remove(lease)
            lease.ready = None  # nobody is told any more
            self._let_go(generation)

    def infos(self) -> list[AdapterInfo]:
        """The loaded adapters, by name; retired generations have no name."""
        with self._lock:
            return [generation.info() for generation in self._names.all()]

    def check_integrity(self) -> None:
        """Asserts that exactly what somebody needs is alive, and that whoever waits is in a queue."""
        with self._lock:
            self._tiers.check_integrity()
            self._names.check_integrity()
            for generation in self._tiers.live:
                assert generation.ref is not None
                # Wanted alone is one whose load was just cancelled.
                assert self._is_needed(generation) or generation in self._wanted
                assert not generation.holds or generation.slot >= 0, "in use, but not on the device"
                assert not generation.waiting or generation in self._wanted or generation.busy
            assert set(self._names.all()) | set(self._wanted) | self._making_way <= self._tiers.live

    def close(self, refusal: Callable[[], MotetError]) -> None:
        """Loads nothing more: whoever waits for a load, or asks for one, gets a `refusal` of its own."""
        with self._telling():
            self._refusal = refusal
            for generation in self._answers.promised:
                self._answers.loaded(generation, refusal())

    # -- for the loader ----------------------------------------------------------------------------------

    def is_sought(self, generation: Generation) -> bool:
        """Whether somebody still waits for this unknown name."""
        with self._lock:
            return self._names.is_sought(generation)

    def resolved(self, generation: Generation, source: Path) -> None:
        """The unknown name is to be read from `source`."""
        with self._lock:
            if self._names.is_sought(generation):
                generation.source = source
                self._unread.append(generation)
                self.work.put(True)

    def next_job(self) -> Read | Bring | None:
        """What to do next, reading and bringing in turns; None until `work` says that there may be something.

        One job at a time: its end is to be told before the next is asked for.
        """
        with self._telling():
            if self._refusal is not None:
                return None
            if self._read_last:
                job = self._next_bring() or self._next_read()
            else:
                job = self._next_read() or self._next_bring()
            self._read_last = isinstance(job, Read)
            return job

    def was_read(self, generation: Generation, copy: PackedAdapter, digest: bytes, rank: int) -> None:
        """The end of a `Read`."""
        with self._telling():
            generation.busy = False
            generation.copy, generation.rank, generation.nbytes = copy, rank, copy.nbytes
            if not self._is_needed(generation):
                self._free(generation)
            elif self._tiers.victims(generation, self._making_way) is None:
                self._fail(generation, self._tiers.no_room(generation))
            else:
                generation.ref = AdapterRef(generation.name, next(self._numbers), digest)
                generation.last_used = next(self._ticks)
                self._tiers.live.add(generation)
                self._wanted[generation] = None
                if not generation.pinned:  # a pinned one has still to find its place
                    self._publish(generation)

    def evicted(self, victim: Generation, copy: PackedAdapter | None) -> None:
        """A victim of a `Bring` is copied, if it is `stored`, and may leave the device."""
        with self._lock:
            self._tiers.leave_device(victim)
            victim.copy, victim.busy = copy, False
            self.evictions += 1
            self._let_go(victim)

    def placed(self, job: Bring, slot: int) -> None:
        """The end of a `Bring`: the weights are in the arena."""
        with self._telling():
            generation = job.generation
            generation.slot, generation.copy, generation.busy = slot, None, False
            self.reloads += job.is_reload
            if not generation.published:
                self._publish(generation)
            self._answers.loaded(generation)
            self._arrive(generation)

    def failed(self, job: Read | Bring, error: AdapterError) -> None:
        """The end of a job that could not be done. What it would have moved stays where it is."""
        with self._telling():
            if isinstance(job, Bring):
                for victim in job.victims:
                    if victim.slot >= 0:
                        victim.busy = victim.stored = False
                        self._let_go(victim)
            failed = job.generation
            self._fail(failed, error)
            if isinstance(job, Read):  # those who asked for the very same meanwhile have their answer, too
                for other in [g for g in self._unread if (g.name, g.source) == (failed.name, failed.source)]:
                    self._unread.remove(other)
                    self._fail(other, error)

    def not_resolved(self, generation: Generation, error: AdapterError) -> None:
        """Nobody knows the name: whoever still waits for it is told so."""
        with self._telling():
            self._fail(generation, error)

    # -- what to do next -----------------------------------------------------------------------------------

    def _next_read(self) -> Read | None:
        coming = {generation.name for generation in self._wanted if not generation.published}
        for generation in [g for g in self._unread if g.name not in coming]:
            self._unread.remove(generation)
            current = self._names.get(generation.name)
            if current is not None and not generation.replace:
                self._yield_to(current, generation)
            elif self._is_needed(generation):
                generation.busy = True
                return Read(generation)
            else:
                self._free(generation)
        return None

    def _next_bring(self) -> Bring | None:
        closed: list[Generation] = []
        for generation in list(self._wanted):
            if not self._is_needed(generation):  # the call that asked for it was cancelled
                self._free(generation)
            elif generation.is_placed:
                if generation not in closed:  # it has not to make way any more
                    self._arrive(generation)
            elif closed:
                self._put_down(generation)
            elif (victims := self._tiers.victims(generation, self._making_way)) is None:
                self._fail(generation, self._tiers.no_room(generation))
            elif not any(victim.holds for victim in victims):
                self._making_way = set()
                return self._bring(generation, victims)
            elif self._put_down(generation):
                closed = victims
        self._making_way = set(closed)
        return None

    def _bring(self, generation: Generation, victims: Sequence[Generation]) -> Bring:
        is_reload = generation.stored or generation.copy is None
        generation.busy, generation.stored = True, False
        for victim in victims:
            victim.busy = True
            self._tiers.store(victim)
        return Bring(generation, tuple(victims), is_reload)

    def _put_down(self, generation: Generation) -> bool:
        """What cannot be brought in now lets go of its copy in hand; whether it waits on.

        A load does not wait for room, unless it is to be pinned.
        """
        if generation.published:
            if generation.copy is not None and not generation.stored and not self._tiers.store(generation):
                generation.copy = None
            self._answers.loaded(generation)
            self._settle(generation)
        return generation in self._wanted

    # -- leases and names ----------------------------------------------------------------------------------

    def _serve(self, lease: AdapterLease, *, is_open: bool) -> None:
        generation = lease.generation
        generation.last_used = next(self._ticks)
        if is_open:
            lease.slot = generation.slot
            generation.holds += 1
            return
        if lease.ready is None:
            lease.ready = Future()
        generation.waiting.append(lease)
        if generation in self._tiers.live:
            self._wanted.setdefault(generation)
            self.work.put(True)

    def _arrive(self, generation: Generation) -> None:
        """It is on the device: whoever waits for it has it."""
        self._wanted.pop(generation, None)
        leases, generation.waiting = generation.waiting, []
        for lease in leases:
            self._serve(lease, is_open=True)
            self._answers.served(lease)
        self._let_go(generation)

    def _yield_to(self, current: Generation, generation: Generation) -> None:
        """Another was faster: the name stands for `current` now, and so do the leases of those who wait."""
        leases, generation.waiting = generation.waiting, []
        for lease in leases:
            lease.generation = current
            self._serve(lease, is_open=False)
        self._answers.loaded(generation, exists(generation.name))
        self._free(generation)

    def _publish(self, generation: Generation) -> None:
        old, sought = self._names.publish(generation)
        generation.published = True
        self.loads += 1
        if sought is not None:  # whatever the resolver will say
            self._yield_to(generation, sought)
        if old is not None:
            old.pinned = False
            self._let_go(old)

    def _fail(self, generation: Generation, error: AdapterError) -> None:
        """Whoever waits for it gets the error. A published one can be asked for again."""
        generation.busy = False
        if not generation.stored:
            generation.copy = None
        self._wanted.pop(generation, None)
        leases, generation.waiting = generation.waiting, []
        for lease in leases:
            self._answers.refused(lease, error)
        self._answers.loaded(generation, another(error))
        self._let_go(generation)

    # -- the one way out -----------------------------------------------------------------------------------

    def _is_needed(self, generation: Generation) -> bool:
        if generation.holds or generation.waiting or generation.busy:
            return True
        return self._names.get(generation.name) is generation or self._answers.is_awaited(generation)

    def _let_go(self, generation: Generation) -> None:
        """After anything that may have left a generation to nobody, or others with more room."""
        self._settle(generation)
        if self._wanted:
            self.work.put(True)

    def _settle(self, generation: Generation) -> None:
        """Nothing is wanted, or kept, that nobody needs."""
        if generation.published and not generation.waiting and not self._answers.is_promised(generation):
            self._wanted.pop(generation, None)
        if not self._is_needed(generation):
            self._free(generation)

    def _free(self, generation: Generation) -> None:
        self._answers.withdraw(generation)
        self._wanted.pop(generation, None)
        self._making_way.discard(generation)
        self._names.give_up(generation)
        self._tiers.free(generation)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """The lock; the answers are given behind it, for those who hear one may call back."""
        with self._lock:
            yield
            news = self._answers.take()
        for tell in news:
            tell()
