"""A step's token budget: holds a target for the time between tokens, whatever tokens cost, and starves no prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from fakes import make_core, make_request, make_scheduler, run_until_done
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.runtime.request import Request
from motet.runtime.scheduler_output import Chunk, SchedulerOutput
from motet.runtime.step_budget import MIN_PREFILL, ROOM, StepBudget
from strategies import FEW

Cost = Callable[[int], float]
"""Seconds that a step takes, by its prefill tokens."""

TARGET = 1.0
WARM_UP = 600
"""Steps until even a cost that leaps is known."""


def affine(base: float, each: float) -> Cost:
    return lambda prefill: base + each * prefill


def curved(base: float, each: float, power: float) -> Cost:
    return lambda prefill: base + each * prefill**power


def stairs(base: float, height: float, width: int) -> Cost:
    """A kernel that computes whole tiles."""
    return lambda prefill: base + height * -(-prefill // width)


bases = st.floats(0.0, 0.95)
costs = st.one_of(
    st.builds(affine, bases, st.floats(1e-4, 0.1)),
    st.builds(curved, bases, st.floats(1e-5, 0.05), st.floats(0.5, 2.0)),
    st.builds(stairs, bases, st.floats(0.01, 0.5), st.sampled_from([8, 32, 64, 100])),
)


def decoding(count: int) -> list[Request]:
    requests = [make_request(request_id=i) for i in range(count)]
    for request in requests:
        request.token_ids.append(5)
    return requests


def plan_of(prefill: int, decodes: int) -> SchedulerOutput:
    chunks = [Chunk(i, 3, (5,), ((),), 1) for i in range(decodes)]
    if prefill:
        chunks.append(Chunk(decodes, 0, (1,) * prefill, ((),), -1))
    return SchedulerOutput((), (), tuple(chunks))


def drive(budget: StepBudget, cost: Cost, *, steps: int, decodes: int = 4, lag: int = 0) -> list[int]:
    """Each step's prefill tokens, of prompts without end. `lag`: plans that are made before a step is done."""
    running = decoding(decodes)
    plans: deque[int] = deque()
    sizes = []
    for _ in range(steps):
        while len(plans) <= lag:
            plans.append(budget.tokens(running) - decodes)
        prefill = plans.popleft()
        budget.observe(plan_of(prefill, decodes), cost(prefill))
        sizes.append(prefill)
    return sizes


def check_settled(sizes: list[int], cost: Cost, most: int) -> None:
    """That it holds the target, if the least does, and wastes no more room than one growth."""
    if cost(MIN_PREFILL) > TARGET:
        assert set(sizes) == {MIN_PREFILL}
        return
    assert sum(cost(size) > TARGET for size in sizes) <= len(sizes) / 100
    usual = max(set(sizes), key=sizes.count)
    grown = min(most, usual + max(1, usual // 8))
    assert usual == most or cost(usual) > ROOM * TARGET or cost(grown) > TARGET


@settings(FEW, max_examples=30)
@given(cost=costs, most=st.sampled_from([20, 128, 500]), lag=st.integers(0, 1))
def test_it_settles_below_the_target_and_leaves_no_room_unused(cost: Cost, most: int, lag: int):
    budget = StepBudget(most + 4, TARGET)
    sizes = drive(budget, cost, steps=WARM_UP, lag=lag)
    assert all(MIN_PREFILL <= size <= most + 4 for size in sizes), "prompts get on from the first step"
    check_settled(drive(budget, cost, steps=500, lag=lag), cost, most)


@settings(FEW, max_examples=30)
@given(before=costs, after=costs, lag=st.integers(0, 1))
def test_it_follows_a_load_that_changes(before: Cost, after: Cost, lag: int):
    budget = StepBudget(132, TARGET)
    drive(budget, before, steps=WARM_UP, lag=lag)
    drive(budget, after, steps=2 * WARM_UP, lag=lag)
    check_settled(drive(budget, after, steps=500, lag=lag), after, 128)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_few_slow_steps_teach_it_the_size(lag: int):
    budget = StepBudget(1028, TARGET)
    cost = affine(0.2, 0.01)
    sizes = drive(budget, cost, steps=100, lag=lag)
    assert sum(cost(size) > TARGET for size in sizes) <= 4 * (1 + lag), "halvings"
    assert sizes[-1] > 60, "of the 80 that are possible"


def test_a_slow_step_that_is_nobodys_fault_costs_little():
    budget = StepBudget(132, TARGET)
    cost = affine(0.1, 0.005)
    assert drive(budget, cost, steps=10) == [128] * 10
    budget.observe(plan_of(128, 4), 30.0)
    sizes = drive(budget, cost, steps=10)
    assert sizes[0] == 66 and sizes[-1] == 128


def test_now_and_then_a_slow_step_does_not_drive_it_down():
    budget = StepBudget(132, TARGET)
    sizes = []
    for _ in range(50):
        sizes += drive(budget, affine(0.1, 0.005), steps=30)
        budget.observe(plan_of(sizes[-1], 4), 30.0)
    assert sum(sizes) / len(sizes) > 110


def test_steps_without_prompts_and_steps_in_which_nobody_waits_teach_nothing():
    budget = StepBudget(132, TARGET)
    for _ in range(10):
        budget.observe(plan_of(0, 4), 30.0)
        budget.observe(plan_of(132, 0), 30.0)
    assert drive(budget, affine(0.1, 0.005), steps=1) == [128]


def test_while_nobody_decodes_a_step_has_all_there_is():
    budget = StepBudget(100, TARGET)
    drive(budget, lambda prefill: 30.0, steps=10)
    at_its_prompt = make_request(request_id=50)
    assert budget.tokens([]) == budget.tokens([at_its_prompt]) == 100
    assert budget.tokens([*decoding(1), at_its_prompt]) == 1 + MIN_PREFILL
    at_its_prompt.num_awaited_tokens = 1
    assert budget.tokens([at_its_prompt]) == 1 + MIN_PREFILL, "its first token is on its way"


def test_every_running_request_gets_a_token_but_never_more_than_there_are():
    budget = StepBudget(100, TARGET)
    drive(budget, lambda prefill: 30.0, steps=10)
    prompts = [make_request(request_id=50 + i) for i in range(60)]
    assert budget.tokens([*decoding(20), *prompts]) == 80
    assert budget.tokens([*decoding(90), *prompts]) == 100


def test_without_a_target_every_step_has_all_there_is():
    budget = StepBudget(100)
    assert budget.tokens(decoding(3)) == 100
    budget.observe(plan_of(97, 3), 30.0)
    assert budget.tokens(decoding(3)) == 100


def test_a_budget_below_the_least_prefill_is_kept():
    assert set(drive(StepBudget(8, TARGET), lambda prefill: 30.0, steps=20)) == {4}


@pytest.mark.parametrize("depth", [1, 2])
def test_under_a_scheduler_long_prompts_shrink_beside_streams_and_still_end(depth: int):
    scheduler = make_scheduler(num_blocks=400, max_num_batched_tokens=64, itl_target=TARGET)
    core, _ = make_core(scheduler, depth=depth)
    scheduler.add(make_request([1], request_id=0, max_tokens=150))
    core.step()
    for i in (1, 2):
        scheduler.add(make_request([i] * 600, request_id=i, max_tokens=2))
    sizes = []
    for _ in range(70):
        core.step()
        scheduler.check_integrity()
        plan = core.last_plan
        assert plan is not None and plan.chunks[0].request_id == 0, "the stream gets its token in each step"
        sizes.append(sum(len(chunk.token_ids) for chunk in plan.chunks))
        scheduler.step_budget.observe(plan, 0.05 * sizes[-1])
    assert max(sizes) == 64 and max(sizes[20:]) <= 21, "21 tokens take more than the target"
    run_until_done(core)
