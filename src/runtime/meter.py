"""Meter: what an engine has done since it started, as plain numbers that whoever asks may read. Knows no torch."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from motet.runtime.request import Clock, Delta, FinishReason, Request
from motet.runtime.scheduler_output import SchedulerOutput
from motet.runtime.statistics import EngineStats

STEP_SECONDS = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Bucket bounds for what takes about a step: fine between a GPU's millisecond and a CPU's tenth of a second."""

REQUEST_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Bucket bounds for what a request waits for: under a millisecond to ten minutes."""

POWERS = tuple(float(1 << n) for n in range(15))
"""Bucket bounds for counts: 1 to 16384."""

OTHER = "other"
"""The name under which all are counted that come when there are as many names as there may be."""


class Histogram:
    """How often a value fell into each bucket. One thread adds; any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        """The largest value of each bucket, ascending; one more bucket takes what is above them all."""
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass(slots=True)
class Tally:
    """What one adapter, or one tenant, has had."""

    requests: int = 0
    """Ended, in whatever way."""
    prompt_tokens: int = 0
    output_tokens: int = 0


class Tallies:
    """A tally by name, for so many names as come first; all others share the one of `OTHER`.

    The empty name stands for no name and is not counted as one.
    """

    def __init__(self, most_names: int) -> None:
        self._most_names = most_names
        self._by_name: dict[str, Tally] = {}

    def of(self, name: str) -> Tally:
        tally = self._by_name.get(name)
        if tally is None:
            has_room = len(self._by_name.keys() - {"", OTHER}) < self._most_names
            tally = self._by_name.setdefault(name if has_room or not name else OTHER, Tally())
        return tally

    def items(self) -> list[tuple[str, Tally]]:
        return list(self._by_name.items())


@dataclass(slots=True)
class _Live:
    """What is kept of a request until its end is told."""

    adapter: Tally
    tenant: Tally
    has_run: bool = False
    last_token: float | None = None
    """When it came; None before the first."""


@dataclass(slots=True)
class Meter:
    """The engine thread counts here what it tells the streams, before they hear of it.

    Each of the n outputs of a request counts as one; their common prompt counts once.

    Any other thread may read at any time: every number is replaced by a later one, none is ever taken back.
    It holds nothing of the engine, and so may be kept when that is gone.
    """

    most_names: int
    """Adapters, and tenants, with numbers of their own (`EngineConfig.max_metric_adapters`)."""
    clock: Clock = time.monotonic
    statistics: EngineStats = field(default_factory=EngineStats)
    """After the last step. Frozen."""

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    """From the call until it first ran, of requests that did."""
    request_duration: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    """From the call to the end, whatever that was."""
    step_duration: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    step_requests: Histogram = field(default_factory=lambda: Histogram(POWERS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(POWERS))
    prompt_tokens: int = 0
    """Of requests that ran, those from the prefix cache included."""
    output_tokens: int = 0
    finished: Counter[str] = field(
        default_factory=lambda: Counter({reason.value: 0 for reason in FinishReason})
    )
    """Ended requests by `FinishReason`."""
    adapters: Tallies = field(init=False)
    """By name; the base model under ""."""
    tenants: Tallies = field(init=False)
    _live: dict[int, _Live] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adapters = Tallies(self.most_names)
        self.tenants = Tallies(self.most_names)

    def enter(self, request: Request) -> _Live:
        """A request is taken in. Its siblings, which it forks later, enter with their first token or their end."""
        live = _Live(self.adapters.of(request.adapter_name), self.tenants.of(request.tenant))
        self._live[request.request_id] = live
        return live

    def step(self, plan: SchedulerOutput, seconds: float) -> None:
        """A step was done, and took so long."""
        self.step_duration.observe(seconds)
        self.step_requests.observe(len(plan.chunks))
        self.step_tokens.observe(sum([len(chunk.token_ids) for chunk in plan.chunks]))

    def count(self, deltas: Sequence[Delta]) -> None:
        """What streams are about to be told. The tokens of one step come at one time."""
        now = self.clock()
        waits: dict[float, int] = {}  # most tokens of a step follow those of the step before it
        for delta in deltas:
            live = self._live.get(delta.request.request_id) or self.enter(delta.request)
            if delta.sample is None:
                continue
            live.adapter.output_tokens += 1
            live.tenant.output_tokens += 1
            self.output_tokens += 1
            if live.last_token is None:
                self._count_first(delta.request, live)
            else:
                waits[live.last_token] = waits.get(live.last_token, 0) + 1
            live.last_token = now
        for before, num_tokens in waits.items():
            self.inter_token_latency.observe(now - before, num_tokens)
        for delta in deltas:
            if delta.request.is_finished and (ended := self._live.pop(delta.request.request_id, None)):
                self._count_end(delta.request, ended)

    def _count_first(self, request: Request, live: _Live) -> None:
        assert request.first_token_time is not None
        self.time_to_first_token.observe(request.first_token_time - request.arrival_time)
        self._count_prompt(request, live)

    def _count_prompt(self, request: Request, live: _Live) -> None:
        first_run = request.first_run_time
        if first_run is None or live.has_run:
            return
        live.has_run = True
        self.queue_time.observe(first_run - request.arrival_time)
        if request.index > 0:
            return
        self.prompt_tokens += request.num_prompt_tokens
        live.adapter.prompt_tokens += request.num_prompt_tokens
        live.tenant.prompt_tokens += request.num_prompt_tokens

    def _count_end(self, request: Request, live: _Live) -> None:
        assert request.finish_reason is not None
        self._count_prompt(request, live)  # of one that ends without a token
        self.finished[request.finish_reason.value] += 1
        live.adapter.requests += 1
        live.tenant.requests += 1
        self.request_duration.observe(request.timeline[-1][1] - request.arrival_time)
