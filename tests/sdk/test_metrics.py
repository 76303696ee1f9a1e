"""Metrics: what a scrape says, read with prometheus-client's own parser."""

from __future__ import annotations

import asyncio
import gc
import gzip
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import anyio
import pytest
import trio
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from motet import (
    AsyncEngine,
    EngineConfig,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    QuotaExceeded,
    RequestAborted,
    SamplingParams,
    TenantPolicy,
)
from motet.sdk.metrics import EngineCollector, collector_of
from tests.sdk.checks import settled
from tests.sdk.conftest import CONFIG

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def named(name: str | None, **changes: object) -> EngineConfig:
    return CONFIG.model_copy(update={"name": name, **changes})


def scrape(registry: CollectorRegistry) -> Series:
    text = generate_latest(registry).decode()
    series: Series = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in series, "one sample for each series"
            series[key] = sample.value
    return series


def value(series: Series, name: str, **labels: str) -> float:
    return series[f"motet_{name}", frozenset(labels.items())]


def engines_in(series: Series) -> set[str]:
    return {dict(labels)["engine"] for _, labels in series}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def ours_of_default_registry_is_empty() -> Iterator[None]:
    yield
    assert list(collector_of(None).collect()) == []


@pytest.mark.anyio
async def test_the_counts_of_a_known_run_are_exact(
    tiny_folder: Path, adapters: dict[str, Path], registry: CollectorRegistry
):
    config = named("a", enable_prefix_caching=True, block_size=16)
    async with AsyncEngine(tiny_folder, config, registry=registry) as engine:
        await engine.load_adapter("acme", adapters["r5"])
        first = await engine.generate([5] * 40, SHORT)
        again = await engine.generate([5] * 40, SHORT)
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 32)
        await engine.generate(
            [7, 8, 9], SamplingParams(max_tokens=3, ignore_eos=True), adapter="acme", tenant="x"
        )
        with pytest.raises(InvalidRequest):
            await engine.generate(
                "text" * 200, SHORT, tenant="x"
            )  # too long, known only when it is tokenized
        stream = engine.stream([5, 6], LONG)
        await stream.__anext__()
        during = scrape(registry)
        assert value(during, "requests_running", engine="a") == 1
        assert value(during, "kv_blocks_used", engine="a") >= 1
        assert await engine.abort(stream.request_id)
        with pytest.raises(RequestAborted):
            await stream.result()
        aborted = stream.usage.output_tokens
        await settled(engine)
        series = scrape(registry)
        stats = engine.stats()
        (info,) = engine.adapters()
    prompt, output = 40 + 40 + 3 + 2, 8 + 8 + 3 + aborted
    steps = value(series, "step_duration_seconds_count", engine="a")
    assert steps in (output, output + 1), "the abort may find the next step planned, whose token nobody gets"
    expected = {
        "up": 1,
        "requests_running": 0,
        "requests_waiting": 0,
        "requests_blocked": 0,
        "preemptions_total": 0,
        "kv_blocks": stats.kv_blocks_total,
        "kv_blocks_used": 0,
        "kv_blocks_cached": stats.kv_blocks_cached,
        "prefix_query_tokens_total": prompt,
        "prefix_hit_tokens_total": 32,
        "prompt_tokens_total": prompt,
        "output_tokens_total": output,
        "time_to_first_token_seconds_count": 4,
        "inter_token_latency_seconds_count": output - 4,
        "queue_time_seconds_count": 4,
        "request_duration_seconds_count": 5,
        "step_requests_sum": steps,
        "step_tokens_sum": (prompt - 32) + steps - 4,
    }
    assert {name: value(series, name, engine="a") for name in expected} == expected
    reasons = {
        reason: value(series, "requests_finished_total", engine="a", reason=reason) for reason in REASONS
    }
    assert reasons == {"stop": 0, "length": 3, "abort": 1, "timeout": 0, "error": 1}
    for kind, name, requests, prompts, outputs in (
        ("adapter", "", 4, prompt - 3, output - 3),
        ("adapter", "acme", 1, 3, 3),
        ("tenant", "default", 3, prompt - 3, output - 3),
        ("tenant", "x", 2, 3, 3),
    ):
        assert value(series, f"{kind}_requests_total", engine="a", **{kind: name}) == requests
        assert value(series, f"{kind}_prompt_tokens_total", engine="a", **{kind: name}) == prompts
        assert value(series, f"{kind}_output_tokens_total", engine="a", **{kind: name}) == outputs
    places = {place: value(series, "adapters", engine="a", residency=place) for place in RESIDENCIES}
    assert places == {"device": 1, "host": 0, "disk": 0}
    assert value(series, "adapter_device_bytes", engine="a") == info.bytes > 0
    assert value(series, "process_cpu_seconds_total", engine="a") > 0
    usage = first.usage
    assert 0 < usage.ttft <= value(series, "time_to_first_token_seconds_sum", engine="a")
    assert usage.total_time <= value(series, "request_duration_seconds_sum", engine="a")


REASONS = ("stop", "length", "abort", "timeout", "error")
RESIDENCIES = ("device", "host", "disk")


@pytest.mark.anyio
async def test_histograms_are_cumulative_and_end_in_their_count(
    tiny_folder: Path, registry: CollectorRegistry
):
    async with AsyncEngine(tiny_folder, named("a"), registry=registry) as engine:
        await engine.generate([5, 6], SHORT)
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    histograms = [family for family in families if family.type == "histogram"]
    assert len(histograms) == 7
    for family in histograms:
        buckets = [(float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets) and buckets[-1][0] == float("inf")
        assert [n for _, n in buckets] == sorted(n for _, n in buckets)
        (count,) = [s.value for s in family.samples if s.name.endswith("_count")]
        assert buckets[-1][1] == count > 0


def test_two_engines_under_load_on_asyncio_and_trio_keep_their_outputs_and_metrics_apart(
    tiny_folder: Path, adapters: dict[str, Path], registry: CollectorRegistry
):
    """Two threads of one process, each engine with an adapter of its own and many streams, scraped all the while."""
    prompts = [[5 + i, 6, 7 + i] for i in range(12)]

    async def serve(name: str, adapter: str, num_tokens: int, *, barrier: threading.Barrier | None) -> list:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        answers: list = [None] * len(prompts)
        async with AsyncEngine(tiny_folder, named(name), registry=registry) as engine:
            await engine.load_adapter(adapter, adapters[adapter])
            if barrier is not None:
                await anyio.to_thread.run_sync(barrier.wait, 60)

            async def one(i: int) -> None:
                stream = engine.stream(prompts[i], params, adapter=adapter, tenant=f"{name}-{i % 3}")
                answers[i] = [token.token_id async for token in stream]

            async with anyio.create_task_group() as group:
                for i in range(len(prompts)):
                    group.start_soon(one, i)
            await settled(engine)
            if barrier is not None:
                await anyio.to_thread.run_sync(barrier.wait, 60)
                seen[name] = scrape(registry)
                await anyio.to_thread.run_sync(barrier.wait, 60)
        return answers

    seen: dict[str, Series] = {}
    jobs = {"asyncio": ("r5", 30), "trio": ("r64", 20)}
    alone = {name: asyncio.run(serve(name, *job, barrier=None)) for name, job in jobs.items()}
    barrier = threading.Barrier(2)
    together: dict[str, list] = {}

    def on(name: str) -> None:
        async def main() -> None:
            together[name] = await serve(name, *jobs[name], barrier=barrier)

        asyncio.run(main()) if name == "asyncio" else trio.run(main)

    threads = [threading.Thread(target=on, args=(name,)) for name in jobs]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        scrape(registry)  # a scrape in the midst of it all is sound, and disturbs nobody
        threads[0].join(0.02)
    assert together == alone
    for name, (adapter, num_tokens) in jobs.items():
        for series in seen.values():
            assert engines_in(series) == set(jobs)
            assert value(series, "output_tokens_total", engine=name) == 12 * num_tokens
            assert value(series, "prompt_tokens_total", engine=name) == 12 * 3
            assert value(series, "requests_finished_total", engine=name, reason="length") == 12
            assert value(series, "time_to_first_token_seconds_count", engine=name) == 12
            assert (
                value(series, "adapter_output_tokens_total", engine=name, adapter=adapter) == 12 * num_tokens
            )
            tenants = {dict(labels).get("tenant") for _, labels in series if ("engine", name) in labels} - {
                None
            }
            assert tenants == {f"{name}-{i}" for i in range(3)}
    assert scrape(registry) == {}


@pytest.mark.anyio
async def test_closing_an_engine_removes_its_series_alone_and_a_new_life_begins_at_zero(
    tiny_folder: Path, registry: CollectorRegistry
):
    one = AsyncEngine(tiny_folder, named("one"), registry=registry)
    assert scrape(registry) == {}
    async with AsyncEngine(tiny_folder, named("two"), registry=registry) as two:
        for _ in range(2):
            await one.start()
            assert engines_in(scrape(registry)) == {"one", "two"}
            assert value(scrape(registry), "output_tokens_total", engine="one") == 0
            await one.generate([5, 6], SHORT)
            await two.generate([5, 6], SHORT)
            assert value(scrape(registry), "output_tokens_total", engine="one") == 8
            await one.aclose()
            assert engines_in(scrape(registry)) == {"two"}
        assert value(scrape(registry), "output_tokens_total", engine="two") == 16
    assert scrape(registry) == {}


@pytest.mark.anyio
async def test_one_name_may_live_once_on_a_registry(
    tiny_folder: Path, tmp_path: Path, registry: CollectorRegistry
):
    twin = AsyncEngine(tiny_folder, named("a"), registry=registry)
    async with AsyncEngine(tiny_folder, named("a"), registry=registry) as engine:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"'a'.*lives"):
                await twin.start()
        async with AsyncEngine(tiny_folder, named("a"), registry=CollectorRegistry()):
            pass
        await engine.generate([5], SHORT)
        assert value(scrape(registry), "output_tokens_total", engine="a") == 8
    with pytest.raises(ModelNotFound):
        await AsyncEngine(tmp_path, named("a"), registry=registry).start()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await AsyncEngine(tiny_folder, named("a"), registry=registry).start()
    async with twin:  # all those before have given the name back
        await twin.generate([5], SHORT)


@pytest.mark.anyio
async def test_engines_without_a_name_get_the_first_that_is_free(
    tiny_folder: Path, registry: CollectorRegistry
):
    def nameless() -> AsyncEngine:
        return AsyncEngine(tiny_folder, named(None), registry=registry)

    async with nameless():
        async with nameless():
            assert engines_in(scrape(registry)) == {"engine-1", "engine-2"}
        async with nameless():
            assert engines_in(scrape(registry)) == {"engine-1", "engine-2"}


@pytest.mark.anyio
async def test_an_engine_that_is_dropped_unclosed_takes_its_series_along(
    tiny_folder: Path, registry: CollectorRegistry
):
    engine = AsyncEngine(tiny_folder, named("a"), registry=registry)
    await engine.start()
    ended = engine._life.session.thread.ended
    assert engines_in(scrape(registry)) == {"a"}
    del engine
    gc.collect()
    assert scrape(registry) == {}
    await anyio.to_thread.run_sync(ended.result, 10)


@pytest.mark.anyio
async def test_without_a_registry_the_series_stand_in_prometheus_own(
    tiny_folder: Path, ours_of_default_registry_is_empty: None
):
    async with AsyncEngine(tiny_folder, named("mine")) as engine:
        await engine.generate([5], SHORT)
        assert REGISTRY.get_sample_value("motet_output_tokens_total", {"engine": "mine"}) == 8
    assert REGISTRY.get_sample_value("motet_output_tokens_total", {"engine": "mine"}) is None


@pytest.mark.anyio
async def test_what_cannot_be_a_registry_is_an_error(tiny_folder: Path, registry: CollectorRegistry):
    with pytest.raises(InvalidRequest, match="CollectorRegistry, not str"):
        AsyncEngine(tiny_folder, registry="default")
    Counter("motet_output_tokens", "the application's own", registry=registry)
    with pytest.raises(InvalidRequest, match="motet_output_tokens"):
        await AsyncEngine(tiny_folder, registry=registry).start()


@pytest.mark.parametrize("name", ["", "\ud800", 5])
def test_a_name_that_no_label_can_hold_is_an_error(name: object):
    with pytest.raises(ValueError, match="name"):
        EngineConfig(name=name)


@pytest.mark.anyio
async def test_a_dead_engine_is_seen_as_down_until_it_is_closed(
    tiny_folder: Path, registry: CollectorRegistry
):
    engine = AsyncEngine(tiny_folder, named("a"), registry=registry)
    async with AsyncEngine(tiny_folder, named("b"), registry=registry) as other:
        await engine.start()
        streams = [engine.stream([5, 6], LONG) for _ in range(3)]
        await streams[0].__anext__()

        def fail(*_: object) -> None:
            raise ZeroDivisionError("step k")

        engine._running()[1].core._runner._steps = fail
        for stream in streams:
            with pytest.raises(EngineDead):
                await stream.result()
        series = scrape(registry)
        assert value(series, "up", engine="a") == 0
        assert value(series, "requests_running", engine="a") == 0
        assert value(series, "requests_finished_total", engine="a", reason="error") == 3
        assert value(series, "output_tokens_total", engine="a") == sum(s.usage.output_tokens for s in streams)
        assert value(series, "up", engine="b") == 1
        await engine.start()
        series = scrape(registry)
        assert value(series, "up", engine="a") == 1
        assert value(series, "requests_finished_total", engine="a", reason="error") == 0
        await engine.aclose()
        assert engines_in(scrape(registry)) == {"b"}
        await other.generate([5], SHORT)


@pytest.mark.anyio
async def test_what_is_refused_or_delayed_is_counted(tiny_folder: Path, registry: CollectorRegistry):
    config = named("a", max_num_seqs=1, max_waiting=1)
    async with AsyncEngine(tiny_folder, config, registry=registry) as engine:
        engine.set_tenant("x", TenantPolicy(tokens_per_second=20.0, burst=2, max_waiting=1))
        first, delayed = (engine.stream([5, 6], SHORT, tenant="x") for _ in range(2))
        for tenant, error in (("x", QueueFull), ("y", QueueFull)):
            with pytest.raises(error):
                engine.stream([5], SHORT, tenant=tenant)
        await first.result()
        with pytest.raises(QuotaExceeded):
            engine.stream([5], SHORT, tenant="x")
        await delayed.result()
        series = scrape(registry)
    assert value(series, "requests_delayed_total", engine="a") == 1
    refused = {why: value(series, "requests_refused_total", engine="a", reason=why) for why in REFUSALS}
    assert refused == {"queue_full": 2, "quota_exceeded": 1}


REFUSALS = ("queue_full", "quota_exceeded")


@pytest.mark.anyio
async def test_names_beyond_the_limit_share_one_series(
    tiny_folder: Path, adapters: dict[str, Path], registry: CollectorRegistry
):
    config = named("a", max_metric_adapters=2)
    async with AsyncEngine(tiny_folder, config, registry=registry) as engine:
        for name in ("r1", "r5", "r8", "r16"):
            await engine.load_adapter(name, adapters[name])
            for tenant in (f"{name}-x", f"{name}-y"):
                await engine.generate([5], SHORT, adapter=name, tenant=tenant)
        await engine.generate([5], SHORT)
        series = scrape(registry)
    for kind, names in (("adapter", {"r1", "r5", "other", ""}), ("tenant", {"r1-x", "r1-y", "other"})):
        shown = {dict(labels)[kind] for _, labels in series if kind in dict(labels)}
        assert shown == names
    assert value(series, "adapter_output_tokens_total", engine="a", adapter="other") == 4 * 8
    assert value(series, "tenant_output_tokens_total", engine="a", tenant="other") == 7 * 8


async def ask(
    app, *headers: tuple[bytes, bytes], query: bytes = b""
) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[dict] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/metrics", "query_string": query, "headers": headers}
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body


@pytest.mark.anyio
async def test_the_app_answers_in_the_format_that_is_asked_for(
    tiny_folder: Path, registry: CollectorRegistry
):
    engine = AsyncEngine(tiny_folder, named("a"), registry=registry)
    app = engine.metrics_app()
    assert (await ask(app))[2] == b""
    async with engine:
        await engine.generate([5], SHORT)
        status, headers, body = await ask(app)
        assert status == 200 and headers[b"Content-Type"].startswith(b"text/plain")
        assert b'motet_output_tokens_total{engine="a"} 8.0' in body
        _, headers, body = await ask(app, (b"accept", b"application/openmetrics-text; version=1.0.0"))
        assert headers[b"Content-Type"].startswith(b"application/openmetrics-text; version=1.0.0")
        families = {family.name for family in parse_openmetrics(body.decode())}
        assert {"motet_output_tokens", "motet_step_duration_seconds"} <= families
        _, headers, packed = await ask(app, (b"accept-encoding", b"gzip"))
        assert headers[b"Content-Encoding"] == b"gzip"
        assert b"motet_up" in gzip.decompress(packed)
        _, _, body = await ask(app, query=b"name[]=motet_up")
        assert {family.name for family in text_string_to_metric_families(body.decode())} == {"motet_up"}
    assert (await ask(app))[2] == b""


@pytest.mark.anyio
async def test_a_header_that_is_no_ascii_is_passed_over(registry: CollectorRegistry):
    app = AsyncEngine("demo", registry=registry).metrics_app()
    status, headers, _ = await ask(app, (b"accept", b"\xff"), (b"accept-encoding", b"\xff"))
    assert status == 200 and headers[b"Content-Type"].startswith(b"text/plain")


def test_an_engine_may_start_in_the_middle_of_a_scrape(monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []

    def show(families: object, name: str, thread: object) -> None:
        shown.append(name)
        if len(shown) == 1:
            collector.add("newcomer", Mock())

    collector = EngineCollector()
    collector.add("a", Mock())
    collector.add("b", Mock())
    monkeypatch.setattr("motet.sdk.metrics._Families.add", show)
    list(collector.collect())
    assert shown == ["a", "b"]
    list(collector.collect())
    assert shown[2:] == ["a", "b", "newcomer"]


@pytest.mark.anyio
async def test_a_server_may_run_the_app_by_itself(tiny_folder: Path, registry: CollectorRegistry):
    app = AsyncEngine(tiny_folder, registry=registry).metrics_app()
    received = iter(["lifespan.startup", "lifespan.shutdown"])
    sent: list[str] = []

    async def receive() -> dict:
        return {"type": next(received)}

    async def send(message: dict) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
