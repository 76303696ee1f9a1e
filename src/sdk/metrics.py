"""Prometheus metrics: what the engines of a registry have done, read off their meters when somebody scrapes.

No object of prometheus-client is touched while tokens are made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, get_args
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, make_asgi_app
from prometheus_client import CollectorRegistry as CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from motet.errors import InvalidRequest
from motet.lora.generation import Residency

if TYPE_CHECKING:
    from motet.lora.pool import AdapterPool
    from motet.runtime.admission import Admission
    from motet.runtime.engine_thread import EngineThread
    from motet.runtime.meter import Histogram, Meter

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


class EngineCollector(Collector):
    """The series of all engines of one registry, told apart by the label `engine`. Thread-safe."""

    def __init__(self) -> None:
        # Re-entrant: an engine that is garbage collected while this very thread is here takes its name away.
        self._lock = threading.RLock()
        self._engines: dict[str, EngineThread] = {}

    def add(self, name: str | None, thread: EngineThread) -> str:
        """Shows an engine's series from now on, under the name that is returned; None finds a free one.

        Raises InvalidRequest if the name is taken.
        """
        with self._lock:
            if name is None:
                name = next(free for n in count(1) if (free := f"engine-{n}") not in self._engines)
            if name in self._engines:
                raise InvalidRequest(
                    f"EngineConfig.name is {name!r}, but an engine of that name lives on the same metrics "
                    "registry: close it, choose another name, or give each its own `registry`"
                )
            self._engines = {**self._engines, name: thread}
            return name

    def remove(self, thread: EngineThread) -> None:
        """Takes an engine's series away. Does nothing if they are not there."""
        with self._lock:
            self._engines = {name: other for name, other in self._engines.items() if other is not thread}

    def describe(self) -> Iterable[Metric]:
        """All families, so that a registry can refuse another collector with one of the same name."""
        return _Families()

    def collect(self) -> Iterable[Metric]:
        families = _Families()
        for name, thread in self._engines.items():  # the dict of this moment: each change makes a new one
            families.add(name, thread)
        return [family for family in families if family.samples]


_collectors: WeakKeyDictionary[CollectorRegistry, EngineCollector] = WeakKeyDictionary()
"""Says of registries, which are the application's and can be asked for no collector, what is registered there."""
_collectors_lock = threading.Lock()


def collector_of(registry: CollectorRegistry | None) -> EngineCollector:
    """The one collector of a registry (None: of prometheus-client's own), made when first asked for.

    Raises InvalidRequest if the registry has metrics of the same names from elsewhere.
    """
    registry = REGISTRY if registry is None else registry
    with _collectors_lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = EngineCollector()
            try:
                registry.register(collector)
            except ValueError as error:
                raise InvalidRequest(f"the registry has metrics of motet's names already: {error}") from error
            _collectors[registry] = collector
        return collector


def metrics_app(registry: CollectorRegistry | None) -> ASGIApp:
    """An ASGI app that answers every path with a registry's metrics, in the format that the client asks for."""
    scrape = make_asgi_app(REGISTRY if registry is None else registry)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":  # run by itself a server asks for it; prometheus-client's app refuses
            for answer in ("lifespan.startup.complete", "lifespan.shutdown.complete"):
                await receive()
                await send({"type": answer})
        else:
            headers = [
                (key, value) for key, value in scope["headers"] if value.isascii()
            ]  # it fails at others
            await scrape({**scope, "headers": headers}, receive, send)

    return app


class _Families:
    """Every metric that motet exports, each with one sample or more for each engine that is added."""

    def __init__(self) -> None:
        self._by_name: dict[str, Any] = {}
        gauge, counter, histogram = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily
        for kind, name, documentation, *labels in (
            (gauge, "up", "1 while the engine serves; 0 when it has died and was not closed yet"),
            (gauge, "requests_running", "Requests that take part in steps"),
            (gauge, "requests_waiting", "Requests that wait for their turn, preempted ones included"),
            (
                gauge,
                "requests_blocked",
                "Requests that wait for something named, such as their prompt's tokens",
            ),
            (counter, "requests_finished", "Requests that ended, by how", "reason"),
            (counter, "requests_refused", "Requests that found no place in a queue, by why", "reason"),
            (counter, "requests_delayed", "Requests that had to wait for their tenant's quota"),
            (counter, "preemptions", "Times a running request gave its KV blocks to another"),
            (gauge, "kv_blocks", "KV blocks that the engine has"),
            (gauge, "kv_blocks_used", "KV blocks that requests hold"),
            (gauge, "kv_blocks_cached", "KV blocks that no request holds, kept for an equal prefix"),
            (counter, "prefix_query_tokens", "Prompt tokens that were looked up in the prefix cache"),
            (counter, "prefix_hit_tokens", "Prompt tokens that came from the prefix cache"),
            (counter, "prompt_tokens", "Prompt tokens of requests that ran, cached ones included"),
            (counter, "output_tokens", "Tokens generated"),
            (histogram, "time_to_first_token_seconds", "From a request's call to its first token"),
            (histogram, "inter_token_latency_seconds", "Between two tokens of a request"),
            (histogram, "queue_time_seconds", "From a request's call until it first ran"),
            (histogram, "request_duration_seconds", "From a request's call to its end, whatever that was"),
            (histogram, "step_duration_seconds", "Of one step: a schedule, a forward, its results"),
            (histogram, "step_requests", "Requests that one step computed for"),
            (histogram, "step_tokens", "Tokens that one step computed, prompts and outputs together"),
            (
                counter,
                "process_cpu_seconds",
                "CPU time of the whole process, all its engines and the application",
            ),
            (gauge, "adapters", "Loaded adapters, by where their weights are", "residency"),
            (gauge, "adapter_device_bytes", "Memory on the device that loaded adapters take"),
            (counter, "adapter_loads", "Adapters that were loaded"),
            (counter, "adapter_reloads", "Adapters that were brought from host memory or disk to the device"),
            (counter, "adapter_evictions", "Idle adapters that left the device for others"),
            (counter, "adapter_requests", "Requests that ended, by adapter", "adapter"),
            (counter, "adapter_prompt_tokens", "Prompt tokens of requests that ran, by adapter", "adapter"),
            (counter, "adapter_output_tokens", "Tokens generated, by adapter", "adapter"),
            (counter, "tenant_requests", "Requests that ended, by tenant", "tenant"),
            (counter, "tenant_prompt_tokens", "Prompt tokens of requests that ran, by tenant", "tenant"),
            (counter, "tenant_output_tokens", "Tokens generated, by tenant", "tenant"),
        ):
            self._by_name[name] = kind(f"motet_{name}", documentation, labels=["engine", *labels])

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._by_name.values())

    def add(self, engine: str, thread: EngineThread) -> None:
        loop, meter = thread.loop, thread.meter
        self._value("up", float(loop is not None and thread.refusal is None), engine)
        self._value("process_cpu_seconds", time.process_time(), engine)
        self._add_statistics(engine, meter)
        self._add_meter(engine, meter)
        if loop is not None:
            self._add_admission(engine, loop.runtime.admission)
            self._add_adapters(engine, loop.runtime.adapters)

    def _add_statistics(self, engine: str, meter: Meter) -> None:
        statistics = meter.statistics
        for state in ("running", "waiting", "blocked"):
            self._value(f"requests_{state}", getattr(statistics, state), engine)
        self._value("kv_blocks", statistics.kv_blocks_total, engine)
        for name in (
            "kv_blocks_used",
            "kv_blocks_cached",
            "preemptions",
            "prefix_query_tokens",
            "prefix_hit_tokens",
        ):
            self._value(name, getattr(statistics, name), engine)

    def _add_meter(self, engine: str, meter: Meter) -> None:
        self._value("prompt_tokens", meter.prompt_tokens, engine)
        self._value("output_tokens", meter.output_tokens, engine)
        self._histogram("time_to_first_token_seconds", meter.time_to_first_token, engine)
        self._histogram("inter_token_latency_seconds", meter.inter_token_latency, engine)
        self._histogram("queue_time_seconds", meter.queue_time, engine)
        self._histogram("request_duration_seconds", meter.request_duration, engine)
        self._histogram("step_duration_seconds", meter.step_duration, engine)
        self._histogram("step_requests", meter.step_requests, engine)
        self._histogram("step_tokens", meter.step_tokens, engine)
        for reason, times in meter.finished.items():
            self._value("requests_finished", times, engine, reason)
        for kind, tallies in (("adapter", meter.adapters), ("tenant", meter.tenants)):
            for name, tally in tallies.items():
                self._value(f"{kind}_requests", tally.requests, engine, name)
                self._value(f"{kind}_prompt_tokens", tally.prompt_tokens, engine, name)
                self._value(f"{kind}_output_tokens", tally.output_tokens, engine, name)

    def _add_admission(self, engine: str, admission: Admission) -> None:
        for reason, times in admission.refused.items():
            self._value("requests_refused", times, engine, reason)
        self._value("requests_delayed", admission.num_delayed, engine)

    def _add_adapters(self, engine: str, pool: AdapterPool) -> None:
        for name in ("loads", "reloads", "evictions"):
            self._value(f"adapter_{name}", getattr(pool, name), engine)
        infos = pool.infos()
        on_device = [info.bytes for info in infos if info.residency == "device"]
        self._value("adapter_device_bytes", sum(on_device), engine)
        for residency in get_args(Residency):
            self._value("adapters", sum(info.residency == residency for info in infos), engine, residency)

    def _value(self, name: str, value: float, *labels: str) -> None:
        self._by_name[name].add_metric(labels, value)

    def _histogram(self, name: str, histogram: Histogram, engine: str) -> None:
        counts = list(histogram.counts)  # of one moment; the sum may be a step older or newer
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        self._by_name[name].add_metric([engine], buckets, histogram.sum)
