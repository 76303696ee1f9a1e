"""Spans, read from OpenTelemetry's own in-memory exporter."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from motet import AsyncEngine, EngineDead, InvalidRequest, PromptTooLong, RequestAborted, SamplingParams
from tests.sdk.conftest import CONFIG

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


class Spans:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("the application")

    def by_id(self) -> dict[str, ReadableSpan]:
        spans = [
            span for span in self.exporter.get_finished_spans() if span.instrumentation_scope.name == "motet"
        ]
        return {span.attributes["gen_ai.response.id"]: span for span in spans}


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.mark.anyio
async def test_a_span_says_what_the_request_was_and_took(
    tiny_folder: Path, adapters: dict[str, Path], spans: Spans
):
    config = CONFIG.model_copy(update={"name": "a"})
    params = SamplingParams(
        max_tokens=8, ignore_eos=True, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop=["\ufffe"]
    )
    before = time.time_ns()
    async with AsyncEngine(tiny_folder, config, tracing=spans.provider) as engine:
        await engine.load_adapter("r5", adapters["r5"])
        done = await engine.generate([5, 6, 7], params, adapter="r5", tenant="x", request_id="id")
    (span,) = spans.by_id().values()
    assert span.name == f"text_completion {tiny_folder}"
    assert span.kind is SpanKind.INTERNAL
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "motet",
        "gen_ai.request.model": str(tiny_folder),
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.request.stop_sequences": ("\ufffe",),
        "gen_ai.response.id": "id",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 8,
        "motet.engine": "a",
        "motet.tenant": "x",
        "motet.adapter": "r5",
        "motet.preemptions": 0,
    }
    assert span.status.status_code is StatusCode.UNSET
    assert before <= span.start_time <= span.end_time <= time.time_ns()
    usage = done.usage
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(usage.total_time, abs=1e-6)
    events = {event.name: (event.timestamp - span.start_time) / 1e9 for event in span.events}
    expected = dict(usage.timeline) | {"first_token": usage.ttft}
    assert events == {name: pytest.approx(when, abs=1e-6) for name, when in expected.items()}


@pytest.mark.anyio
async def test_a_span_lies_under_the_span_in_which_the_request_was_made(tiny_folder: Path, spans: Spans):
    async with AsyncEngine(tiny_folder, CONFIG, tracing=spans.provider) as engine:
        with spans.tracer.start_as_current_span("one request of a web server") as outer:
            stream = engine.stream([5], SHORT, request_id="inner")
        with spans.tracer.start_as_current_span("another"):
            await stream.result()
        await engine.generate([5], SHORT, request_id="root")
    found = spans.by_id()
    assert found["inner"].parent.span_id == outer.get_span_context().span_id
    assert found["inner"].context.trace_id == outer.get_span_context().trace_id
    assert found["root"].parent is None


@pytest.mark.anyio
async def test_a_chat_is_named_as_one(tiny_folder: Path, tmp_path: Path, spans: Spans):
    folder = tmp_path / "chatty"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    async with AsyncEngine(folder, CONFIG, tracing=spans.provider) as engine:
        await engine.chat([{"role": "user", "content": "hello"}], SHORT, request_id="talk").result()
    span = spans.by_id()["talk"]
    assert (span.name, span.attributes["gen_ai.operation.name"]) == (f"chat {folder}", "chat")
    assert span.attributes["gen_ai.usage.input_tokens"] == 5


@pytest.mark.anyio
async def test_a_failure_is_an_error_and_an_early_leave_is_none(tiny_folder: Path, spans: Spans):
    engine = AsyncEngine(tiny_folder, CONFIG, tracing=spans.provider)
    await engine.start()
    with pytest.raises(PromptTooLong):
        await engine.generate("text" * 200, SHORT, request_id="too long")
    stream = engine.stream([5, 6], LONG, request_id="left")
    await engine.abort("left")
    with pytest.raises(RequestAborted):
        await stream.result()
    stream = engine.stream([5, 6], LONG, request_id="dead")
    await stream.__anext__()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("step k")

    engine._running()[1].core._runner.submit = fail
    with pytest.raises(EngineDead):
        await stream.result()
    await engine.aclose()
    found = spans.by_id()
    for name, kind, message in (("too long", "PromptTooLong", "tokens"), ("dead", "EngineDead", "step k")):
        assert found[name].status.status_code is StatusCode.ERROR
        assert message in found[name].status.description
        assert found[name].attributes["error.type"] == kind
        assert found[name].attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert found["left"].status.status_code is StatusCode.UNSET
    assert found["left"].attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert "error.type" not in found["left"].attributes


@pytest.mark.anyio
async def test_what_is_no_provider_is_refused(tiny_folder: Path):
    with pytest.raises(InvalidRequest, match="TracerProvider, not str"):
        AsyncEngine(tiny_folder, tracing="yes")
    AsyncEngine(tiny_folder, tracing=True)


def test_without_the_package_only_those_who_ask_for_spans_are_told(tiny_folder: Path):
    code = f"""
import sys
sys.modules["opentelemetry"] = None
import asyncio
from motet import AsyncEngine, InvalidRequest, SamplingParams
async def main():
    async with AsyncEngine({str(tiny_folder)!r}) as engine:
        await engine.generate([5], SamplingParams(max_tokens=2))
asyncio.run(main())
try:
    AsyncEngine("demo", tracing=True)
except InvalidRequest as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "pip install 'motet[otel]'" in done.stdout
