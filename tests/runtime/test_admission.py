"""The door: how much may wait, and whom a quota delays or refuses. By a virtual clock, beside a model of it."""

from __future__ import annotations

import pytest
from fakes import FakeClock, make_request
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from motet.errors import QueueFull, QuotaExceeded
from motet.params import TenantPolicy
from motet.runtime.admission import Admission
from motet.runtime.request import Delta, FinishReason, Request, RequestStatus
from motet.runtime.scheduler_output import NewRequest, Sample
from motet.runtime.tenants import Tenants
from strategies import FEW, MANY


class House:
    """An admission, and what the engine does with it."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 2,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        **policies: TenantPolicy,
    ) -> None:
        self.clock = FakeClock()
        self.admission = Admission(
            Tenants(),
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            clock=self.clock,
        )
        for tenant, policy in policies.items():
            self.admission.set_policy(tenant, policy)
        self.num_ids = 0

    def enter(
        self, tenant: str = "x", length: int = 1, *, n: int = 1, text: bool = False, priority: int = 0
    ) -> Request:
        """A request that the engine thread has not heard of yet."""
        place = self.admission.enter(tenant, n, None if text else length)
        request = make_request(
            [1] * length,
            request_id=self.num_ids,
            tenant=tenant,
            n=n,
            priority=priority,
            place=place,
            clock=self.clock,
            max_tokens=100,
        )
        self.num_ids += n
        return request

    def add(self, tenant: str = "x", length: int = 1, **more) -> tuple[Request, bool]:
        """A request, and whether it may go on at once."""
        request = self.enter(tenant, length, **more)
        return request, self.admission.pay(request)

    def run(self, request: Request) -> None:
        request.move_to(RequestStatus.WAITING)
        request.move_to(RequestStatus.RUNNING)
        self.admission.begin([NewRequest(request.request_id, -1, request.sampling)])

    def produce(self, *requests: Request, times: int = 1) -> None:
        self.admission.count([Delta(r, Sample(5)) for r in requests for _ in range(times)])

    def end(self, *requests: Request) -> None:
        for request in requests:
            request.finish_reason = FinishReason.ABORT
            request.status = RequestStatus.FINISHED
        self.admission.count([Delta(request, None) for request in requests])

    def wait(self, seconds: float) -> list[Request]:
        self.clock.now += seconds
        return self.admission.release()


def quota(rate: float = 10.0, burst: int | None = 20, **more) -> TenantPolicy:
    return TenantPolicy(tokens_per_second=rate, burst=burst, **more)


# -- places ----------------------------------------------------------------------------------------------


def test_the_engine_takes_as_many_as_may_run_and_wait():
    house = House(max_num_seqs=2, max_waiting=1)
    first, *_ = [house.add(tenant)[0] for tenant in "xyz"]
    with pytest.raises(QueueFull, match=r"EngineConfig.max_waiting \(1\)") as caught:
        house.enter("w")
    assert caught.value.retry_after == 1.0, "nothing is known yet"
    house.run(first)
    with pytest.raises(QueueFull):
        house.enter("w")
    house.end(first)
    house.enter("w")
    assert house.admission.refused == {"queue_full": 2, "quota_exceeded": 0}


def test_a_full_queue_says_how_soon_requests_end():
    house = House(max_num_seqs=1, max_waiting=2)
    requests = [house.add()[0] for _ in range(3)]
    for request in requests:
        house.clock.now += 4.0
        house.end(request)
    for _ in range(3):
        house.enter()
    with pytest.raises(QueueFull, match=r"try again in 4.0 s") as caught:
        house.enter()
    assert caught.value.retry_after == 4.0


def test_prompts_that_wait_have_a_bound_in_tokens_and_an_empty_queue_takes_any():
    house = House(max_num_seqs=64, max_waiting_tokens=100)
    long, _ = house.add(length=500)
    with pytest.raises(QueueFull, match=r"prompt of 1 tokens.*max_waiting_tokens \(100\)"):
        house.enter(length=1)
    house.run(long)
    house.add(length=60)
    house.add(length=40)
    with pytest.raises(QueueFull):
        house.enter("y", text=True)


def test_a_text_is_refused_when_its_tokens_are_known():
    house = House(max_num_seqs=64, max_waiting_tokens=100)
    house.add(length=60)
    text = house.enter(length=50, text=True)
    with pytest.raises(QueueFull, match="prompt of 50 tokens"):
        house.admission.pay(text)
    house.end(text)
    assert house.add(length=40, text=True)[1]
    house.admission.check_integrity()


def test_a_tenants_requests_wait_up_to_its_bound_where_others_have_the_seats():
    house = House(max_num_seqs=2, x=TenantPolicy(max_waiting=1))
    others = [house.add("y")[0] for _ in range(5)]
    house.add("x")
    with pytest.raises(QueueFull, match=r"1 requests of tenant 'x' wait.*max_waiting \(1\)"):
        house.enter("x")
    house.add("y")
    house.end(*others)
    house.enter("x")  # one seat is y's


def test_requests_that_find_a_free_seat_do_not_count_as_waiting():
    house = House(max_num_seqs=4, x=TenantPolicy(max_waiting=0))
    requests = [house.enter("x") for _ in range(4)]
    with pytest.raises(QueueFull, match="0 requests of tenant 'x' wait"):
        house.enter("x")
    house.admission.leave(requests[0].place)
    house.enter("x")


def test_a_tenants_seats_are_no_more_than_may_run():
    house = House(max_num_seqs=4, x=TenantPolicy(max_waiting=1, max_running=2))
    for _ in range(3):
        house.enter("x")
    with pytest.raises(QueueFull):
        house.enter("x")


def test_every_output_of_a_request_takes_a_place_and_gives_it_back():
    house = House(max_num_seqs=4, max_waiting=0)
    first, _ = house.add(n=3)
    house.add(n=8)
    with pytest.raises(QueueFull):
        house.enter()
    house.run(first)
    siblings = first.fork()
    house.end(siblings[0])
    house.end(first, siblings[1])
    with pytest.raises(QueueFull):
        house.enter()
    house.admission.check_integrity()


def test_a_tenants_prompts_have_a_bound_of_their_own():
    house = House(max_num_seqs=64, x=TenantPolicy(max_waiting_tokens=50))
    house.add("y", 500)
    house.add("x", 40)
    with pytest.raises(QueueFull, match=r"tenant 'x'.*40 tokens.*11 more.*max_waiting_tokens is 50"):
        house.enter("x", 11)
    house.add("y", 500)


def test_what_is_refused_leaves_nothing_behind():
    house = House(max_num_seqs=1, max_waiting=0)
    house.enter("y")
    with pytest.raises(QueueFull):
        house.enter("x")
    assert set(house.admission._by_name) == {"y"}
    house.admission.check_integrity()


# -- quotas ----------------------------------------------------------------------------------------------


def test_a_quota_lets_a_burst_through_and_then_a_rate():
    house = House(x=quota(rate=10.0, burst=20))
    requests = [house.add(length=10) for _ in range(5)]
    assert [through for _, through in requests] == [True, True, False, False, False]
    assert house.admission.next_release == 1.0
    assert house.wait(0.99) == []
    assert house.wait(0.01) == [requests[2][0]]
    assert house.wait(5.0) == [requests[3][0], requests[4][0]]
    assert house.admission.num_delayed == 3


def test_a_delayed_tenant_delays_nobody_else():
    house = House(max_num_seqs=3, x=quota(), y=TenantPolicy(max_waiting=0))
    for _ in range(50):
        house.add("x", 20)
    assert house.add("y", 20)[1] and house.add("y", 20)[1], "what is delayed has no seat"


def test_a_prompt_longer_than_the_burst_goes_when_the_bucket_is_full():
    house = House(x=quota(rate=10.0, burst=20))
    house.add(length=5)
    request, through = house.add(length=1000)
    assert not through and house.wait(0.5) == [request]
    assert not house.add(length=1)[1]
    assert house.wait(98.0) == [] and len(house.wait(0.2)) == 1


def test_output_tokens_are_charged_as_they_come_for_every_output():
    house = House(x=quota(rate=10.0, burst=20))
    first, _ = house.add(length=20, n=2)
    house.run(first)
    (second,) = first.fork()
    house.produce(first, second, times=15)
    late, through = house.add(length=10)
    assert not through
    assert house.wait(3.9) == [] and house.wait(0.1) == [late], "30 that it owes, and 10"


def test_output_tokens_that_come_while_others_wait_have_them_wait_longer():
    house = House(x=quota(rate=10.0, burst=20))
    first, _ = house.add(length=20)
    late, _ = house.add(length=10)
    house.run(first)
    house.produce(first, times=10)
    assert house.wait(1.0) == [] and house.admission.next_release == pytest.approx(2.0)
    assert house.wait(1.01) == [late]


def test_what_never_ran_has_cost_nothing():
    house = House(x=quota(rate=10.0, burst=20))
    first, _ = house.add(length=20)
    late, through = house.add(length=20)
    assert not through
    house.end(first)
    assert house.wait(0.0) == [late]
    unheard = House(x=quota())
    unheard.admission.leave(unheard.enter(length=20).place)
    assert unheard.add(length=20)[1]


def test_a_delayed_request_that_ends_makes_way_for_the_next():
    house = House(x=quota(rate=10.0, burst=20))
    house.add(length=20)
    long, _ = house.add(length=20)
    short, _ = house.add(length=1)
    house.end(long)
    house.admission.check_integrity()
    assert house.wait(0.09) == [] and house.wait(0.02) == [short]


def test_a_tenants_own_priorities_hold_among_its_delayed_ones():
    house = House(x=quota(rate=10.0, burst=20))
    house.add(length=20)
    low, _ = house.add(length=10)
    high, _ = house.add(length=10, priority=1)
    assert house.wait(1.0) == [high] and house.wait(1.0) == [low]


def test_beyond_its_queue_a_quota_refuses_and_says_when_to_come_back():
    house = House(max_num_seqs=64, x=quota(rate=10.0, burst=20, max_waiting=1))
    house.add(length=20)
    house.add(length=15)
    with pytest.raises(
        QuotaExceeded, match=r"tenant 'x'.*tokens_per_second 10, burst 20.*max_waiting 1"
    ) as caught:
        house.enter(length=5)
    assert caught.value.retry_after == pytest.approx(2.0)
    assert house.admission.refused == {"queue_full": 0, "quota_exceeded": 1}
    house.wait(caught.value.retry_after)
    assert house.add(length=5)[1]


def test_without_a_queue_whatever_the_quota_cannot_take_now_is_refused():
    house = House(max_num_seqs=64, x=quota(rate=10.0, burst=20, max_waiting=0))
    house.add(length=20)
    for text in (False, True):
        with pytest.raises(QuotaExceeded):
            house.enter(length=5, text=text)
    house.wait(0.4)
    text = house.enter(length=5, text=True)
    with pytest.raises(QuotaExceeded):
        house.admission.pay(text)
    house.end(text)
    house.wait(0.1)
    assert house.add(length=5, text=True)[1]


def test_calls_in_a_row_are_charged_before_the_engine_hears_of_them():
    house = House(max_num_seqs=64, x=quota(rate=10.0, burst=20, max_waiting=1))
    requests = [house.enter(length=10) for _ in range(3)]
    with pytest.raises(QuotaExceeded):
        house.enter(length=10)
    assert [house.admission.pay(request) for request in requests] == [True, True, False]


def test_a_new_quota_holds_for_what_waits():
    house = House(x=quota(rate=1.0, burst=20))
    house.add(length=20)
    waiting = [house.add(length=20)[0] for _ in range(3)]
    house.admission.set_policy("x", quota(rate=20.0, burst=20))
    assert house.admission.next_release == 1.0
    assert house.wait(1.0) == waiting[:1], "sooner than it was"
    house.admission.set_policy("x", TenantPolicy())
    assert house.wait(0.0) == waiting[1:], "and without a quota at once"
    assert house.add(length=1000)[1]
    house.admission.set_policy("x", quota(rate=1.0, burst=20))
    assert house.add(length=20)[1] and not house.add(length=1)[1]


def test_a_policy_counts_the_requests_that_were_there_before_it():
    house = House(max_num_seqs=1)
    for _ in range(3):
        house.add("x")
    house.admission.set_policy("x", TenantPolicy(max_waiting=2))
    with pytest.raises(QueueFull):
        house.enter("x")


def test_a_thousand_cancelled_requests_leave_no_trace():
    house = House(x=quota(rate=0.001, burst=20))
    house.add(length=20)
    for i in range(1000):
        house.end(house.add(length=1 + i % 7)[0])
    assert len(house.admission._dues) < 20 and not house.admission._to_begin.keys() - {0}
    house.admission.check_integrity()


# -- everything at once ------------------------------------------------------------------------------------


class AdmissionMachine(RuleBasedStateMachine):
    """No quota is passed, nobody is forgotten, everything is given back."""

    @initialize(
        max_num_seqs=st.integers(1, 4),
        max_waiting=st.sampled_from([None, 0, 3]),
        max_waiting_tokens=st.sampled_from([None, 30]),
        rate=st.sampled_from([0.5, 5.0]),
        burst=st.sampled_from([None, 10]),
        tenant_waiting=st.sampled_from([None, 0, 2]),
        tenant_tokens=st.sampled_from([None, 20]),
    )
    def make(
        self,
        max_num_seqs: int,
        max_waiting: int | None,
        max_waiting_tokens: int | None,
        rate: float,
        burst: int | None,
        tenant_waiting: int | None,
        tenant_tokens: int | None,
    ) -> None:
        self.policy = quota(rate, burst, max_waiting=tenant_waiting, max_waiting_tokens=tenant_tokens)
        self.burst = burst or rate
        self.house = House(
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            x=self.policy,
        )
        self.entered: list[Request] = []
        self.delayed: list[Request] = []
        self.ready: list[Request] = []
        self.running: list[Request] = []
        self.last: tuple[str, Request] | None = None

    @rule(
        tenant=st.sampled_from("xxxy"),
        length=st.integers(1, 15),
        n=st.sampled_from([1, 1, 3]),
        text=st.booleans(),
        priority=st.integers(0, 1),
    )
    def enter(self, tenant: str, length: int, n: int, text: bool, priority: int) -> None:
        try:
            self.entered.append(self.house.enter(tenant, length, n=n, text=text, priority=priority))
        except (QueueFull, QuotaExceeded) as error:
            refusal = error
        else:
            return
        assert refusal.retry_after >= 0.0
        is_strict = tenant == "x" and self.policy.max_waiting == 0
        assert is_strict or self.groups(), "an empty house takes anybody"

    @precondition(lambda self: self.entered)
    @rule()
    def pay(self) -> None:
        request = self.entered.pop(0)
        try:
            (self.ready if self.house.admission.pay(request) else self.delayed).append(request)
        except (QueueFull, QuotaExceeded):
            self.house.end(request)

    @precondition(lambda self: self.entered)
    @rule()
    def fall_through(self) -> None:
        self.house.admission.leave(self.entered.pop().place)

    @precondition(lambda self: self.ready)
    @rule()
    def run(self) -> None:
        request = self.ready.pop(0)
        self.house.run(request)
        self.running += [request, *request.fork()]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def produce(self, data: st.DataObject) -> None:
        self.house.produce(*data.draw(st.lists(st.sampled_from(self.running))))

    @precondition(lambda self: self.delayed + self.ready + self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.delayed + self.ready + self.running))
        for group in (self.delayed, self.ready, self.running):
            if request in group:
                group.remove(request)
        self.house.end(request)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.take(self.house.wait(seconds))
        due = self.house.admission.next_release
        assert due is None or due > self.house.clock.now, "all that are due came"

    @rule()
    def wait_for_the_next(self) -> None:
        """Whoever is delayed comes in finite time, without anybody else doing anything."""
        for _ in range(200):
            due = self.house.admission.next_release
            if due is None:
                break
            self.take(self.house.wait(max(0.0, due - self.house.clock.now)))
        assert not self.delayed

    @rule(rate=st.sampled_from([None, 0.5, 5.0, 50.0]), burst=st.sampled_from([1, 10]))
    def set_policy(self, rate: float | None, burst: int) -> None:
        limits = {} if rate is None else {"tokens_per_second": rate, "burst": burst}
        self.policy = TenantPolicy(max_waiting=self.policy.max_waiting, **limits)
        self.house.admission.set_policy("x", self.policy)

    def take(self, released: list[Request]) -> None:
        for request in released:
            self.delayed.remove(request)
            self.ready.append(request)

    @invariant()
    def holds_together(self) -> None:
        admission = self.house.admission
        admission.check_integrity()
        assert admission._all.live == sum(r.place.num_outputs for r in self.groups())
        assert set(admission._to_begin) == {r.request_id for r in self.delayed + self.ready}
        known = [r for r in self.entered if r.place.num_prompt_tokens is not None] + self.delayed + self.ready
        assert admission._all.waiting_tokens == sum(r.num_prompt_tokens for r in known)

    def groups(self) -> list[Request]:
        live = self.entered + self.delayed + self.ready + self.running
        return list({id(r.place): r for r in live}.values())

    def teardown(self) -> None:
        if not hasattr(self, "house"):
            return
        for request in self.entered:
            self.house.admission.leave(request.place)
        self.house.end(*self.delayed, *self.ready, *self.running)
        everyone = self.house.admission
        everyone.check_integrity()
        assert (everyone._all.live, everyone._all.running, everyone._all.delayed) == (0, 0, 0)
        assert everyone._all.waiting_tokens == 0 and not everyone._to_begin
        assert set(everyone._by_name) == {"x"}


def test_whatever_comes_in_whatever_order():
    run_state_machine_as_test(AdmissionMachine, settings=FEW)


@pytest.mark.slow
def test_whatever_comes_in_whatever_order_for_long():
    run_state_machine_as_test(AdmissionMachine, settings=MANY)
