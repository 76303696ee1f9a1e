from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import permutations

import pytest
from fakes import (
    END,
    FakeClock,
    FakeDetokenizer,
    FakeRunner,
    make_core,
    make_request,
    make_scheduler,
    run_until_done,
    solo_run,
)

from motet.errors import RequestAborted, RequestFailed
from motet.runtime.engine_core import EngineCore
from motet.runtime.request import FinishReason, Request, RequestStatus
from motet.runtime.scheduler import Scheduler

both_depths = pytest.mark.parametrize("depth", [1, 2])


def output_of(request: Request) -> tuple[list[int], FinishReason | None]:
    return request.token_ids[request.num_prompt_tokens :], request.finish_reason


def add_all(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def chunk_lengths(runner: FakeRunner) -> list[dict[int, int]]:
    """For each plan so far: how many tokens of which request."""
    return [{chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks} for plan in runner.plans]


# -- the budget ----------------------------------------------------------------------------------------------


def test_one_budget_is_spent_over_prompts_and_decodes_alike() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    core, runner = make_core(scheduler)
    scheduler.add(make_request((1,), request_id=0, max_tokens=9))
    core.step()
    add_all(scheduler, make_request([2] * 10, request_id=1), make_request([3] * 5, request_id=2))
    core.step()
    core.step()
    core.step()
    assert chunk_lengths(runner) == [{0: 1}, {0: 1, 1: 7}, {0: 1, 1: 3, 2: 4}, {0: 1, 1: 1, 2: 1}]


@both_depths
def test_a_long_prompt_stops_no_running_decode(depth: int) -> None:
    scheduler = make_scheduler(num_blocks=100, max_num_batched_tokens=8)
    core, runner = make_core(scheduler, depth=depth)
    add_all(scheduler, *(make_request((i,), request_id=i, max_tokens=30) for i in (0, 1)))
    core.step()
    scheduler.add(make_request([5] * 60, request_id=2, priority=9))
    first = len(runner.plans)
    while scheduler.requests[-1].num_output_tokens == 0:
        core.step()
    plans = chunk_lengths(runner)[first:-1]
    assert len(plans) >= 9
    assert all((plan[0], plan[1]) == (1, 1) for plan in plans)
    assert {plan.get(2, 6) for plan in plans[:9]} == {6}


def test_a_plan_is_frozen_and_crosses_a_process_border_whole() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(end_token_ids=(END,)))
    plan = scheduler.schedule()
    assert plan is not None
    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(AttributeError):
        plan.chunks = ()  # type: ignore[misc]  # that it cannot be is what is tested


# -- the order -------------------------------------------------------------------------------------------------


def test_nobody_overtakes_the_head_of_those_who_wait() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    core, runner = make_core(scheduler)
    add_all(
        scheduler,
        make_request([1] * 8, request_id=0),
        make_request([2] * 12, request_id=1),
        make_request([3], request_id=2),
    )
    run_until_done(core)
    firsts = dict.fromkeys(new.request_id for plan in runner.plans for new in plan.new)
    assert list(firsts) == [0, 1, 2], "the third would have fitted beside the first, the second did not"


def test_a_blocked_request_holds_up_nobody() -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler)
    blocked, other = make_request(request_id=0, prerequisites=("a", "b")), make_request(request_id=1)
    add_all(scheduler, blocked, other)
    assert (scheduler.num_blocked, scheduler.num_waiting) == (1, 1)
    run_until_done(core)
    assert output_of(other) == solo_run(other)
    scheduler.unblock(blocked, "a")
    assert (scheduler.has_work, blocked.status) == (False, RequestStatus.BLOCKED)
    scheduler.unblock(blocked, "b")
    assert (scheduler.has_work, blocked.status) == (True, RequestStatus.WAITING)
    run_until_done(core)
    assert output_of(blocked) == solo_run(blocked)


def test_what_an_ended_request_waited_for_may_still_come() -> None:
    scheduler = make_scheduler()
    request = make_request(prerequisites=("a",))
    scheduler.add(request)
    scheduler.finish(request.request_id, FinishReason.ABORT)
    scheduler.unblock(request, "a")
    assert not scheduler.has_work


@both_depths
@pytest.mark.parametrize("max_num_batched_tokens", [1, 4])
@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_case_19_a_high_priority_gets_its_first_token_within_two_steps(
    depth: int, max_num_batched_tokens: int, max_num_seqs: int
) -> None:
    scheduler = make_scheduler(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    core, runner = make_core(scheduler, depth=depth)
    low = [make_request((i,), request_id=i, max_tokens=12) for i in range(max_num_seqs)]
    add_all(scheduler, *low)
    for _ in range(3):
        core.step()
    high = make_request((7,), request_id=9, priority=1)
    num_running, num_plans = scheduler.num_running, len(runner.plans)
    scheduler.add(high)
    while high.num_output_tokens == 0:
        core.step()
    assert any(9 in plan for plan in chunk_lengths(runner)[num_plans : num_plans + 2])
    run_until_done(core)
    assert scheduler.num_preemptions == (num_running == max_num_seqs)
    for request in (*low, high):
        assert output_of(request) == solo_run(request)


@both_depths
@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_case_19_equals_never_take_turns_in_one_place(depth: int, policy: str) -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy=policy)
    core, runner = make_core(scheduler, depth=depth)
    requests = [make_request((i,), request_id=i, max_tokens=6) for i in range(3)]
    add_all(scheduler, *requests)
    run_until_done(core)
    assert scheduler.num_preemptions == 0
    order = [chunk.request_id for plan in runner.plans for chunk in plan.chunks]
    assert order == sorted(order)


@both_depths
def test_equals_that_do_not_fit_together_go_one_after_the_other(depth: int) -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    core, _ = make_core(scheduler, depth=depth)
    requests = [make_request((i, i), request_id=i, max_tokens=6) for i in range(3)]
    add_all(scheduler, *requests)
    ends = [delta.request.request_id for delta in run_until_done(core) if delta.request.is_finished]
    assert list(dict.fromkeys(reversed(ends))) == [2, 1, 0], "in their order"
    assert all(request.num_preemptions <= request.request_id for request in requests), (
        "once for each before it"
    )
    for request in requests:
        assert output_of(request) == solo_run(request)


@both_depths
def test_fcfs_ignores_priority(depth: int) -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy="fcfs")
    core, runner = make_core(scheduler, depth=depth)
    add_all(scheduler, *(make_request((i,), request_id=i, priority=i) for i in range(3)))
    run_until_done(core)
    assert [new.request_id for plan in runner.plans for new in plan.new] == [0, 1, 2]


def test_a_request_is_admitted_whatever_max_tokens_it_asks_for() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    add_all(
        scheduler, *(make_request((i,), request_id=i, max_tokens=900, max_total_tokens=16) for i in range(4))
    )
    scheduler.schedule()
    assert scheduler.num_running == 4


# -- preemption ------------------------------------------------------------------------------------------------


def is_before_first_token(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING and request.num_output_tokens == 0


def is_in_mid_chunk(request: Request) -> bool:
    return (
        request.status is RequestStatus.RUNNING and 0 < request.num_computed_tokens < request.num_tokens - 1
    )


def is_in_mid_decode(request: Request) -> bool:
    caught_up = request.num_computed_tokens >= request.num_tokens - 1
    return request.status is RequestStatus.RUNNING and request.num_output_tokens >= 2 and caught_up


@both_depths
@pytest.mark.parametrize("moment", [is_before_first_token, is_in_mid_chunk, is_in_mid_decode])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("times", [1, 3, 5])
def test_case_18_a_preempted_request_resumes_with_the_same_tokens(
    depth: int, moment: Callable[[Request], bool], enable_prefix_caching: bool, times: int
) -> None:
    scheduler = make_scheduler(
        num_blocks=10,
        block_size=2,
        max_num_seqs=1,
        max_num_batched_tokens=2,
        enable_prefix_caching=enable_prefix_caching,
    )
    core, _ = make_core(scheduler, depth=depth)
    victim = make_request(
        (1, 2, 3, 4, 5, 6, 7, 8, 9), max_tokens=11, max_total_tokens=20, end_token_ids=(END,), min_tokens=11
    )
    scheduler.add(victim)
    for request_id in range(1, times + 1):
        for _ in range(100):
            if moment(victim):
                break
            core.step()
        rival = make_request([request_id] * 19, request_id=request_id, priority=1, max_tokens=1)
        scheduler.add(rival)
        while not rival.is_finished:
            core.step()
            scheduler.check_integrity()
        assert output_of(rival) == solo_run(rival)
    run_until_done(core)
    assert victim.num_preemptions == times
    assert output_of(victim) == solo_run(victim)
    assert len(output_of(victim)[0]) == 11


@both_depths
def test_case_18_a_pool_that_is_too_small_for_all_gives_all_their_tokens(depth: int) -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=2, max_num_batched_tokens=5)
    core, _ = make_core(scheduler, depth=depth)
    requests = [
        make_request((1, 2, 3), request_id=i, max_tokens=9, adapter_slot=i % 3 - 1, seed=i) for i in range(6)
    ]
    add_all(scheduler, *requests)
    run_until_done(core)
    assert scheduler.num_preemptions >= 3
    for request in requests:
        assert output_of(request) == solo_run(request)


@both_depths
@pytest.mark.parametrize(("priorities", "victim"), [((0, 0, 0), 2), ((0, -1, 0), 1), ((-2, -1, 0), 0)])
def test_the_last_in_the_order_of_service_gives_up_its_place(
    depth: int, priorities: tuple[int, ...], victim: int
) -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    core, _ = make_core(scheduler, depth=depth)
    low = [make_request((i,), request_id=i, priority=p, max_tokens=9) for i, p in enumerate(priorities)]
    add_all(scheduler, *low)
    for _ in range(2):
        core.step()
    scheduler.add(high := make_request((8,), request_id=10, priority=5))
    run_until_done(core)
    assert [request.num_preemptions > 0 for request in low] == [i == victim for i in range(3)]
    for request in (*low, high):
        assert output_of(request) == solo_run(request)


@both_depths
def test_nobody_is_preempted_where_that_would_not_help(depth: int) -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    core, _ = make_core(scheduler, depth=depth)
    shared = (1, 2, 3, 4, 5, 6, 7)
    first, low = (
        make_request((9,), request_id=0, priority=2, max_tokens=3),
        make_request(shared, request_id=1),
    )
    add_all(scheduler, first, low)
    core.step()
    core.step()
    # It would hit the one block that `low` has published, so it needs two more; `low` has one to give besides.
    high = make_request((*shared[:4], 0, 0, 0, 0, 0), request_id=2, priority=1, max_tokens=1)
    scheduler.add(high)
    core.step()
    assert (low.num_preemptions, low.status) == (0, RequestStatus.RUNNING)
    run_until_done(core)
    for request in (first, low, high):
        assert output_of(request) == solo_run(request)


def test_who_is_leaving_makes_room_before_anybody_is_preempted() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=1)
    core, _ = make_core(scheduler, depth=2)
    low = make_request((1,), request_id=0, max_tokens=9)
    leaving = make_request((2,), request_id=1, priority=2, max_tokens=20)
    scheduler.add(low)
    core.step()
    scheduler.add(leaving)
    core.step()
    core.step()
    assert low.num_in_flight == 0, "the budget went to the other"
    scheduler.finish(leaving.request_id, FinishReason.ABORT)
    scheduler.add(high := make_request((3,), request_id=2, priority=1))
    run_until_done(core)
    assert scheduler.num_preemptions == 0
    for request in (low, high):
        assert output_of(request) == solo_run(request)


def test_a_seat_is_free_only_when_no_plan_in_flight_names_who_had_it() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    core, runner = make_core(scheduler, depth=2)
    add_all(scheduler, make_request(request_id=0, max_tokens=20), make_request(request_id=1))
    core.step()
    assert len(runner.in_flight) == 1
    scheduler.finish(0, FinishReason.ABORT)
    assert scheduler.schedule() is None
    run_until_done(core)
    assert set(runner.rows) == {1}


# -- the prefix cache ------------------------------------------------------------------------------------------


@both_depths
@pytest.mark.parametrize("order", list(permutations([-1, 0, 1])))
def test_case_7_one_prompt_under_two_adapters_and_the_base_in_any_order(
    depth: int, order: tuple[int, ...]
) -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler, depth=depth)
    prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    for request_id, adapter_slot in enumerate(order + order):
        request = make_request(prompt, request_id=request_id, adapter_slot=adapter_slot)
        scheduler.add(request)
        run_until_done(core)
        assert request.num_cached_tokens == (0 if request_id < 3 else 8)
        assert output_of(request) == solo_run(request)
    assert (scheduler.prefix_query_tokens, scheduler.prefix_hit_tokens) == (6 * 9, 3 * 8)


@both_depths
def test_case_9_a_tenants_second_request_hits_and_another_tenants_does_not(depth: int) -> None:
    scheduler = make_scheduler()
    core, runner = make_core(scheduler, depth=depth)
    cached = []
    for request_id, tenant in enumerate("xyx"):
        request = make_request((1, 2, 3, 4, 5), request_id=request_id, tenant=tenant)
        scheduler.add(request)
        run_until_done(core)
        cached.append(request.num_cached_tokens)
        assert output_of(request) == solo_run(request)
    assert cached == [0, 0, 4]
    assert runner.cells_read_from[1] == {1}
    assert runner.cells_read_from[2] == {0, 2}


@both_depths
def test_the_next_turn_of_a_conversation_hits_the_answer_too(depth: int) -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler, depth=depth)
    scheduler.add(first := make_request((1, 2, 3), request_id=0, max_tokens=10))
    run_until_done(core)
    scheduler.add(second := make_request((*first.token_ids, 4, 5, 6, 7), request_id=1))
    run_until_done(core)
    assert (first.num_tokens, second.num_cached_tokens) == (13, 12)
    assert output_of(second) == solo_run(second)


def test_blocks_are_shared_while_their_first_owner_still_runs() -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler)
    first, second = (make_request((1, 2, 3, 4, 5), request_id=i, max_tokens=8) for i in (0, 1))
    scheduler.add(first)
    core.step()
    scheduler.add(second)
    core.step()
    assert scheduler.kv.table(first)[0] == scheduler.kv.table(second)[0]
    assert scheduler.kv.pool.ref_count(scheduler.kv.table(first)[0]) == 2
    run_until_done(core)
    assert output_of(first) == output_of(second) == solo_run(first)


# -- ends ------------------------------------------------------------------------------------------------------


@both_depths
def test_case_5_max_tokens_0_only_processes_the_prompt(depth: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    core, _ = make_core(scheduler, depth=depth)
    request = make_request((1, 2, 3, 4, 5, 6, 7, 8, 9), max_tokens=0)
    scheduler.add(request)
    deltas = run_until_done(core)
    assert [(delta.sample, delta.text) for delta in deltas] == [(None, "")]
    assert output_of(request) == ([], FinishReason.LENGTH)
    scheduler.add(again := make_request((1, 2, 3, 4, 5, 6, 7, 8, 9), request_id=1))
    run_until_done(core)
    assert again.num_cached_tokens == 8, "the prompt's KV is kept"


@both_depths
def test_case_5_max_tokens_1_gives_exactly_one_token(depth: int) -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler, depth=depth)
    scheduler.add(request := make_request(max_tokens=1))
    deltas = run_until_done(core)
    assert len(deltas) == 1
    assert deltas[0].sample is not None
    assert output_of(request) == solo_run(request)


@both_depths
def test_case_21_an_answer_that_fills_the_whole_cache_ends_by_length_and_others_go_on(depth: int) -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    core, _ = make_core(scheduler, depth=depth)
    large = make_request((1, 2, 3), request_id=0, max_tokens=500, max_total_tokens=8)
    small = make_request((4,), request_id=1, max_tokens=3, max_total_tokens=8)
    add_all(scheduler, large, small)
    run_until_done(core)
    assert (large.num_tokens, large.finish_reason) == (8, FinishReason.LENGTH)
    for request in (large, small):
        assert output_of(request) == solo_run(request)


def bring_to(core: EngineCore, request: Request, state: str) -> None:
    """Steps until the request is where `state` says."""
    scheduler = core.scheduler
    if state == "preempted":
        for _ in range(3):
            core.step()
        scheduler.add(make_request((9,), request_id=99, priority=1, max_tokens=3))
    reached: dict[str, Callable[[], bool]] = {
        "blocked": lambda: request.status is RequestStatus.BLOCKED,
        "waiting": lambda: request.status is RequestStatus.WAITING,
        "in mid-prefill": lambda: 0 < request.num_computed_tokens < request.num_prompt_tokens,
        "decoding": lambda: request.num_output_tokens == 2,
        "preempted": lambda: request.status is RequestStatus.PREEMPTED,
        "on its final step": lambda: request.num_output_tokens == request.max_output_tokens - 1,
        "ended": lambda: request.is_finished,
    }
    for _ in range(50):
        if reached[state]():
            return
        core.step()
    raise AssertionError(f"never {state}")


@both_depths
@pytest.mark.parametrize(
    "state", ["blocked", "waiting", "in mid-prefill", "decoding", "preempted", "on its final step", "ended"]
)
def test_case_22_abort_in_any_state_leaks_nothing_within_two_steps(depth: int, state: str) -> None:
    released: list[int] = []
    scheduler = make_scheduler(
        max_num_seqs=1,
        max_num_batched_tokens=2,
        on_release=lambda request: released.append(request.request_id),
    )
    core, _ = make_core(scheduler, depth=depth)
    prerequisites = ("tokenizing",) if state == "blocked" else ()
    request = make_request((1, 2, 3, 4, 5, 6, 7), max_tokens=5, prerequisites=prerequisites)
    scheduler.add(request)
    bring_to(core, request, state)
    error = RequestAborted("cancelled")
    deltas = scheduler.finish(request.request_id, FinishReason.ABORT, error)
    if state == "ended":
        assert deltas == []
        assert (request.finish_reason, request.error) == (FinishReason.LENGTH, None)
    else:
        assert [(delta.request, delta.sample) for delta in deltas] == [(request, None)]
        assert (request.finish_reason, request.error) == (FinishReason.ABORT, error)
    assert scheduler.finish(request.request_id, FinishReason.ABORT, error) == [], "twice"
    assert scheduler.finish(12345, FinishReason.ABORT) == [], "unknown"
    for _ in range(2):
        scheduler.check_integrity()
        if core.has_work:
            assert all(delta.request is not request for delta in core.step())
    assert released.count(request.request_id) == 1
    assert not scheduler.kv.table(request)
    run_until_done(core)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


@both_depths
def test_case_24_a_fault_ends_its_request_alone(depth: int) -> None:
    scheduler = make_scheduler()
    core, runner = make_core(scheduler, depth=depth)
    faulty, other = make_request((1,), request_id=0), make_request((2,), request_id=1)
    add_all(scheduler, faulty, other)
    core.step()
    runner.faults[0] = RequestFailed("its logits are not finite")
    run_until_done(core)
    assert faulty.finish_reason is FinishReason.ERROR
    assert isinstance(faulty.error, RequestFailed)
    assert str(faulty.error) == "its logits are not finite"
    assert output_of(other) == solo_run(other)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


@both_depths
def test_case_24_text_that_cannot_be_made_ends_its_request_alone(depth: int) -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler, depth=depth)
    other = make_request((3,), request_id=1)
    bad_token = solo_run(make_request((2,)))[0][1]
    broken = make_request((2,), detokenizer=FakeDetokenizer(fail_at=bad_token))
    add_all(scheduler, broken, other)
    deltas = [delta for delta in run_until_done(core) if delta.request is broken]
    assert [delta.sample is None for delta in deltas] == [False, True]
    assert broken.finish_reason is FinishReason.ERROR
    assert isinstance(broken.error, RequestFailed)
    assert f"token {bad_token} could not be turned into text: no such character" in str(broken.error)
    assert isinstance(broken.error.__cause__, ValueError)
    assert output_of(other) == solo_run(other)


@both_depths
def test_a_stop_string_ends_a_request_whose_next_token_is_on_its_way(depth: int) -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler, depth=depth)
    tokens, _ = solo_run(make_request((1,), max_tokens=20))
    scheduler.add(
        request := make_request((1,), max_tokens=20, detokenizer=FakeDetokenizer(stop_at=tokens[3]))
    )
    text = "".join(delta.text for delta in run_until_done(core))
    end = tokens.index(tokens[3])
    assert output_of(request) == (tokens[: end + 1], FinishReason.STOP)
    assert text == "".join(chr(ord("a") + token_id) for token_id in tokens[:end])
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


def test_deadlines_are_told_once_each_in_their_order_and_only_of_the_living() -> None:
    scheduler = make_scheduler()
    clock = FakeClock()
    add_all(
        scheduler,
        *(
            make_request(request_id=i, deadline=deadline, clock=clock)
            for i, deadline in enumerate([9.0, 3.0, 5.0])
        ),
        make_request(request_id=3, clock=clock),
    )
    assert scheduler.next_deadline == 3.0
    assert scheduler.expired(2.9) == []
    scheduler.finish(2, FinishReason.ABORT)
    assert scheduler.expired(9.0) == [1, 0]
    assert scheduler.expired(9.0) == []
    assert scheduler.next_deadline is None


def test_the_deadline_of_who_is_leaving_is_nobodys() -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler, depth=2)
    scheduler.add(make_request(deadline=3.0, max_tokens=20))
    core.step()
    scheduler.finish(0, FinishReason.ABORT)
    assert [request.request_id for request in scheduler.requests] == [0]
    assert (scheduler.next_deadline, scheduler.expired(5.0)) == (None, [])
