"""EngineThread: the one thread that owns all mutable runtime state. Commands in, deltas out."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from os import PathLike
from typing import TypeVar

from motet.config import EngineConfig
from motet.errors import (
    DeadlineExceeded,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    MotetError,
    RequestAborted,
)
from motet.runtime.build import Runtime, build_runtime
from motet.runtime.detokenizer import Detokenizer
from motet.runtime.request import Delta, FinishReason, Request
from motet.runtime.statistics import RuntimeStatistics, StatisticsKeeper

logger = logging.getLogger("motet")

T = TypeVar("T")
Deliver = Callable[[Sequence[Delta]], None]

CLOSED = "the engine is closed; `await engine.start()` starts it again"

EXIT_PATIENCE = 10.0
"""Seconds that the end of the interpreter waits for the step in progress."""

TOKENIZING = "tokenizing"
"""The prerequisite of a request whose prompt came as text."""


class EngineThread:
    """Loads a model, then serves until it is stopped or a step fails for all.

    `deliver` is called on this thread with what each step added to the streams; it must not block or raise.
    """

    def __init__(self, model: str | PathLike[str], config: EngineConfig, deliver: Deliver) -> None:
        self.started: Future[Runtime] = Future()
        """Done when requests are served; fails with what loading raised."""
        self.ended: Future[None] = Future()
        """Done when the thread has given everything back."""
        self.statistics = RuntimeStatistics()
        """A snapshot, replaced after each step."""
        self._model = model
        self._config = config
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
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

    def add(self, request: Request, prompt: str | list[int]) -> None:
        """Takes a request in. Its prompt is tokenised on a worker if it is text.

        Raises EngineClosed or EngineDead if no request is accepted any more.
        """
        with self._gate:
            if self._stop_at is not None:
                raise EngineClosed("the engine is closing: it takes no new requests")
            self._post(lambda: self._add(request, prompt))

    def abort(self, request_id: int) -> None:
        """Ends a request, if it is still there. Never raises, never waits."""
        with suppress(MotetError):
            self._post(
                lambda: self._finish(
                    request_id, FinishReason.ABORT, RequestAborted("the request was cancelled")
                )
            )

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the engine thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as exc:
                future.set_exception(exc)

        self._post(run)
        return future

    def abort_where(self, chosen: Callable[[Request], bool]) -> Future[int]:
        """Ends all requests that a predicate chooses; how many those were."""

        def run() -> int:
            ids = [
                r.request_id for r in self._runtime.core.scheduler.requests if not r.is_finished and chosen(r)
            ]
            for request_id in ids:
                self._finish(request_id, FinishReason.ABORT, RequestAborted("the request was aborted"))
            return len(ids)

        return self.call(run)

    def stop(self, drain: float | None = 0.0) -> None:
        """No new requests from now on. Live ones have `drain` seconds to end (None: without limit).

        What is left then fails with EngineClosed. Stopping again can only shorten the time.
        """
        stop_at = float("inf") if drain is None else time.monotonic() + drain
        with self._gate:
            self._stop_at = stop_at if self._stop_at is None else min(self._stop_at, stop_at)
        with suppress(MotetError):
            self._post(lambda: None)  # wakes the thread

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called; then `ended` is near."""
        return self._stop_at is not None

    @property
    def refusal(self) -> MotetError | None:
        """Why nothing is accepted any more, once that is so."""
        return None if self._refusal is None else self._refusal()

    def _stop_at_exit(self) -> None:
        self.stop()
        self._thread.join(EXIT_PATIENCE)

    def _post(self, command: Callable[[], None]) -> None:
        with self._gate:
            if self._refusal is not None:
                raise self._refusal()
            self._commands.put(command)

    # -- on the engine thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._load()
        except BaseException as exc:
            self._refusal = lambda: EngineClosed(
                "the engine did not start; `await engine.start()` tries again"
            )
            self.started.set_exception(exc)
            atexit.unregister(self._stop_at_exit)
            self.ended.set_result(None)
            return
        self.started.set_result(self._runtime)
        try:
            self._serve()
        except BaseException as exc:
            logger.exception("the engine died")
            cause = exc  # `exc` is unbound when this block ends
            self._end(lambda: EngineDead(cause), FinishReason.ERROR)
        else:
            self._end(lambda: EngineClosed(CLOSED), FinishReason.ABORT)

    def _load(self) -> None:
        self._runtime = build_runtime(self._model, self._config, self._release)
        self._tokenizer = self._runtime.tokenizer.build()
        self._worker_tokenizer = self._runtime.tokenizer.build()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="motet-tokenizer")
        self._keeper = StatisticsKeeper(self._runtime.core.scheduler)

    def _serve(self) -> None:
        core = self._runtime.core
        while not self._should_stop():
            self._run_commands(wait=not core.has_work)
            now = time.monotonic()
            for request_id in core.scheduler.expired(now):
                error = DeadlineExceeded("the request's deadline passed before it was done")
                self._finish(request_id, FinishReason.TIMEOUT, error)
            if core.has_work:
                deltas = core.step()
                self._keeper.count(deltas)
                self.statistics = self._keeper.snapshot()  # before anyone hears of the step
                self._deliver(deltas)
            else:
                self.statistics = self._keeper.snapshot()

    def _should_stop(self) -> bool:
        if self._stop_at is None:
            return False
        drained = self._commands.empty() and not self._runtime.core.scheduler.requests
        return drained or time.monotonic() >= self._stop_at

    def _run_commands(self, *, wait: bool) -> None:
        with suppress(queue.Empty):
            if wait:
                self._commands.get(timeout=self._idle_time())()
            while True:
                self._commands.get_nowait()()

    def _idle_time(self) -> float | None:
        """Seconds until something must happen without a command."""
        times = [t for t in (self._runtime.core.scheduler.next_deadline, self._stop_at) if t is not None]
        return max(0.0, min(times) - time.monotonic()) if times and min(times) < float("inf") else None

    def _add(self, request: Request, prompt: str | list[int]) -> None:
        self._keeper.enter(request)
        if isinstance(prompt, list):
            request.set_prompt(prompt, Detokenizer(self._tokenizer, prompt, request.params))
            self._runtime.core.scheduler.add(request)
        else:
            request.prerequisites.add(TOKENIZING)
            self._runtime.core.scheduler.add(request)
            self._worker.submit(self._tokenize, request, prompt)

    def _tokenize(self, request: Request, text: str) -> None:
        """On the worker: the worker's own tokenizer, since one cannot be shared between threads."""
        try:
            token_ids: list[int] | Exception = self._worker_tokenizer.encode(text)
        except Exception as exc:  # whatever a tokenizer may raise concerns this request alone
            token_ids = exc
        with suppress(MotetError):  # the engine ended meanwhile, and the request with it
            self._post(lambda: self._take_prompt(request, token_ids))

    def _take_prompt(self, request: Request, token_ids: list[int] | Exception) -> None:
        if request.is_finished:
            return
        try:
            if isinstance(token_ids, Exception):
                raise InvalidRequest(f"the prompt could not be tokenised: {token_ids}") from token_ids
            self._runtime.intake.check_prompt(token_ids, request.params)
            request.set_prompt(token_ids, Detokenizer(self._tokenizer, token_ids, request.params))
        except InvalidRequest as error:
            self._finish(request.request_id, FinishReason.ERROR, error)
        else:
            self._runtime.core.scheduler.unblock(request, TOKENIZING)

    def _finish(self, request_id: int, reason: FinishReason, error: MotetError) -> None:
        delta = self._runtime.core.scheduler.finish(request_id, reason, error)
        if delta is not None:
            self._deliver([delta])

    def _release(self, request: Request) -> None:
        """The one place where a request's adapter is given back."""
        self._keeper.leave(request)
        if request.adapter is not None:
            self._runtime.adapters.release(request.adapter)

    def _end(self, refusal: Callable[[], MotetError], reason: FinishReason) -> None:
        """Refuses all that comes from now on, fails all that is there, and lets everything go."""
        with self._gate:
            self._refusal = refusal
        try:
            self._run_commands(wait=False)
            self._worker.shutdown(wait=False, cancel_futures=True)
            self._deliver(self._runtime.core.abandon(reason, refusal))
        finally:
            self.statistics = RuntimeStatistics()
            del self._runtime, self._keeper, self._tokenizer, self._worker_tokenizer
            atexit.unregister(self._stop_at_exit)
            self.ended.set_result(None)
