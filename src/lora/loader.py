"""AdapterLoader: brings adapters to where they are wanted, on threads of its own."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from motet.errors import AdapterError, AdapterLoadError, AdapterNotFound, MotetError
from motet.lora.adapter import LoRAWeights, read_adapter
from motet.lora.arena import AdapterArena
from motet.lora.generation import AdapterInfo, Bring, Generation, Read
from motet.lora.pool import AdapterPool
from motet.lora.sites import LoRASite
from motet.lora.source import check_inside, folder_of

Resolver = Callable[[str], "str | os.PathLike[str] | None"]

Fail = Callable[[BaseException], object]

END_PATIENCE = 10.0
"""Seconds that `close` waits for the adapter in hand."""


class AdapterLoader:
    """Does what an `AdapterPool` asks for: reads folders, copies weights, asks the `resolver`.

    One thread loads; the resolver, which may take its time, has another, so that it holds up no adapter whose
    folder is known. Nothing outside of `root`, if it is given, is opened.
    """

    def __init__(
        self,
        pool: AdapterPool,
        arena: AdapterArena,
        sites: Sequence[LoRASite],
        *,
        root: Path | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        self._pool = pool
        self._arena = arena
        self._sites = sites
        self._root = root.absolute() if root is not None else None
        self._resolver = resolver
        self._thread: threading.Thread | None = None

    def start(self, fail: Fail) -> None:
        """`fail` is told of a fault in the bookkeeping, which ends a thread: who waits for it would wait for ever."""
        self._thread = _start("motet-adapter-loader", self._load, fail)
        if self._resolver is not None:
            resolve = partial(_resolve, self._pool, self._resolver, self._root)
            _start("motet-adapter-resolver", resolve, fail)

    def load(
        self, name: str, source: str | os.PathLike[str], *, pin: bool = False, replace: bool = False
    ) -> Future[AdapterInfo]:
        """`AdapterPool.load` of the PEFT folder `source`, from `root` on if that is given."""
        return self._pool.load(name, folder_of(source, self._root), pin=pin, replace=replace)

    def close(self, refusal: Callable[[], MotetError]) -> None:
        """Waits for the adapter in hand; whoever waits for another is refused."""
        self._pool.close(refusal)
        self._pool.work.put(False)
        self._pool.unresolved.put(None)
        if self._thread is not None:
            self._thread.join(END_PATIENCE)  # not for the resolver: it is the application's own

    def run_jobs(self) -> None:
        """Does all that there is to do now, on the calling thread. For the loader's thread, or instead of it."""
        while (job := self._pool.next_job()) is not None:
            try:
                if isinstance(job, Read):
                    weights = self._read(job.generation)
                    copy = self._arena.pack(weights)
                    self._pool.was_read(job.generation, copy, weights.digest, weights.rank)
                else:
                    self._bring(job)
            except BaseException as exc:  # a panic in native code is no Exception
                self._pool.failed(job, _as_adapter_error(exc, f"adapter {job.generation.name!r}"))

    def _load(self) -> None:
        while self._pool.work.get():
            self.run_jobs()

    def _read(self, generation: Generation) -> LoRAWeights:
        assert generation.source is not None
        check_inside(generation.source, self._root)  # anew each time: links may have changed
        return read_adapter(generation.source, self._sites)

    def _bring(self, job: Bring) -> None:
        generation = job.generation
        copy = generation.copy
        if copy is None:
            weights = self._read(generation)
            if generation.ref is None or weights.digest != generation.ref.digest:
                raise AdapterLoadError(
                    f"{generation.source} holds other weights than when adapter {generation.name!r} was loaded: "
                    "the folder has changed. Load it again with `load_adapter(..., replace=True)`"
                )
            copy = self._arena.pack(weights)
        for victim in job.victims:
            self._pool.evicted(victim, self._arena.copy_out(victim.slot) if victim.stored else None)
        self._pool.placed(job, self._arena.place(copy))


def _start(name: str, run: Callable[[], None], fail: Fail) -> threading.Thread:
    def guarded() -> None:
        try:
            run()
        except BaseException as exc:
            fail(exc)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def _resolve(pool: AdapterPool, resolver: Resolver, root: Path | None) -> None:
    """The resolver's thread. Holds on to nothing of the engine but the names."""
    while (generation := pool.unresolved.get()) is not None:
        if not pool.is_sought(generation):
            continue
        name = generation.name
        try:
            source = resolver(name)
            if source is None:
                raise AdapterNotFound(f"no adapter {name!r} is loaded, and the adapter_resolver knows none")
            folder = folder_of(source, root)
        except AdapterNotFound as error:
            pool.not_resolved(generation, error)
        except BaseException as exc:  # it is the application's code
            pool.not_resolved(generation, _as_adapter_error(exc, f"the adapter_resolver on {name!r}"))
        else:
            pool.resolved(generation, folder)


def _as_adapter_error(exc: BaseException, what: str) -> AdapterError:
    if isinstance(exc, AdapterError):
        return exc
    # Not by `str`: what an application raises may fail at that, too.
    error = AdapterLoadError(f"{what} failed: {''.join(traceback.format_exception_only(exc)).strip()}")
    error.__cause__ = exc
    return error
