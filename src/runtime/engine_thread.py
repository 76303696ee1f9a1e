"""EngineThread: the thread of an engine, from loading to its end, and the way to reach it from any other."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from os import PathLike
from typing import TypeVar

from motet.config import EngineConfig
from motet.errors import EngineClosed, EngineDead, MotetError, RequestAborted
from motet.runtime.chat_template import Prompt
from motet.runtime.engine_loop import Command, Deliver, EngineLoop
from motet.runtime.meter import Meter
from motet.runtime.request import FinishReason, Request

logger = logging.getLogger("motet")

T = TypeVar("T")

EXIT_PATIENCE = 10.0
"""Seconds that the end of the interpreter waits for the step in progress."""


class EngineThread:
    """Loads a model, then serves until it is stopped or a step fails for all. Thread-safe.

    `deliver` is called on this thread with what each step added to the streams; it must not block or raise.
    """

    def __init__(self, model: str | PathLike[str], config: EngineConfig, deliver: Deliver) -> None:
        self.started: Future[None] = Future()
        """Done when requests are served; fails with what loading raised."""
        self.ended: Future[None] = Future()
        """Done when every request has ended and the model is let go."""
        self.loop: EngineLoop | None = None
        """While it serves. Other threads use nothing of it but `runtime` and `statistics`."""
        self.meter = Meter(config.max_metric_adapters)
        """What it has done. Stays when it has ended."""
        self._model = model
        self._config = config
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # Re-entrant: a stream that is garbage collected while this very thread posts will post its abort.
        self._gate = threading.RLock()
        self._refusal: Callable[[], MotetError] | None = None
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="motet-engine", daemon=True)

    # -- from any thread ---------------------------------------------------------------------------------

    def start(self) -> None:
        # The interpreter's end may crash on a daemon thread in native code: ask it to stop, and wait.
        atexit.register(self._stop_at_exit)
        self._thread.start()

    def add(self, request: Request, prompt: Prompt) -> None:
        """Takes a request in. Raises EngineClosed or EngineDead if none is accepted any more."""
        with self._gate:
            if self._stop_at is not None:
                raise EngineClosed("the engine is closing: it takes no new requests")
            self._post(lambda loop: loop.add(request, prompt))

    def cancel(self, request_id: int) -> None:
        """Aborts a request and its siblings, if one is still there. Never raises, never waits."""
        with suppress(MotetError):
            self._post(lambda loop: _abort(loop, request_id))

    def abort(self, request_id: int) -> Future[bool]:
        """Aborts a request and its siblings; whether one was still there."""
        return self._call(lambda loop: _abort(loop, request_id))

    def abort_where(self, chosen: Callable[[Request], bool]) -> Future[int]:
        """Aborts all requests that a predicate chooses; how many those were."""
        return self._call(
            lambda loop: sum(_abort(loop, r.group_id) for r in loop.live_requests() if chosen(r))
        )

    def stop(self, drain: float | None = 0.0) -> None:
        """No new requests from now on. Live ones have `drain` seconds to end (None: without limit).

        What is left then fails with EngineClosed. Stopping again can only shorten the time.
        """
        stop_at = float("inf") if drain is None else time.monotonic() + drain
        with self._gate:
            self._stop_at = stop_at if self._stop_at is None else min(self._stop_at, stop_at)
        self.wake()

    def wake(self) -> None:
        """Has the thread look again at when it must do what."""
        with suppress(MotetError):  # it has ended, and does nothing any more
            self._post(lambda loop: None)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called; then `ended` is near."""
        return self._stop_at is not None

    @property
    def refusal(self) -> MotetError | None:
        """Why nothing is accepted any more, once that is so."""
        return None if self._refusal is None else self._refusal()

    def _post(self, command: Command) -> None:
        with self._gate:
            if self._refusal is not None:
                raise self._refusal()
            self._commands.put(command)

    def _call(self, function: Callable[[EngineLoop], T]) -> Future[T]:
        future: Future[T] = Future()

        def command(loop: EngineLoop) -> None:
            try:
                future.set_result(function(loop))
            except BaseException as exc:
                future.set_exception(EngineDead(exc))
                raise

        self._post(command)
        return future

    def _stop_at_exit(self) -> None:
        self.stop()
        self._thread.join(EXIT_PATIENCE)

    # -- on the engine thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.loop = EngineLoop(self._model, self._config, self._deliver, self._post, self.meter)
        except BaseException as exc:
            traceback.clear_frames(exc.__traceback__)  # whoever keeps the error must not keep the weights
            self._refuse(lambda: EngineClosed("the engine did not start; `await engine.start()` tries again"))
            self.started.set_exception(exc)
        else:
            self.started.set_result(None)
            cause = self._serve(self.loop)
            if cause is not None:  # the error lives as long as its readers like; the loop it names shall not
                traceback.clear_frames(cause.__traceback__)
        finally:
            self.loop = None
            atexit.unregister(self._stop_at_exit)
            self.ended.set_result(None)

    def _serve(self, loop: EngineLoop) -> BaseException | None:
        """Until it is stopped, or a turn fails for all; then what failed."""
        try:
            while not self._should_stop(loop):
                self._run_commands(loop, wait=not loop.has_work)
                loop.turn()
        except BaseException as exc:
            logger.exception("the engine died")
            cause = exc  # `exc` is unbound when this block ends
            self._end(loop, lambda: EngineDead(cause), FinishReason.ERROR)
            return cause
        closed = "the engine is closed; `await engine.start()` starts it again"
        self._end(loop, lambda: EngineClosed(closed), FinishReason.ABORT)
        return None

    def _should_stop(self, loop: EngineLoop) -> bool:
        if self._stop_at is None:
            return False
        return (self._commands.empty() and loop.is_empty) or time.monotonic() >= self._stop_at

    def _run_commands(self, loop: EngineLoop, *, wait: bool) -> None:
        with suppress(queue.Empty):
            if wait:
                self._commands.get(timeout=self._idle_time(loop))(loop)
            while True:
                self._commands.get_nowait()(loop)

    def _idle_time(self, loop: EngineLoop) -> float:
        """Seconds until something must happen without a command."""
        due = [t - time.monotonic() for t in (loop.next_deadline, self._stop_at) if t is not None]
        return max(0.0, min([*due, threading.TIMEOUT_MAX]))

    def _refuse(self, refusal: Callable[[], MotetError]) -> None:
        with self._gate:
            self._refusal = refusal

    def _end(self, loop: EngineLoop, refusal: Callable[[], MotetError], reason: FinishReason) -> None:
        """Refuses all that comes from now on, and fails all that is there."""
        self._refuse(refusal)
        while not self._commands.empty():  # what was accepted before must be told, too
            try:
                self._commands.get_nowait()(loop)
            except Exception:
                logger.exception("a command failed while the engine ended")
        try:
            loop.end(reason, refusal)
        except Exception:  # whose stream was not told of an end is told when this thread has ended
            logger.exception("the engine did not end in order")


def _abort(loop: EngineLoop, request_id: int) -> bool:
    return loop.finish(request_id, FinishReason.ABORT, RequestAborted("the request was aborted"))
