"""Sends the workloads to an engine that streams on an event loop, and reports what its callers saw."""

from __future__ import annotations

import asyncio
import statistics
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.common import (
    Request,
    Timing,
    batch_figures,
    latency_figures,
    medians,
    percentile,
    read_workload,
    report,
    report_startup,
    single_figures,
)

Send = Callable[[Request], Awaitable[Timing]]
"""Sends one request and waits for all of its tokens."""

Prepare = Callable[[Sequence[Request]], Awaitable[None]]
"""What a workload needs beforehand: its adapters."""

LAG_EVERY = 0.001
SHARE_OF_SATURATION = 0.6


async def drive(arguments: Namespace, send: Send, prepare: Prepare | None = None) -> None:
    """Warms the engine up, then runs `arguments.loads` one after the other (see `workloads.py`)."""
    warm = read_workload(arguments.workloads, "warm")
    report_startup(arguments.name, (await send(warm[0])).tokens[0])
    await asyncio.gather(*[send(request) for request in warm])
    rate = arguments.rate
    for load in arguments.loads:
        requests = read_workload(arguments.workloads, load)
        if prepare is not None:
            await prepare(requests)
        if load == "w1":
            figures = medians([single_figures(await send(request)) for request in requests])
        elif load == "w5":
            if rate is None:
                raise SystemExit("w5 needs --rate, or w2 before it to take a rate from")
            figures = await over_time(requests, send, rate, arguments.seconds)
        else:
            figures = await at_once(requests, send)
        if load == "w2" and arguments.rate is None:
            rate = unsaturated(figures["tokens_per_s"], read_workload(arguments.workloads, "w5"))
        report(arguments.name, load, **figures)


def unsaturated(tokens_per_s: float, requests: Sequence[Request]) -> float:
    """Requests a second that leave an engine of this speed some room."""
    return SHARE_OF_SATURATION * tokens_per_s / statistics.mean(request.max_tokens for request in requests)


async def at_once(requests: Sequence[Request], send: Send) -> dict[str, float]:
    started = time.perf_counter()
    timings, lag = await with_lag(asyncio.gather(*[send(request) for request in requests]))
    seconds = time.perf_counter() - started
    return {**batch_figures(requests, seconds), **latency_figures(timings), **lag}


async def over_time(requests: Sequence[Request], send: Send, rate: float, seconds: float) -> dict[str, float]:
    """Requests arrive at `rate` a second on average, for `seconds`; what each waits counts from its due time."""
    started = time.perf_counter()
    arrivals: list[tuple[float, Request]] = []
    due = started
    for request in requests:
        assert request.gap is not None
        due += request.gap / rate
        if due > started + seconds:
            break
        arrivals.append((due, request))

    async def send_when_due(due: float, request: Request) -> Timing:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return Timing(due, (await send(request)).tokens)

    timings, lag = await with_lag(asyncio.gather(*[send_when_due(*arrival) for arrival in arrivals]))
    took = time.perf_counter() - started
    sent = [request for _, request in arrivals]
    return {"rate": rate, **batch_figures(sent, took), **latency_figures(timings), **lag}


async def with_lag(work: Awaitable[list[Timing]]) -> tuple[list[Timing], dict[str, float]]:
    """Waits for `work`, and meanwhile watches how late the event loop wakes a sleeper up."""
    lags = [0.0]

    async def watch() -> None:
        while True:
            slept = time.perf_counter()
            await asyncio.sleep(LAG_EVERY)
            lags.append(time.perf_counter() - slept - LAG_EVERY)

    watching = asyncio.create_task(watch())
    try:
        timings = await work
    finally:
        watching.cancel()
    return timings, {
        "lag_p50_ms": 1e3 * percentile(lags, 50),
        "lag_p99_ms": 1e3 * percentile(lags, 99),
        "lag_max_ms": 1e3 * max(lags),
    }
