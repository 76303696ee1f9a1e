"""LoopThread: an event loop for code that has none."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from motet.errors import EngineClosed

T = TypeVar("T")


class LoopThread:
    """An event loop on a thread of its own, and calls into it from others."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._started: Future[BlockingPortal] = Future()
        threading.Thread(target=anyio.run, args=(self._serve,), name="motet-blocking", daemon=True).start()
        self._portal = self._started.result()

    @property
    def is_here(self) -> bool:
        """Whether it is in this process, and not in one that this was forked from."""
        return self._process == os.getpid()

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """What the function returns or raises on the loop; cancels it there if the wait is interrupted.

        Raises EngineClosed if the loop ends before.
        """
        future = self.post(function)
        try:
            return future.result()
        except CancelledError:
            raise EngineClosed("the engine was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def post(self, function: Callable[..., Awaitable[T]], *arguments: object) -> Future[T]:
        """Begins a function on the loop. Raises EngineClosed if that has ended."""
        try:
            return self._portal.start_task_soon(function, *arguments)
        except RuntimeError:
            raise EngineClosed("the engine is closed; `engine.start()` starts it again") from None

    def stop(self) -> None:
        """Ends the loop, and cancels what still runs there. Does not wait."""
        with suppress(RuntimeError):  # it has ended
            self._portal.start_task_soon(self._portal.stop, True)

    async def _serve(self) -> None:
        async with BlockingPortal() as portal:
            self._started.set_result(portal)
            await portal.sleep_until_stopped()
