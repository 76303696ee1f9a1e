from __future__ import annotations

import pytest
from fakes import FakeRunner, make_core, make_request, make_scheduler, run_until_done, solo_run

from motet.errors import EngineClosed, EngineDead
from motet.runtime.engine_core import EngineCore
from motet.runtime.request import FinishReason
from motet.runtime.scheduler_output import IN_FLIGHT, SchedulerOutput

both_depths = pytest.mark.parametrize("depth", [1, 2])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_so_many_plans_are_in_flight_while_one_is_taken_in(depth: int) -> None:
    core, runner = make_core(scheduler := make_scheduler(), depth=depth)
    scheduler.add(make_request(max_tokens=20))
    core.step()
    assert (len(runner.plans), len(runner.in_flight)) == (depth, depth - 1)
    core.step()
    assert (len(runner.plans), len(runner.in_flight)) == (depth + 1, depth - 1)


@pytest.mark.parametrize("all_run", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_depth_changes_no_token(depth: int, all_run: bool) -> None:
    core, runner = make_core(scheduler := make_scheduler(num_blocks=8, block_size=2), depth=depth)
    if not all_run:
        runner.runs = has_no_prompt
    requests = [make_request((i, i + 1), request_id=i, max_tokens=7) for i in range(5)]
    for request in requests:
        scheduler.add(request)
    deltas = run_until_done(core)
    for request in requests:
        tokens = [d.sample.token_id for d in deltas if d.request is request and d.sample is not None]
        assert (tokens, request.finish_reason) == solo_run(request)


def has_no_prompt(plan: SchedulerOutput) -> bool:
    return not plan.new


def test_nothing_is_planned_behind_a_plan_that_waits_for_its_turn() -> None:
    core, runner = make_core(scheduler := make_scheduler(), depth=2)
    runner.runs = has_no_prompt
    scheduler.add(make_request(request_id=0, max_tokens=20))
    core.step()
    assert (len(runner.plans), len(runner.in_flight)) == (1, 0)
    core.step()
    assert (len(runner.plans), len(runner.in_flight)) == (3, 1)
    scheduler.add(make_request(request_id=1, max_tokens=20))
    core.step()
    assert (len(runner.plans), runner.in_flight[-1].runs) == (4, False)
    core.step()
    assert (len(runner.plans), len(runner.in_flight)) == (4, 0), "its result comes before the next plan"
    run_until_done(core)
    assert len(runner.waited) == 0


def test_what_runs_is_waited_for_before_all_is_abandoned() -> None:
    core, runner = make_core(scheduler := make_scheduler(), depth=2)
    scheduler.add(make_request(max_tokens=20))
    core.step()
    core.abandon(FinishReason.ABORT, lambda: EngineClosed("closed"))
    assert runner.waited == list(runner.in_flight)
    assert len(runner.waited) == 1


def test_a_plan_names_tokens_that_the_one_before_it_will_bring() -> None:
    core, runner = make_core(scheduler := make_scheduler(), depth=2)
    scheduler.add(make_request((1, 2, 3)))
    core.step()
    first, second = (plan.chunks[0] for plan in runner.plans)
    assert (first.start, first.token_ids, first.output_index) == (0, (1, 2, 3), 0)
    assert (second.start, second.token_ids, second.output_index) == (3, (IN_FLIGHT,), 1)


def test_nothing_is_planned_behind_the_last_token_a_request_may_have() -> None:
    core, runner = make_core(scheduler := make_scheduler(), depth=2)
    scheduler.add(make_request((1, 2, 3), max_tokens=2))
    run_until_done(core)
    assert [plan.chunks[0].output_index for plan in runner.plans] == [0, 1]


@both_depths
def test_there_is_work_until_the_last_plan_in_flight_is_taken_in(depth: int) -> None:
    core, runner = make_core(scheduler := make_scheduler(), depth=depth)
    assert not core.has_work
    scheduler.add(make_request(max_tokens=20))
    assert core.has_work
    core.step()
    scheduler.finish(0, FinishReason.ABORT)
    assert core.has_work == bool(runner.in_flight) == (depth == 2)
    run_until_done(core)
    assert scheduler.requests == []


@both_depths
def test_a_step_without_work_is_a_fault_of_ours(depth: int) -> None:
    core, _ = make_core(make_scheduler(), depth=depth)
    with pytest.raises(AssertionError, match="no request can advance"):
        core.step()


@both_depths
def test_abandoning_ends_every_request_with_an_error_of_its_own_and_gives_all_back(depth: int) -> None:
    released: list[int] = []
    scheduler = make_scheduler(max_num_seqs=2, on_release=lambda request: released.append(request.request_id))
    core, _ = make_core(scheduler, depth=depth)
    for request_id in range(4):
        prerequisites = ("tokenizing",) if request_id == 3 else ()
        scheduler.add(
            make_request((request_id,), request_id=request_id, max_tokens=20, prerequisites=prerequisites)
        )
    core.step()
    scheduler.finish(0, FinishReason.ABORT)  # at depth 2 it stays, since a plan in flight names it
    deltas = core.abandon(FinishReason.ERROR, lambda: EngineClosed("closed"))
    assert [delta.request.request_id for delta in deltas] == [1, 2, 3]
    assert {delta.request.finish_reason for delta in deltas} == {FinishReason.ERROR}
    assert len({id(delta.request.error) for delta in deltas}) == 3
    assert sorted(released) == [0, 1, 2, 3]
    assert (core.has_work, scheduler.requests) == (False, [])
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    scheduler.check_integrity()


class BreakingRunner(FakeRunner):
    def submit(self, plan: SchedulerOutput):  # type: ignore[no-untyped-def]  # never returns
        raise RuntimeError("out of memory")


def test_case_24_what_the_runner_raises_is_not_swallowed_and_all_can_be_abandoned() -> None:
    scheduler = make_scheduler()
    core = EngineCore(
        scheduler, BreakingRunner(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    )
    scheduler.add(make_request())
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        core.step()
    (delta,) = core.abandon(FinishReason.ERROR, lambda: EngineDead(caught.value))
    assert isinstance(delta.request.error, EngineDead)
    assert delta.request.error.cause is caught.value
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
