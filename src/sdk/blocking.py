"""Engine: `AsyncEngine` for code without an event loop, by way of one on a thread of its own."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar

from motet.config import EngineConfig
from motet.errors import EngineClosed, MotetError
from motet.params import SamplingParams, TenantPolicy
from motet.sdk.conversation import Message, Tool
from motet.sdk.engine import AsyncEngine
from motet.sdk.hooks import AdmittedRequest, FinishedRequest
from motet.sdk.loop_thread import LoopThread
from motet.sdk.outputs import Completion, Token, Usage
from motet.sdk.stream import TokenStream

if TYPE_CHECKING:
    from motet.lora.generation import AdapterInfo
    from motet.runtime.model_info import ModelInfo
    from motet.runtime.statistics import EngineStats
    from motet.sdk.metrics import ASGIApp, CollectorRegistry
    from motet.sdk.tracing import TracerProvider

T = TypeVar("T")


class Engine:
    """`AsyncEngine`, blocking: the same methods, arguments and errors, for scripts, notebooks and threads::

        with Engine("demo") as engine:
            for token in engine.stream("SELECT"):
                print(token.text, end="")

    Any thread may use it, several at once. It also works where an event loop runs (a notebook), which stands still
    meanwhile: an application that has a loop of its own wants `AsyncEngine`. An interrupt (Ctrl-C) ends the call
    that waits, and its request with it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        registry: CollectorRegistry | None = None,
        on_admit: Callable[[AdmittedRequest], object] | None = None,
        on_finish: Callable[[FinishedRequest], object] | None = None,
        tracing: bool | TracerProvider = False,
    ) -> None:
        self._engine = AsyncEngine(
            model, config, registry=registry, on_admit=on_admit, on_finish=on_finish, tracing=tracing
        )
        self._gate = threading.Lock()
        self._loop: LoopThread | None = None

    # -- life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """As `AsyncEngine.start`."""
        with self._gate:
            if self._loop is None or not self._loop.is_here:
                self._loop = LoopThread()
                weakref.finalize(
                    self, self._loop.stop
                )  # for one dropped unclosed, and for the interpreter's end
            loop = self._loop
        try:
            loop.call(self._engine.start)
        except Exception:  # for all who wait for this start; an interrupt is for one caller alone
            self._end(loop)
            raise

    def close(self, *, drain: float | None = 0.0) -> None:
        """As `AsyncEngine.aclose`."""
        loop = self._loop
        if loop is None or not loop.is_here:
            return
        loop.call(partial(self._engine.aclose, drain=drain))
        self._end(loop)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- requests ----------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> BlockingStream:
        """As `AsyncEngine.stream`; what only the tokens could raise is raised by the first `__next__`."""
        return self._open(
            partial(
                self._engine.stream,
                prompt,
                params,
                adapter=adapter,
                tenant=tenant,
                priority=priority,
                deadline=deadline,
                request_id=request_id,
            )
        )

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        adapter: str | None = None,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> BlockingStream:
        """As `AsyncEngine.chat`; what only the tokens could raise is raised by the first `__next__`."""
        return self._open(
            partial(
                self._engine.chat,
                messages,
                params,
                tools=tools,
                adapter=adapter,
                tenant=tenant,
                priority=priority,
                deadline=deadline,
                request_id=request_id,
            )
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> Completion:
        """As `AsyncEngine.generate`."""
        return self._call(
            partial(
                self._engine.generate,
                prompt,
                params,
                adapter=adapter,
                tenant=tenant,
                priority=priority,
                deadline=deadline,
                request_id=request_id,
            )
        )

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        progress: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> list[Completion | MotetError]:
        """As `AsyncEngine.generate_batch`."""
        return self._call(
            partial(
                self._engine.generate_batch,
                prompts,
                params,
                progress=progress,
                adapter=adapter,
                tenant=tenant,
                priority=priority,
                deadline=deadline,
                request_id=request_id,
            )
        )

    def abort(self, request_id: str) -> bool:
        """As `AsyncEngine.abort`."""
        return self._call(partial(self._engine.abort, request_id))

    # -- adapters, tenants, insight ------------------------------------------------------------------------

    def load_adapter(
        self, name: str, source: str | os.PathLike[str], *, pin: bool = False, replace: bool = False
    ) -> AdapterInfo:
        """As `AsyncEngine.load_adapter`."""
        return self._call(partial(self._engine.load_adapter, name, source, pin=pin, replace=replace))

    def unload_adapter(self, name: str, *, in_flight: Literal["finish", "abort"] = "finish") -> None:
        """As `AsyncEngine.unload_adapter`."""
        self._call(partial(self._engine.unload_adapter, name, in_flight=in_flight))

    def adapters(self) -> list[AdapterInfo]:
        """As `AsyncEngine.adapters`."""
        return self._engine.adapters()

    def set_tenant(self, name: str, policy: TenantPolicy) -> None:
        """As `AsyncEngine.set_tenant`."""
        self._engine.set_tenant(name, policy)

    def stats(self) -> EngineStats:
        """As `AsyncEngine.stats`."""
        return self._engine.stats()

    def model_info(self) -> ModelInfo:
        """As `AsyncEngine.model_info`."""
        return self._engine.model_info()

    def metrics_app(self) -> ASGIApp:
        """As `AsyncEngine.metrics_app`."""
        return self._engine.metrics_app()

    def _open(self, begin: Callable[[], TokenStream]) -> BlockingStream:
        async def on_the_loop() -> TokenStream:
            return begin()

        stream = self._call(on_the_loop)
        tokens: SimpleQueue[Token | BaseException] = SimpleQueue()
        self._running().post(_pump, stream, tokens)
        return BlockingStream(self, stream, tokens)

    def _end(self, loop: LoopThread) -> None:
        with self._gate:
            if self._loop is loop:
                self._loop = None
        loop.stop()

    def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        return self._running().call(function)

    def _running(self) -> LoopThread:
        loop = self._loop
        if loop is None or not loop.is_here:
            raise EngineClosed("the engine is not running: use `with engine:` or `engine.start()`")
        return loop


class BlockingStream:
    """`TokenStream`, blocking: iterator of `Token`, and context manager.

    It ends and raises as a `TokenStream` does. Leaving `with`, an interrupt while it waits, or dropping the last
    reference (a bare `break` out of `for token in engine.stream(...)`) all abort the request. Any thread may use it.
    """

    def __init__(
        self, engine: Engine, stream: TokenStream, tokens: SimpleQueue[Token | BaseException]
    ) -> None:
        self._engine = engine  # which must live as long as this is read
        self._stream = stream
        self._tokens = tokens

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def usage(self) -> Usage | None:
        """As `TokenStream.usage`."""
        return self._stream.usage

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Token:
        try:
            item = self._tokens.get()
        except BaseException:  # an interrupt
            self.cancel()
            raise
        if isinstance(item, Token):
            return item
        self._tokens.put(item)  # the end, for all who ask again
        if isinstance(item, StopAsyncIteration):
            raise StopIteration
        raise item

    def result(self) -> Completion:
        """As `TokenStream.result`."""
        for _ in self:
            pass
        return self._engine._call(self._stream.result)

    def cancel(self) -> None:
        """As `TokenStream.cancel`; tokens that are here already can still be read."""
        self._stream.cancel()

    def close(self) -> None:
        """As `TokenStream.aclose`."""
        self.cancel()

    def __enter__(self) -> BlockingStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self.cancel()


async def _pump(stream: TokenStream, tokens: SimpleQueue[Token | BaseException]) -> None:
    """On the loop: what comes out of a stream, its end last. One hop per token would cost a reader more."""
    try:
        while True:
            tokens.put(await stream.__anext__())
    except BaseException as end:
        tokens.put(end)
        if not isinstance(end, Exception):
            raise
