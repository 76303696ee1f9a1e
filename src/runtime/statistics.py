"""What an engine knows about itself, as a frozen snapshot."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from motet.runtime.request import Clock, Delta, Request
from motet.runtime.scheduler import Scheduler

RATE_WINDOW = 5.0
"""Seconds over which rates are taken."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine after a step. Counts are of live requests unless they say total."""

    running: int = 0
    """Each of a request's n outputs counts, here and among the waiting."""
    waiting: int = 0
    """Preempted ones included."""
    blocked: int = 0
    """Waiting for something named: their prompt's tokens, their adapter, their tenant's quota."""
    preemptions: int = 0
    """Total since the start."""
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    """Held by requests."""
    kv_blocks_cached: int = 0
    """Held by none, content kept for an equal prefix."""
    prefix_hit_tokens: int = 0
    """Total prompt tokens that came from the prefix cache."""
    prefix_query_tokens: int = 0
    """Total prompt tokens of the requests that ran."""
    tokens_per_second: float = 0.0
    """Output tokens of all requests, over the last seconds."""
    seconds_per_request: float = 1.0
    """Time between two ends of requests, over the last ones."""
    per_adapter: Mapping[str, int] = field(default_factory=dict)
    """Live requests by adapter name; those without an adapter under ""."""
    per_tenant: Mapping[str, int] = field(default_factory=dict)
    """Live requests by tenant."""
    backend: str = ""
    """Which kernels compute: "reference", or "cpu" with its build and the quantization, as `cpu (avx2, int8)`."""


class Pace:
    """How far events lie apart, over the last ones."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=32)

    def tick(self, now: float) -> None:
        """One more of them."""
        self._times.append(now)

    @property
    def seconds(self) -> float:
        """Between two of them; 1 while that is unknown."""
        if len(self._times) < 2:
            return 1.0
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)


class StatisticsKeeper:
    """Counts what cannot be read off the scheduler. The engine thread owns it."""

    def __init__(self, scheduler: Scheduler, backend: str = "", *, clock: Clock = time.monotonic) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._clock = clock
        self._tokens: deque[tuple[float, int]] = deque()
        self._num_tokens = 0  # their sum: adding them up anew in each step would show
        self._ends = Pace()
        self._per_adapter: Counter[str] = Counter()
        self._per_tenant: Counter[str] = Counter()

    def enter(self, request: Request) -> None:
        self._per_adapter[request.adapter_name] += 1
        self._per_tenant[request.tenant] += 1

    def leave(self, request: Request) -> None:
        self._ends.tick(self._clock())
        for counter, key in ((self._per_adapter, request.adapter_name), (self._per_tenant, request.tenant)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]

    def count(self, deltas: Sequence[Delta]) -> None:
        num_tokens = sum(delta.sample is not None for delta in deltas)
        self._tokens.append((self._clock(), num_tokens))
        self._num_tokens += num_tokens

    def snapshot(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._scheduler.kv.pool
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            blocked=scheduler.num_blocked,
            preemptions=scheduler.num_preemptions,
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_blocks - pool.num_free,
            kv_blocks_cached=pool.num_cached,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            tokens_per_second=self._rate(),
            seconds_per_request=self._ends.seconds,
            per_adapter=dict(self._per_adapter),
            per_tenant=dict(self._per_tenant),
            backend=self._backend,
        )

    def _rate(self) -> float:
        if not self._per_tenant:  # idle: what was, says nothing about now
            self._tokens.clear()
            self._num_tokens = 0
            return 0.0
        now = self._clock()
        while self._tokens and self._tokens[0][0] < now - RATE_WINDOW:
            self._num_tokens -= self._tokens.popleft()[1]
        if not self._tokens or self._tokens[0][0] == self._tokens[-1][0]:
            return 0.0
        (first, before), (last, _) = self._tokens[0], self._tokens[-1]
        return (self._num_tokens - before) / (last - first)
