"""Life: how an engine starts, closes and starts again, whoever asks for it and on whatever loop."""

from __future__ import annotations

import os
import threading
import weakref
from importlib import import_module
from typing import TYPE_CHECKING

import anyio.to_thread

from motet.errors import EngineClosed
from motet.garbage import collections_paused
from motet.sdk.loops import wait_for

if TYPE_CHECKING:
    from motet.config import EngineConfig
    from motet.sdk.hooks import Listeners
    from motet.sdk.metrics import CollectorRegistry, EngineCollector
    from motet.sdk.session import Session


class Life:
    """The sessions of one engine, one after another. Any thread may use it."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig,
        registry: CollectorRegistry | None,
        listeners: Listeners | None,
    ) -> None:
        self._model = model
        self._config = config
        self._registry = registry
        self._listeners = listeners
        self._gate = threading.Lock()
        self.session: Session | None = None
        """The latest one, until it is closed."""

    def here(self) -> Session:
        """The session of this process. Raises EngineClosed if there is none."""
        session = self.session
        if session is None:
            raise EngineClosed(
                "the engine is not running: use `async with engine:` or `await engine.start()`"
            )
        if not session.is_here:
            raise EngineClosed("the engine runs in the process that this one was forked from: start one here")
        return session

    async def start(self) -> None:
        """As `AsyncEngine.start`."""
        serving = self.session
        if serving is not None and serving.is_serving:
            return
        collector = await anyio.to_thread.run_sync(_load_libraries, self._registry)
        from motet.sdk.session import Session

        ending = self.session
        if ending is not None and ending.is_here and ending.thread.is_stopping:
            await wait_for(ending.thread.ended)
        with self._gate:
            session = self.session
            if session is None or not session.is_here or session.thread.refusal is not None:
                if session is not None:
                    session.withdraw()
                self.session = session = Session(self._model, self._config, collector, self._listeners)
                session.finalizer = weakref.finalize(self, session.stop)  # for one dropped unclosed
                session.start()
            session.num_starters += 1
        try:
            await wait_for(session.thread.started)
        except BaseException:
            with self._gate:
                session.num_starters -= 1
                if session.num_starters == 0:
                    session.stop()
            raise
        if session.thread.is_stopping:
            raise EngineClosed("the engine was closed while it started")

    async def close(self, drain: float | None) -> None:
        """As `AsyncEngine.aclose`."""
        session = self.session
        if session is None or not session.is_here:
            return
        session.thread.stop(drain)
        try:
            await wait_for(session.thread.ended)
            session.withdraw()
            if session.hooks is not None and not session.hooks.waits_for_caller:
                await wait_for(session.hooks.ended)
        except BaseException:
            session.thread.stop()
            raise
        session.finalizer.detach()
        with self._gate:
            if self.session is session:
                self.session = None


def _load_libraries(registry: CollectorRegistry | None) -> EngineCollector:
    """What takes seconds to import, torch above all."""
    with collections_paused():
        import_module("motet.runtime.engine_thread")
        from motet.sdk.metrics import collector_of

    return collector_of(registry)
