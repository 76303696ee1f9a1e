"""Answers: what callers of `load`, and requests that wait for an adapter, are to be told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from motet.errors import AdapterError, MotetError
from motet.lora.generation import AdapterInfo, AdapterLease, Generation
from motet.lora.refusals import another


class Answers:
    """The futures that others wait for. Whoever hears an answer may call back, so they are told behind the lock.

    Not thread-safe: the `AdapterPool` has the lock.
    """

    def __init__(self) -> None:
        self._loading: dict[Generation, Future[AdapterInfo]] = {}
        self._news: list[Callable[[], object]] = []

    def promise(self, generation: Generation) -> Future[AdapterInfo]:
        """What the caller who loads it waits for."""
        future = self._loading[generation] = Future()
        return future

    @property
    def promised(self) -> list[Generation]:
        """Those whose loads have had no answer."""
        return list(self._loading)

    def is_promised(self, generation: Generation) -> bool:
        return generation in self._loading

    def is_awaited(self, generation: Generation) -> bool:
        """Whether its load has had no answer and was not cancelled."""
        return generation in self._loading and not self._loading[generation].cancelled()

    def withdraw(self, generation: Generation) -> None:
        """Nobody waits for its load any more."""
        self._loading.pop(generation, None)

    def loaded(self, generation: Generation, error: MotetError | None = None) -> None:
        """Whoever waits for its load, if anybody, has an answer."""
        future = self._loading.pop(generation, None)
        if future is not None and future.set_running_or_notify_cancel():
            if error is not None:
                self._news.append(partial(future.set_exception, error))
            else:
                self._news.append(partial(future.set_result, generation.info()))

    def served(self, lease: AdapterLease) -> None:
        """Who waited with this lease has its slot."""
        assert lease.ready is not None
        self._news.append(partial(lease.ready.set_result, None))

    def refused(self, lease: AdapterLease, error: AdapterError) -> None:
        """Who waited with this lease gets none."""
        assert lease.ready is not None
        self._news.append(partial(lease.ready.set_exception, another(error)))

    def take(self) -> list[Callable[[], object]]:
        """What is to be told now; to be called without the lock."""
        news, self._news = self._news, []
        return news
