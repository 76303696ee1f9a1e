"""Admission: which requests may wait, and when their tenants' quotas let them.

What a step computes, and for whom, is the scheduler's affair; this is the door before it.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence

from motet.errors import QueueFull, QuotaExceeded
from motet.params import TenantPolicy
from motet.runtime.places import Count, Place, TenantCount
from motet.runtime.request import Clock, Delta, Request
from motet.runtime.scheduler_output import NewRequest
from motet.runtime.tenants import Tenants
from motet.runtime.token_bucket import TokenBucket

NOW = float("-inf")
"""When those are due who wait for a quota that is no more."""


class Admission:
    """Counts what waits, for the engine and each tenant, against `max_waiting` and `max_waiting_tokens`, and charges
    quotas. Thread-safe.

    A quota is charged for a request's prompt when it lets the request through, which is given back if that never
    runs, and for every output token as it is made. A tenant's requests beyond its quota wait outside of the
    scheduler, or are refused where `TenantPolicy.max_waiting` has no place for them. They take no seat from others.
    """

    def __init__(
        self,
        tenants: Tenants,
        *,
        max_num_seqs: int,
        max_waiting: int | None,
        max_waiting_tokens: int | None,
        clock: Clock,
    ) -> None:
        self._tenants = tenants
        self._max_num_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._all = Count()
        self._by_name: dict[str, TenantCount] = {}
        """Those with live requests or a policy."""
        self._to_begin: dict[int, Place] = {}
        """By request, those whose prompt is known and that never ran."""
        self._dues: list[tuple[float, str]] = []
        """When to look at which tenant's queue, a heap; an entry that is not its `due` any more is passed over."""
        self.refused: Counter[str] = Counter(queue_full=0, quota_exceeded=0)
        """Requests that found no place, by why."""
        self.num_delayed = 0
        """Total of requests that had to wait for their quota."""

    # -- from any thread -------------------------------------------------------------------------------------

    def enter(self, tenant: str, num_outputs: int, num_prompt_tokens: int | None) -> Place:
        """A place for a request of n outputs. None: its prompt's length is told by `pay`.

        Raises QueueFull or QuotaExceeded.
        """
        with self._lock:
            now = self._clock()
            owner = self._of(tenant, now)
            try:
                place = Place(owner, num_outputs)
                self._check_requests()
                self._check_prompt(place, num_prompt_tokens or 1, now)
            except BaseException:
                self._forget_idle(owner)
                raise
            owner.live += num_outputs
            self._all.live += num_outputs
            if num_prompt_tokens is not None:
                self._know(place, num_prompt_tokens, now)
            return place

    def leave(self, place: Place) -> None:
        """Gives up the place of a request that the engine thread has never heard of."""
        with self._lock:
            self._end(place, place.num_outputs)

    def set_policy(self, tenant: str, policy: TenantPolicy) -> None:
        """Its quota holds at once, for what waits, too; what was used of the one before stays used."""
        with self._lock:
            self._tenants.set_policy(tenant, policy)
            now = self._clock()
            self._follow(self._of(tenant, now), policy, now)

    # -- on the engine thread --------------------------------------------------------------------------------

    def pay(self, request: Request) -> bool:
        """Whether a request whose prompt is known may go on. If not, `release` returns it some time.

        Raises QueueFull or QuotaExceeded if there is no place for a prompt of that length.
        """
        place = request.place
        assert place is not None
        with self._lock:
            now = self._clock()
            if place.num_prompt_tokens is None:
                self._check_prompt(place, request.num_prompt_tokens, now, known=True)
                self._know(place, request.num_prompt_tokens, now)
            self._to_begin[request.request_id] = place
            if place.is_delayed:
                insort(place.tenant.queue, request, key=_order)
                self._plan_release(place.tenant)
            return not place.is_delayed

    def release(self) -> list[Request]:
        """The delayed requests whose time has come."""
        if not self._dues:
            return []
        released: list[Request] = []
        with self._lock:
            now = self._clock()
            while self._dues and self._dues[0][0] <= now:
                due, name = heapq.heappop(self._dues)
                tenant = self._by_name.get(name)
                if tenant is not None and tenant.due == due:
                    tenant.due = None
                    released += self._release(tenant, now)
        return released

    @property
    def next_release(self) -> float | None:
        """When `release` must be asked again, on the clock's scale."""
        with self._lock:
            return self._dues[0][0] if self._dues else None

    def begin(self, requests: Sequence[NewRequest]) -> None:
        """These run, or run again."""
        if not requests:
            return
        with self._lock:
            for new in requests:
                place = self._to_begin.pop(new.request_id, None)
                if place is not None:
                    self._begin(place)

    def count(self, deltas: Sequence[Delta]) -> None:
        """What streams are about to be told: charges output tokens, and frees the places of what has ended."""
        with self._lock:
            now = self._clock()
            for delta in deltas:
                place = delta.request.place
                if place is not None and place.tenant.bucket is not None and delta.sample is not None:
                    place.tenant.bucket.take(1, now)
            for request in dict.fromkeys(delta.request for delta in deltas if delta.request.is_finished):
                if request.place is not None:
                    whole_group = bool(request.sibling_ids)  # it ended before it forked
                    self._end(request.place, request.place.num_outputs if whole_group else 1, request)

    # -- with the lock held ----------------------------------------------------------------------------------

    def _of(self, name: str, now: float) -> TenantCount:
        tenant = self._by_name.get(name)
        if tenant is None:
            tenant = self._by_name[name] = TenantCount(name=name)
            self._follow(tenant, self._tenants.policy(name), now)
        return tenant

    def _forget_idle(self, tenant: TenantCount) -> None:
        if not tenant.live and tenant.policy is None:
            self._by_name.pop(tenant.name, None)

    def _follow(self, tenant: TenantCount, policy: TenantPolicy | None, now: float) -> None:
        tenant.policy = policy
        rate = policy.tokens_per_second if policy is not None else None
        if policy is None or rate is None:
            tenant.bucket = None
        else:
            burst = rate if policy.burst is None else policy.burst
            if tenant.bucket is None:
                tenant.bucket = TokenBucket(rate, burst, now)
            else:
                tenant.bucket.change(rate, burst, now)
        self._plan_release(tenant)

    def _check_requests(self) -> None:
        """Raises QueueFull if the engine takes no more requests, whosesoever."""
        bound = self._max_waiting
        if bound is not None and self._all.live - self._max_num_seqs >= bound:
            raise self._queue_full(
                self._all,
                f"the engine's queue is full: beside the requests that run (max_num_seqs, {self._max_num_seqs}) "
                f"EngineConfig.max_waiting ({bound}) may wait",
            )

    def _check_prompt(self, place: Place, num_tokens: int, now: float, *, known: bool = False) -> None:
        """Raises QueueFull or QuotaExceeded if the engine or the tenant has no place for such a prompt.

        `known`: whether the request has its place, which others may have filled up since.
        """
        if _is_too_long(self._all, num_tokens, self._max_waiting_tokens):
            raise self._queue_full(
                self._all,
                f"the engine's queue has no place for a prompt of {num_tokens} tokens: together those that wait may "
                f"have EngineConfig.max_waiting_tokens ({self._max_waiting_tokens})",
            )
        tenant, policy = place.tenant, place.tenant.policy
        if policy is None:
            return
        bucket = tenant.bucket if self._must_wait(tenant, num_tokens, now) else None
        waiting = self._num_waiting(tenant, place.num_outputs if known else 0, is_delayed=bucket is not None)
        is_full = policy.max_waiting is not None and waiting >= policy.max_waiting
        is_too_long = _is_too_long(tenant, num_tokens, policy.max_waiting_tokens)
        if bucket is not None and (is_full or is_too_long):
            self.refused["quota_exceeded"] += 1
            retry_after = max(0.0, bucket.due(num_tokens, behind=tenant.delayed_tokens) - now)
            raise QuotaExceeded(
                f"tenant {tenant.name!r} has used up its quota (tokens_per_second {bucket.rate:g}, burst "
                f"{bucket.burst:g}), and as many of its requests wait as may (max_waiting {policy.max_waiting}, "
                f"max_waiting_tokens {policy.max_waiting_tokens}): try again in {retry_after:.1f} s",
                retry_after=retry_after,
            )
        if is_full and not known:
            raise self._queue_full(
                tenant,
                f"{max(0, waiting)} requests of tenant {tenant.name!r} wait, as many as its "
                f"TenantPolicy.max_waiting ({policy.max_waiting}) allows",
            )
        if is_too_long:
            raise self._queue_full(
                tenant,
                f"the prompts of tenant {tenant.name!r} that wait have {tenant.waiting_tokens} tokens, so there is "
                f"no place for {num_tokens} more: its TenantPolicy.max_waiting_tokens is {policy.max_waiting_tokens}",
            )

    def _queue_full(self, count: Count, what: str) -> QueueFull:
        self.refused["queue_full"] += 1
        retry_after = count.ends.seconds
        return QueueFull(f"{what}; try again in {retry_after:.1f} s", retry_after=retry_after)

    def _must_wait(self, tenant: TenantCount, num_tokens: int, now: float) -> bool:
        bucket = tenant.bucket
        return bucket is not None and (tenant.delayed > 0 or bucket.due(num_tokens) > now)

    def _num_waiting(self, tenant: TenantCount, num_own: int, *, is_delayed: bool) -> int:
        """How many of a tenant's outputs have no seat, but for `num_own`; negative where seats are free.

        Delayed ones have none. A free seat is of no use to a newcomer that is delayed, too.
        """
        others = (self._all.live - self._all.delayed) - (tenant.live - tenant.delayed)
        seats = self._max_num_seqs - others
        if tenant.policy is not None and tenant.policy.max_running is not None:
            seats = min(seats, tenant.policy.max_running)
        seatless = tenant.live - num_own - tenant.delayed - max(seats, tenant.running)
        return tenant.delayed + (max(0, seatless) if is_delayed else seatless)

    def _know(self, place: Place, num_prompt_tokens: int, now: float) -> None:
        """Charges the quota, or has the request wait for it."""
        tenant = place.tenant
        place.num_prompt_tokens = num_prompt_tokens
        tenant.waiting_tokens += num_prompt_tokens
        self._all.waiting_tokens += num_prompt_tokens
        if self._must_wait(tenant, num_prompt_tokens, now):
            self.num_delayed += 1
            self._set_delayed(place, True)
        else:
            self._charge(place, now)

    def _charge(self, place: Place, now: float) -> None:
        if place.tenant.bucket is not None:
            assert place.num_prompt_tokens is not None
            place.num_charged = place.num_prompt_tokens
            place.tenant.bucket.take(place.num_charged, now)

    def _set_delayed(self, place: Place, is_delayed: bool) -> None:
        assert place.num_prompt_tokens is not None and place.is_delayed != is_delayed
        place.is_delayed = is_delayed
        sign = 1 if is_delayed else -1
        place.tenant.delayed += sign * place.num_outputs
        self._all.delayed += sign * place.num_outputs
        place.tenant.delayed_tokens += sign * place.num_prompt_tokens

    def _release(self, tenant: TenantCount, now: float) -> list[Request]:
        """Takes from a tenant's queue those that its quota has tokens for."""
        released = []
        while tenant.queue and (tenant.bucket is None or tenant.bucket.due(_length(tenant.queue[0])) <= now):
            request = tenant.queue.pop(0)
            assert request.place is not None
            self._set_delayed(request.place, False)
            self._charge(request.place, now)
            released.append(request)
        self._plan_release(tenant)
        return released

    def _plan_release(self, tenant: TenantCount) -> None:
        """Sees to it that `release` looks at the tenant when the first of its queue is due, or earlier."""
        if tenant.queue:
            due = NOW if tenant.bucket is None else tenant.bucket.due(_length(tenant.queue[0]))
            if tenant.due is None or due < tenant.due:
                tenant.due = due
                heapq.heappush(self._dues, (due, tenant.name))

    def _begin(self, place: Place) -> None:
        assert place.num_prompt_tokens is not None and not place.is_delayed
        place.has_begun = True
        for count in (self._all, place.tenant):
            count.running += place.num_outputs
            count.waiting_tokens -= place.num_prompt_tokens

    def _end(self, place: Place, num_outputs: int, request: Request | None = None) -> None:
        """So many of its outputs have ended; with the last the place is free."""
        tenant = place.tenant
        is_over = 0 < place.num_outputs == num_outputs
        if is_over and not place.has_begun:
            self._undo_wait(place, request)
        place.num_outputs -= num_outputs
        for count in (self._all, tenant):
            count.live -= num_outputs
            count.running -= num_outputs if place.has_begun else 0
            if is_over:
                count.ends.tick(self._clock())
        self._forget_idle(tenant)

    def _undo_wait(self, place: Place, request: Request | None) -> None:
        """Of a request that ends without having run: its prompt has cost nothing."""
        tenant = place.tenant
        if request is not None:
            self._to_begin.pop(request.request_id, None)
        for count in (self._all, tenant):
            count.waiting_tokens -= place.num_prompt_tokens or 0
        if place.is_delayed:
            self._set_delayed(place, False)
            i = bisect_left(tenant.queue, _order(request), key=_order) if request is not None else 0
            if request is not None and tenant.queue[i : i + 1] == [request]:
                del tenant.queue[i]
        elif tenant.bucket is not None:
            tenant.bucket.give_back(place.num_charged)
        self._plan_release(tenant)

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        with self._lock:
            for what in ("live", "running", "delayed", "waiting_tokens"):
                total = sum(getattr(tenant, what) for tenant in self._by_name.values())
                assert getattr(self._all, what) == total, what
            for tenant in self._by_name.values():
                assert tenant.live or tenant.policy is not None, "an idle tenant is kept"
                assert min(tenant.running, tenant.delayed, tenant.waiting_tokens, tenant.delayed_tokens) >= 0
                assert tenant.running + tenant.delayed <= tenant.live
                assert tenant.delayed_tokens <= tenant.waiting_tokens
                assert tenant.queue == sorted(tenant.queue, key=_order)
                assert tenant.due is not None or not tenant.queue, "nobody will look at the queue"
                assert all(request.place and request.place.is_delayed for request in tenant.queue)
                assert tenant.due is None or (tenant.due, tenant.name) in self._dues


def _order(request: Request) -> tuple[int, int]:
    return -request.priority, request.request_id


def _length(request: Request) -> int:
    return request.num_prompt_tokens


def _is_too_long(count: Count, num_tokens: int, bound: int | None) -> bool:
    """Whether a prompt has no place behind those that wait. Where none waits there is one for any."""
    return bound is not None and count.waiting_tokens > 0 and count.waiting_tokens + num_tokens > bound
