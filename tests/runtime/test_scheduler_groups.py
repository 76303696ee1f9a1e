"""Groups: the n outputs of one prompt share its KV, advance each by itself, and end together if one must."""

from __future__ import annotations

import pytest
from fakes import (
    FakeClock,
    FakeDetokenizer,
    make_core,
    make_request,
    make_scheduler,
    run_until_done,
    solo_run,
)

from motet.errors import RequestAborted, RequestFailed
from motet.runtime.engine_core import EngineCore
from motet.runtime.request import Delta, FinishReason, Request, RequestStatus
from motet.runtime.scheduler import Scheduler

both_depths = pytest.mark.parametrize("depth", [1, 2], ids=["depth 1", "depth 2"])
with_and_without_caching = pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])

PROMPT = tuple(range(1, 11))


def outputs(deltas: list[Delta]) -> dict[int, list[int]]:
    by_index: dict[int, list[int]] = {}
    for delta in deltas:
        if delta.sample is not None:
            by_index.setdefault(delta.request.index, []).append(delta.sample.token_id)
    return by_index


def alone(request: Request) -> dict[int, list[int]]:
    return {i: solo_run(request, i)[0] for i in range(request.params.n)}


def siblings_of(scheduler: Scheduler) -> list[Request]:
    return sorted(scheduler.requests, key=lambda request: request.index)


def fork(core: EngineCore) -> list[Delta]:
    """Steps until the siblings run."""
    deltas: list[Delta] = []
    while {r.status for r in core.scheduler.requests} != {
        RequestStatus.RUNNING
    } or core.scheduler.num_running < 2:
        deltas += core.step()
    return deltas


@both_depths
@with_and_without_caching
@pytest.mark.parametrize("length", [1, 2, 8, 9, 10], ids=lambda length: f"prompt {length}")
@pytest.mark.parametrize(("budget", "max_tokens"), [(3, 5), (32, 5), (32, 1), (32, 0)])
def test_a_group_computes_its_prompt_once(
    depth: int, caching: bool, length: int, budget: int, max_tokens: int
) -> None:
    scheduler = make_scheduler(enable_prefix_caching=caching, max_num_batched_tokens=budget)
    core, runner = make_core(scheduler, depth=depth)
    request = make_request(PROMPT[:length], n=3, max_tokens=max_tokens)
    scheduler.add(request)
    deltas = run_until_done(core)
    assert {delta.request.index for delta in deltas if delta.request.is_finished} == {0, 1, 2}
    if max_tokens > 0:
        assert outputs(deltas) == alone(request)
    if max_tokens > 1:
        assert len(set(map(tuple, outputs(deltas).values()))) == 3
    computed = sum(len(chunk.token_ids) for plan in runner.plans for chunk in plan.chunks)
    unread = 3 if depth == 2 else 0  # a plan is on its way when a last token comes
    assert computed <= length - 1 + 3 * max(max_tokens, 1) + unread
    copies = [copy for plan in runner.plans for copy in plan.copies]
    assert len(copies) == (2 if (length - 1) % 4 else 0)


@both_depths
@with_and_without_caching
def test_full_blocks_are_shared_and_only_the_one_behind_them_is_each_ones_own(
    depth: int, caching: bool
) -> None:
    scheduler = make_scheduler(enable_prefix_caching=caching)
    core, _ = make_core(scheduler, depth=depth)
    scheduler.add(make_request(PROMPT, n=4, max_tokens=20))
    fork(core)
    tables = [scheduler.kv.table(request) for request in siblings_of(scheduler)]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert scheduler.kv.pool.num_blocks - scheduler.kv.pool.num_free == 2 + 4
    run_until_done(core)


@both_depths
def test_case_28_the_first_that_ends_does_not_mute_the_rest(depth: int) -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler, depth=depth)
    request = next(
        r
        for seed in range(100)
        if len(
            (r := make_request(PROMPT, n=3, max_tokens=12, seed=seed, end_token_ids=(0, 1, 2)))
            and alone(r)[0]
        )
        == 1
        and max(map(len, alone(r).values())) > 4
    )
    scheduler.add(request)
    deltas = run_until_done(core)
    assert outputs(deltas) == alone(request)
    ends = [
        delta.request.index for delta in deltas if delta.request.is_finished and delta.request.error is None
    ]
    assert set(ends) == {0, 1, 2}


@both_depths
@with_and_without_caching
def test_siblings_without_a_seat_wait_their_turn_like_any_other(depth: int, caching: bool) -> None:
    scheduler = make_scheduler(max_num_seqs=2, enable_prefix_caching=caching)
    core, _ = make_core(scheduler, depth=depth)
    group, other = make_request(PROMPT, n=5, max_tokens=6), make_request((5, 6), request_id=5, max_tokens=6)
    scheduler.add(group)
    scheduler.add(other)
    deltas = run_until_done(core)
    assert outputs([d for d in deltas if d.request.group_id == 0]) == alone(group)
    assert [d.sample.token_id for d in deltas if d.request is other and d.sample] == solo_run(other)[0]


@both_depths
@with_and_without_caching
def test_case_18_a_pool_too_small_for_all_siblings_gives_all_their_tokens(depth: int, caching: bool) -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=caching)
    core, _ = make_core(scheduler, depth=depth)
    request = make_request(PROMPT, n=4, max_tokens=10, max_total_tokens=24)
    scheduler.add(request)
    deltas = run_until_done(core)
    assert outputs(deltas) == alone(request)
    assert scheduler.num_preemptions > 0
    assert scheduler.kv.pool.num_free == 6


@both_depths
@with_and_without_caching
def test_case_18_a_preempted_sibling_takes_the_prompt_from_the_others_again(
    depth: int, caching: bool
) -> None:
    scheduler = make_scheduler(num_blocks=9, max_num_seqs=3, enable_prefix_caching=caching)
    core, runner = make_core(scheduler, depth=depth)
    request = make_request(PROMPT, n=3, max_tokens=14)
    scheduler.add(request)
    deltas = fork(core)
    victim = siblings_of(scheduler)[2]
    while victim.status is not RequestStatus.PREEMPTED:
        deltas += core.step()
    assert [sibling.num_preemptions for sibling in siblings_of(scheduler)] == [0, 0, 1]
    before = len(runner.plans)
    deltas += run_until_done(core)
    assert outputs(deltas) == alone(request)
    again = [c for plan in runner.plans[before:] for c in plan.chunks if c.request_id == 2]
    assert again[0].start >= len(PROMPT) - 1, "the prompt is not computed again"


@both_depths
def test_case_18_preempted_in_mid_prompt_a_group_is_still_one_request(depth: int) -> None:
    scheduler = make_scheduler(num_blocks=5, max_num_batched_tokens=4)
    core, _ = make_core(scheduler, depth=depth)
    request = make_request((*PROMPT, 1, 2, 3), n=3, max_tokens=3, max_total_tokens=20)
    scheduler.add(request)
    deltas = core.step()
    assert len(scheduler.requests) == 1
    urgent = make_request(PROMPT, request_id=3, priority=1)
    scheduler.add(urgent)
    deltas += run_until_done(core)
    assert request.num_preemptions > 0
    assert outputs([d for d in deltas if d.request.group_id == 0]) == alone(request)


@both_depths
@pytest.mark.parametrize(
    "state", ["blocked", "waiting", "in mid-prefill", "forked", "first has ended", "preempted"]
)
def test_case_22_an_abort_in_any_state_ends_all_and_leaks_nothing(depth: int, state: str) -> None:
    released: list[int] = []
    scheduler = make_scheduler(
        num_blocks=5 if state == "preempted" else 16,
        max_num_batched_tokens=4,
        on_release=lambda request: released.append(request.group_id),
    )
    core, _ = make_core(scheduler, depth=depth)
    request = make_request(
        PROMPT,
        n=3,
        max_tokens=7,
        prerequisites=("tokenizing",) if state == "blocked" else (),
    )
    scheduler.add(request)
    if state == "in mid-prefill":
        core.step()
    elif state == "forked":
        fork(core)
    elif state == "first has ended":
        fork(core)
        scheduler._requests[1].params = scheduler._requests[2].params = request.params.model_copy(
            update={"max_tokens": 50}
        )
        while not request.is_finished:
            core.step()
    elif state == "preempted":
        while not scheduler.num_preemptions:
            core.step()
    live = [r for r in scheduler.requests if not r.is_finished]
    error = RequestAborted("cancelled")
    deltas = scheduler.finish(0, FinishReason.ABORT, error)
    assert [(delta.request, delta.sample) for delta in deltas] == [(r, None) for r in live]
    assert {r.error for r in live} == {error}
    assert scheduler.finish(0, FinishReason.ABORT, error) == [], "twice"
    for _ in range(2):
        scheduler.check_integrity()
        if core.has_work:
            assert core.step() == []
    assert (released, scheduler.requests) == ([0], [])
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


@both_depths
def test_a_fault_of_one_ends_all_with_one_error_and_no_other_request(depth: int) -> None:
    scheduler = make_scheduler(max_num_seqs=8)
    core, runner = make_core(scheduler, depth=depth)
    group, other = make_request(PROMPT, n=3, max_tokens=30), make_request((5, 6), request_id=3, max_tokens=6)
    scheduler.add(group)
    scheduler.add(other)
    deltas = fork(core)
    runner.faults[1] = RequestFailed("not a number")
    deltas += run_until_done(core)
    ends = [d.request for d in deltas if d.request.error is not None]
    assert {r.index for r in ends} == {0, 1, 2}
    assert len({id(r.error) for r in ends}) == 1
    assert isinstance(group.error, RequestFailed)
    assert [d.sample.token_id for d in deltas if d.request is other and d.sample] == solo_run(other)[0]


def test_each_sibling_has_a_text_of_its_own() -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler)
    request = make_request(PROMPT, n=3, max_tokens=8, detokenizer=FakeDetokenizer(hold_back=3))
    scheduler.add(request)
    deltas = run_until_done(core)
    for index, token_ids in alone(request).items():
        text = "".join(delta.text for delta in deltas if delta.request.index == index)
        assert text == "".join(chr(ord("a") + token_id) for token_id in token_ids)


def test_the_deadline_of_a_group_is_told_once_while_one_of_it_lives() -> None:
    clock = FakeClock()
    scheduler = make_scheduler()
    core, _ = make_core(scheduler)
    request = make_request(PROMPT, n=2, max_tokens=30, deadline=5.0, clock=clock)
    scheduler.add(request)
    fork(core)
    request.params = request.params.model_copy(update={"max_tokens": request.num_output_tokens + 1})
    while not request.is_finished:
        core.step()
    assert scheduler.next_deadline == 5.0
    assert scheduler.expired(6.0) == [0]
    assert scheduler.expired(6.0) == []
    assert len(scheduler.finish(0, FinishReason.TIMEOUT)) == 1
    assert scheduler.next_deadline is None


def test_siblings_count_as_asked_for_when_their_first_did() -> None:
    clock = FakeClock()
    scheduler = make_scheduler()
    core, _ = make_core(scheduler)
    scheduler.add(make_request(PROMPT, n=2, clock=clock))
    clock.now = 3.0
    fork(core)
    assert [request.arrival_time for request in siblings_of(scheduler)] == [0.0, 0.0]
    run_until_done(core)
