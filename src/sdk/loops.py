"""Reaching an event loop from another thread, under asyncio and trio alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


class LoopGone(Exception):
    """The event loop has ended."""


@dataclass(frozen=True, slots=True)
class Loop:
    """An event loop. Equal to another handle of the same loop."""

    key: Hashable
    """The asyncio loop or the trio token."""

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Runs a function on the loop soon, from any thread. Raises LoopGone if the loop has ended."""
        key: Any = self.key
        try:
            call_soon = (
                key.call_soon_threadsafe if hasattr(key, "call_soon_threadsafe") else key.run_sync_soon
            )
            call_soon(function, *args)
        except RuntimeError as exc:  # asyncio: the loop is closed; trio: RunFinishedError
            raise LoopGone from exc


def current_loop() -> Loop:
    """The loop that runs the caller. Raises RuntimeError if there is none."""
    trio = sys.modules.get("trio")
    if trio is not None:
        try:
            return Loop(trio.lowlevel.current_trio_token())
        except RuntimeError:
            pass  # not under trio: under asyncio, or nowhere
    import asyncio  # slow to import; whoever runs it has done so

    try:
        return Loop(asyncio.get_running_loop())
    except RuntimeError:
        raise RuntimeError("this must be called from a running event loop (asyncio or trio)") from None


async def wait_for(future: Future[T]) -> T:
    """A thread's future, awaited on any loop. Cancelling the wait leaves the future alone."""
    done = anyio.Event()
    loop = current_loop()

    def wake(_: Future[T]) -> None:
        try:
            loop.call_soon(done.set)
        except LoopGone:
            return  # nobody waits there any more

    future.add_done_callback(wake)
    await done.wait()
    return future.result()
