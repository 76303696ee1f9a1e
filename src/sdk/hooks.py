"""Hooks: an application's own functions, told of every request, where they can hold up none."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from inspect import iscoroutinefunction
from os import PathLike
from typing import TYPE_CHECKING

from motet.errors import InvalidRequest, MotetError
from motet.sdk.outputs import Usage

if TYPE_CHECKING:
    from motet.params import SamplingParams
    from motet.sdk.stream import StreamEnd
    from motet.sdk.tracing import Span, TracerProvider, Tracing

logger = logging.getLogger("motet")

EXIT_PATIENCE = 10.0
"""Seconds that the end of the interpreter waits for hooks that are still to be called."""

_on_behalf_of: ContextVar[object] = ContextVar("motet_hook", default=None)
"""The call of a listener that is under way. What it has event loops do runs in a copy of its context."""


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that was taken in, as `on_admit` is told."""

    engine: str
    """The name under which its engine's metrics stand."""
    request_id: str
    tenant: str
    adapter: str | None
    prompt_tokens: int | None
    """None while the prompt is text that is not tokenized yet."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that has ended, as `on_finish` is told."""

    engine: str
    request_id: str
    tenant: str
    adapter: str | None
    usage: Usage
    finish_reason: str
    """"stop", "length", "abort", "timeout" or "error"."""
    error: MotetError | None
    """What its stream raises, if it does."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told of an engine's requests."""

    on_admit: Callable[[AdmittedRequest], object] | None = None
    on_finish: Callable[[FinishedRequest], object] | None = None
    tracing: Tracing | None = None


def make_listeners(
    model: str | PathLike[str],
    on_admit: Callable[[AdmittedRequest], object] | None,
    on_finish: Callable[[FinishedRequest], object] | None,
    tracing: bool | TracerProvider,
) -> Listeners | None:
    """None if nobody wants to hear. Raises InvalidRequest: see `AsyncEngine`."""
    _check_hook("on_admit", on_admit)
    _check_hook("on_finish", on_finish)
    if on_admit is None and on_finish is None and tracing is False:
        return None
    return Listeners(on_admit, on_finish, _make_tracing(model, tracing) if tracing is not False else None)


def _check_hook(name: str, hook: object) -> None:
    if hook is None:
        return
    if iscoroutinefunction(hook):
        raise InvalidRequest(
            f"{name} must be a plain function, not an async one: it is called on a thread of its own, from where "
            "`loop.call_soon_threadsafe` or trio's `run_sync_soon` reaches an event loop"
        )
    if not callable(hook):
        raise InvalidRequest(f"{name} must be a function of one argument, not {hook!r}")


def _make_tracing(model: str | PathLike[str], provider: object) -> Tracing:
    from motet.sdk.tracing import TracerProvider, Tracing

    if provider is not True and not isinstance(provider, TracerProvider):
        raise InvalidRequest(
            f"tracing must be True, False or an opentelemetry TracerProvider, not {type(provider).__name__}"
        )
    return Tracing(os.fspath(model), None if provider is True else provider)


class HookThread:
    """Calls the listeners one after another, on a thread of its own that ends when `close` is called.

    A listener may block: that delays those behind it, and no stream. What one raises is logged.
    """

    def __init__(self, engine: str, listeners: Listeners) -> None:
        self.ended: Future[None] = Future()
        """Done when the last listener has returned."""
        self._engine = engine
        self._listeners = listeners
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._under_way: object = None
        self._thread = threading.Thread(target=self._run, name="motet-hooks", daemon=True)

    @property
    def waits_for_caller(self) -> bool:
        """Whether a listener that has not returned yet asks, here or through an event loop elsewhere."""
        return self._under_way is not None and self._under_way is _on_behalf_of.get()

    def start(self) -> None:
        atexit.register(self._close_at_exit)
        self._thread.start()

    def close(self) -> None:
        """What was put before is still called."""
        self._calls.put(None)

    def report(
        self,
        request_id: str,
        params: SamplingParams,
        *,
        tenant: str,
        adapter: str | None,
        prompt_tokens: int | None,
        operation: str,
    ) -> RequestReport:
        """On the caller's thread, whose current span becomes the parent of the request's."""
        tracing = self._listeners.tracing
        return RequestReport(
            AdmittedRequest(self._engine, request_id, tenant, adapter, prompt_tokens),
            self._listeners,
            self._calls.put,
            tracing.begin(operation, params) if tracing is not None else None,
        )

    def _close_at_exit(self) -> None:
        self.close()
        self._thread.join(EXIT_PATIENCE)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._under_way = call
            _on_behalf_of.set(call)
            try:
                call()
            except BaseException:  # an application's SystemExit, too, ends nothing here
                logger.exception("a request hook failed")
            self._under_way = None
        atexit.unregister(self._close_at_exit)
        self.ended.set_result(None)


@dataclass(slots=True)
class RequestReport:
    """What the listeners are told of one request: first that it was taken in, then once how it ended."""

    _info: AdmittedRequest
    _listeners: Listeners
    _put: Callable[[Callable[[], object]], None]
    _span: Span | None
    _is_announced: bool = field(default=False, init=False)

    def admit(self) -> None:
        """It was taken in. By now the engine may even have ended it, on its own thread."""
        self._put(self._announce)

    def finish(self, end: StreamEnd) -> None:
        """It has ended. To be called once."""
        info, listeners = self._info, self._listeners
        finished = FinishedRequest(
            info.engine, info.request_id, info.tenant, info.adapter, end.usage, end.finish_reason, end.error
        )
        self._put(self._announce)  # unless that has been done
        if listeners.on_finish is not None:
            self._put(partial(listeners.on_finish, finished))
        if self._span is not None:
            self._put(partial(self._span.end, finished))

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            if self._listeners.on_admit is not None:
                self._listeners.on_admit(self._info)
