"""Tracing: one OpenTelemetry span for each request. The only import of opentelemetry (extra `otel`).

Names and attributes are those of the semantic conventions for generative AI.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from motet.errors import InvalidRequest, RequestAborted

try:
    from opentelemetry import context, trace
    from opentelemetry.trace import StatusCode
    from opentelemetry.trace import TracerProvider as TracerProvider
except ImportError as error:
    raise InvalidRequest(
        "tracing needs the package opentelemetry-api: `pip install 'motet[otel]'`, or leave `tracing` False"
    ) from error

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.util.types import AttributeValue

    from motet.params import SamplingParams
    from motet.sdk.hooks import FinishedRequest


class Tracing:
    """Makes the spans of an engine's requests."""

    def __init__(self, model: str, provider: TracerProvider | None) -> None:
        """`provider`: where they go; None is the application's global one, whenever that is set."""
        self._model = model
        self._tracer = trace.get_tracer("motet", tracer_provider=provider)

    def begin(self, operation: str, params: SamplingParams) -> Span:
        """The span of a request that is made now; its parent is the caller's current span, if there is one.

        `operation` is one of the conventions' names: "chat" or "text_completion".
        """
        return Span(self._tracer, operation, self._model, params, context.get_current(), time.time_ns())


class Span:
    """One request's span. Made known when the request has ended, with the times that its timeline tells."""

    def __init__(
        self,
        tracer: trace.Tracer,
        operation: str,
        model: str,
        params: SamplingParams,
        parent: Context,
        start: int,
    ) -> None:
        self._tracer = tracer
        self._operation = operation
        self._model = model
        self._params = params
        self._parent = parent
        self._start = start
        """Nanoseconds since the epoch."""

    def end(self, finished: FinishedRequest) -> None:
        usage, error = finished.usage, finished.error
        span = self._tracer.start_span(
            f"{self._operation} {self._model}",
            self._parent,
            trace.SpanKind.INTERNAL,  # the convention for a model in the same process
            self._attributes(finished),
            start_time=self._start,
        )
        for state, when in usage.timeline:
            span.add_event(state, timestamp=self._at(when))
        if usage.ttft is not None:
            span.add_event("first_token", timestamp=self._at(usage.ttft))
        if error is not None and not isinstance(error, RequestAborted):  # who leaves early has seen no fault
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR, str(error))
        span.end(self._at(usage.total_time))

    def _at(self, seconds: float) -> int:
        return self._start + int(seconds * 1e9)

    def _attributes(self, finished: FinishedRequest) -> dict[str, AttributeValue]:
        params, usage = self._params, finished.usage
        attributes: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "motet",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": params.seed if (params.seed or 0) < 1 << 63 else None,  # OTLP's integers
            "gen_ai.request.stop_sequences": params.stop or None,
            "gen_ai.response.id": finished.request_id,
            "gen_ai.response.finish_reasons": (finished.finish_reason,),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "motet.engine": finished.engine,
            "motet.tenant": finished.tenant,
            "motet.adapter": finished.adapter,
            "motet.preemptions": usage.preemptions,
        }
        return {name: value for name, value in attributes.items() if value is not None}
