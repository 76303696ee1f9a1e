"""Every error that motet raises on purpose.

::

    MotetError
    ├── InvalidRequest (also a ValueError)   the caller's arguments cannot be served
    │   └── PromptTooLong
    ├── AdapterError
    │   ├── AdapterNotFound                  no adapter of that name is loaded
    │   ├── AdapterExists                    the name is taken and `replace` was not given
    │   ├── AdapterLoadError                 missing, damaged or ill-fitting files; or no room
    │   ├── AdapterNotAllowed                the tenant's policy does not list it
    │   └── UnsupportedAdapter               a PEFT feature that motet does not compute
    ├── BackendUnavailable               the native build that was asked for does not run here
    ├── ModelError
    │   ├── ModelNotFound
    │   ├── UnsupportedModel
    │   └── CorruptCheckpoint                a tensor is missing, short or belongs to nothing
    ├── RequestFailed                        one request ended without its answer; others go on
    │   ├── DeadlineExceeded
    │   └── RequestAborted
    ├── QueueFull                            too many requests wait; `retry_after` in seconds
    ├── QuotaExceeded                        so they do of a tenant beyond its quota; `retry_after` in seconds
    ├── EngineClosed                         not started yet, closing, or closed
    └── EngineDead                           a step failed for all; `cause` is what it raised

Values that no engine could accept (a negative temperature, an unknown key) are refused earlier, by
`SamplingParams` and `EngineConfig` themselves, with pydantic's `ValidationError`.
"""

from __future__ import annotations

import traceback


class MotetError(Exception):
    """Base of every error that motet raises on purpose."""


class InvalidRequest(MotetError, ValueError):
    """The request's arguments cannot be served; the message says which and what would do."""


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for an answer in the model's context or in the KV cache."""


class AdapterError(MotetError):
    """Base of the adapter errors."""


class AdapterNotFound(AdapterError):
    """No adapter of that name is loaded."""


class AdapterExists(AdapterError):
    """The name is taken; `replace=True` loads a new generation under it."""


class AdapterLoadError(AdapterError):
    """The adapter's files are missing, damaged or made for another model, or there is no room for it."""


class AdapterNotAllowed(AdapterError):
    """The tenant's policy does not let it use that adapter."""


class UnsupportedAdapter(AdapterError):
    """The adapter is sound but uses a PEFT feature that motet does not compute exactly."""


class BackendUnavailable(MotetError):
    """A build of the native library cannot be used: `MOTET_CPU_ISA` names one that does not run here, and the message
    lists those that do; or it was built from other sources than this version's, and must be built anew."""


class ModelError(MotetError):
    """Base of the model errors."""


class ModelNotFound(ModelError):
    """There is no model at that place."""


class UnsupportedModel(ModelError):
    """The model's architecture or one of its features is not supported; the message lists what is."""


class CorruptCheckpoint(ModelError):
    """The checkpoint lacks a tensor, holds one of a wrong shape or one that binds to nothing."""


class RequestFailed(MotetError):
    """One request ended without its answer; other requests are not touched."""


class DeadlineExceeded(RequestFailed):
    """The request's deadline passed before it was done."""


class RequestAborted(RequestFailed):
    """The request was cancelled, by its stream or by `AsyncEngine.abort`."""


class QueueFull(MotetError):
    """As many requests wait, or prompts of so many tokens, as `max_waiting` and `max_waiting_tokens` of the engine's
    config or the tenant's policy allow.

    `retry_after` is an estimate in seconds of when a place may be free.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceeded(MotetError):
    """The tenant has used up its `tokens_per_second` and `burst`, and its policy lets no more of its requests wait.

    `retry_after` is when the quota would let such a request through, in seconds, if no other came before it.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosed(MotetError):
    """The engine is not running: it was never started, or it is closing or closed."""


class EngineDead(MotetError):
    """The engine's thread failed and took every request with it.

    `cause` is the exception that ended it (also `__cause__`). `aclose()` and `start()` still work.
    """

    def __init__(self, cause: BaseException) -> None:
        what = "".join(traceback.format_exception_only(cause)).strip()  # not by `str`, which may fail
        super().__init__(
            f"the engine died of {what}. Close it with `await engine.aclose()`; "
            "`await engine.start()` brings it back empty"
        )
        self.cause = cause
        self.__cause__ = cause
