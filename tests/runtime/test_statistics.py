from __future__ import annotations

import dataclasses

import pytest
from fakes import FakeClock, make_core, make_request, make_scheduler, run_until_done

from motet.lora.generation import AdapterLease, Generation
from motet.runtime.request import Delta, Request
from motet.runtime.scheduler_output import Sample
from motet.runtime.statistics import RATE_WINDOW, EngineStats, StatisticsKeeper


def deltas_of(request: Request, num_tokens: int) -> list[Delta]:
    return [Delta(request, Sample(1))] * num_tokens


def test_a_fresh_engine_has_nothing_but_its_blocks() -> None:
    snapshot = StatisticsKeeper(make_scheduler(num_blocks=16)).snapshot()
    assert snapshot == EngineStats(kv_blocks_total=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.running = 1  # type: ignore[misc]  # that it cannot be is what is tested


def test_states_blocks_and_hits_are_the_schedulers() -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_num_seqs=1)
    core, _ = make_core(scheduler)
    keeper = StatisticsKeeper(scheduler)
    scheduler.add(make_request((1, 2, 3, 4, 5), request_id=0))
    run_until_done(core)
    scheduler.add(make_request((1, 2, 3, 4, 5), request_id=1, max_tokens=9))
    scheduler.add(make_request(request_id=2))
    scheduler.add(make_request(request_id=3, prerequisites=("tokenizing",)))
    core.step()
    snapshot = keeper.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.blocked) == (1, 1, 1)
    assert (snapshot.prefix_query_tokens, snapshot.prefix_hit_tokens) == (10, 4)
    assert (snapshot.kv_blocks_total, snapshot.kv_blocks_used, snapshot.kv_blocks_cached) == (16, 2, 1)
    scheduler.add(make_request(request_id=4, priority=1))
    run_until_done(core)
    assert keeper.snapshot().preemptions == 1
    assert (keeper.snapshot().running, keeper.snapshot().kv_blocks_used) == (0, 0)


def test_live_requests_are_counted_by_adapter_and_tenant_and_forgotten_when_they_leave() -> None:
    keeper = StatisticsKeeper(make_scheduler())
    requests = [make_request(request_id=i, tenant=tenant) for i, tenant in enumerate("xxy")]
    requests[0].adapter = AdapterLease(Generation("acme"))
    for request in requests:
        keeper.enter(request)
    assert keeper.snapshot().per_adapter == {"acme": 1, "": 2}
    assert keeper.snapshot().per_tenant == {"x": 2, "y": 1}
    for request in requests[:2]:
        keeper.leave(request)
    assert keeper.snapshot().per_adapter == {"": 1}
    assert keeper.snapshot().per_tenant == {"y": 1}


def test_a_snapshot_does_not_change_afterwards() -> None:
    keeper = StatisticsKeeper(make_scheduler())
    keeper.enter(make_request())
    snapshot = keeper.snapshot()
    keeper.enter(make_request(request_id=1))
    assert snapshot.per_tenant == {"default": 1}


def test_the_token_rate_is_taken_over_the_last_seconds() -> None:
    clock = FakeClock()
    keeper = StatisticsKeeper(make_scheduler(), clock=clock)
    request = make_request()
    keeper.enter(request)
    for _ in range(100):
        clock.now += 0.5
        keeper.count(deltas_of(request, 10))
    assert keeper.snapshot().tokens_per_second == pytest.approx(20.0)
    for _ in range(int(RATE_WINDOW / 0.5) + 1):
        clock.now += 0.5
        keeper.count(deltas_of(request, 2))
    assert keeper.snapshot().tokens_per_second == pytest.approx(4.0), "what is older has no weight"


def test_ends_without_a_token_are_no_tokens() -> None:
    clock = FakeClock()
    keeper = StatisticsKeeper(make_scheduler(), clock=clock)
    keeper.enter(request := make_request())
    for _ in range(3):
        clock.now += 1.0
        keeper.count([Delta(request, None)])
    assert keeper.snapshot().tokens_per_second == 0.0


def test_an_idle_engine_has_no_rate() -> None:
    clock = FakeClock()
    keeper = StatisticsKeeper(make_scheduler(), clock=clock)
    keeper.enter(request := make_request())
    for _ in range(3):
        clock.now += 1.0
        keeper.count(deltas_of(request, 5))
    keeper.leave(request)
    assert keeper.snapshot().tokens_per_second == 0.0
    keeper.enter(request)
    assert keeper.snapshot().tokens_per_second == 0.0, "and begins anew"


def test_two_steps_within_one_tick_of_the_clock_give_no_rate_yet() -> None:
    keeper = StatisticsKeeper(make_scheduler(), clock=FakeClock())
    keeper.enter(request := make_request())
    keeper.count(deltas_of(request, 1))
    keeper.count(deltas_of(request, 1))
    assert keeper.snapshot().tokens_per_second == 0.0


def test_the_time_between_ends_is_their_mean() -> None:
    clock = FakeClock()
    keeper = StatisticsKeeper(make_scheduler(), clock=clock)
    for _ in range(3):
        keeper.enter(request := make_request())
        clock.now += 4.0
        keeper.leave(request)
    assert keeper.snapshot().seconds_per_request == 4.0
