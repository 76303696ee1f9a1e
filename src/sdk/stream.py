"""TokenStream: one request's tokens, as an async iterator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import anyio

from motet.errors import MotetError, RequestAborted
from motet.sdk.loops import Loop, current_loop
from motet.sdk.outputs import Completion, CompletionOutput, Token, Usage


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The last thing that a stream is told."""

    usage: Usage
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[Mapping[int, float] | None, ...] | None
    reasons: tuple[tuple[str, str | int | None], ...]
    """(finish reason, stop reason) of each output."""
    finish_reason: str
    """Of the first output, or of the error."""
    error: MotetError | None


class TokenStream:
    """Async iterator of `Token`, and async context manager.

    It ends normally only when the request ended normally (stop, length); otherwise `__anext__` raises what
    ended it, after all tokens that came before: `DeadlineExceeded`, `EngineClosed`, `EngineDead`,
    `InvalidRequest`, `PromptTooLong`, `QueueFull`, `QuotaExceeded`, `RequestFailed`; after a cancel or
    abort at once `RequestAborted`.

    With n > 1 the tokens of all outputs come as they are made: `Token.index` says which output each belongs to.
    The stream ends when all have ended; whatever ends one before its time ends all.

    Leaving `async with`, cancelling a task that waits for a token, or dropping the last reference all abort
    the request. Tokens wait here, without limit, for as long as nobody asks for them. It belongs to the event
    loop on which it was made; any task of that loop may ask for the next token, one at a time.
    """

    def __init__(self, request_id: str, abort: Callable[[], None], loop: Loop) -> None:
        self.request_id = request_id
        self._abort = abort
        self._loop = loop
        self._tokens: list[Token] = []
        self._next = 0
        self._end: StreamEnd | None = None
        self._cancelled = False
        self._arrival: anyio.Event | None = None
        self._waits_for_end = False

    # -- the user's side ---------------------------------------------------------------------------------

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        while True:
            if self._is_aborted:
                raise RequestAborted(f"request {self.request_id} was cancelled")
            if self._next < len(self._tokens):
                self._next += 1
                return self._tokens[self._next - 1]
            if self._end is not None:
                if self._end.error is not None:
                    raise self._end.error
                raise StopAsyncIteration
            await self._wait()

    async def result(self) -> Completion:
        """Waits for the end and returns the whole result, tokens already iterated included.

        Raises what `__anext__` raises.
        """
        while self._end is None and not self._is_aborted:
            await self._wait(for_end=True)
        self._next = len(self._tokens)
        async for _ in self:  # raises what ended it
            pass
        assert self._end is not None, "the iteration ended"
        end = self._end
        tokens: list[list[Token]] = [[] for _ in end.reasons]
        for token in self._tokens:
            tokens[token.index].append(token)
        outputs = tuple(_output(i, *args) for i, args in enumerate(zip(tokens, end.reasons, strict=True)))
        return Completion(outputs, end.prompt_token_ids, end.usage, end.prompt_logprobs)

    @property
    def usage(self) -> Usage | None:
        """What the request took, whatever ended it; None until it has ended."""
        return self._end.usage if self._end is not None else None

    def cancel(self) -> None:
        """Aborts the request. From any thread, at any time, any number of times; does not wait."""
        if self._end is None and not self._cancelled:
            self._cancelled = True
            self._abort()

    async def aclose(self) -> None:
        """Aborts the request if it has not ended. Does not wait."""
        self.cancel()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # May run on any thread, in the midst of anything: cancel only posts to a re-entrant queue.
        if hasattr(self, "_arrival"):  # otherwise the constructor failed
            self.cancel()

    @property
    def _is_aborted(self) -> bool:
        return self._cancelled or (self._end is not None and isinstance(self._end.error, RequestAborted))

    async def _wait(self, *, for_end: bool = False) -> None:
        """Waits until something has arrived, or the end has. A cancelled wait aborts the request."""
        if self._arrival is not None:
            raise RuntimeError(
                f"another task is already waiting for the next token of request {self.request_id}"
            )
        if current_loop() != self._loop:
            raise RuntimeError(
                f"request {self.request_id} belongs to another event loop: iterate it where it was made"
            )
        self._arrival, self._waits_for_end = anyio.Event(), for_end
        try:
            await self._arrival.wait()
        except BaseException:
            self.cancel()
            raise
        finally:
            self._arrival = None

    # -- the engine's side: on the stream's loop ------------------------------------------------------------

    def receive(self, tokens: list[Token], end: StreamEnd | None) -> None:
        """Takes what one step brought."""
        self._tokens += tokens
        if end is not None:
            self._end = end
        if self._arrival is not None and (end is not None or not self._waits_for_end):
            self._arrival.set()


def _output(index: int, tokens: list[Token], reasons: tuple[str, str | int | None]) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text="".join(token.text for token in tokens),
        token_ids=tuple(token.token_id for token in tokens),
        logprobs=_logprobs(tokens),
        finish_reason=reasons[0],
        stop_reason=reasons[1],
    )


def _logprobs(tokens: list[Token]) -> tuple[dict[int, float], ...] | None:
    present = [dict(token.top_logprobs) for token in tokens if token.top_logprobs is not None]
    return tuple(present) if present else None
