"""The scheduler, driven by Hypothesis through a fake model that shows every fault, at depths 1 and 2."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import (
    END,
    RULES,
    FakeClock,
    make_core,
    make_request,
    make_scheduler,
    solo_prompt_logprobs,
    solo_run,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from motet.errors import DeadlineExceeded, RequestAborted, RequestFailed
from motet.runtime.policy import POLICIES
from motet.runtime.request import Delta, FinishReason, Request, RequestStatus
from motet.runtime.scheduler_output import LogitsRules
from strategies import FEW, MANY, prompts

NEVER = float("inf")


class SchedulerMachine(RuleBasedStateMachine):
    depth = 1

    @initialize(
        num_blocks=st.sampled_from([4, 4, 5, 6, 8, 12]),
        block_size=st.integers(2, 4),
        max_num_seqs=st.sampled_from([1, 2, 3, 4, 4]),
        max_num_batched_tokens=st.sampled_from([1, 2, 4, 7, 12]),
        policy=st.sampled_from(sorted(POLICIES)),
        caching=st.sampled_from([True, True, False]),
    )
    def make(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str,
        caching: bool,
    ) -> None:
        self.clock = FakeClock()
        self.scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            enable_prefix_caching=caching,
            on_release=self.on_release,
        )
        self.core, self.runner = make_core(self.scheduler, depth=self.depth)
        self.capacity = num_blocks * block_size
        self.requests: dict[int, Request] = {}
        """All that ever were, siblings from when they are forked."""
        self.num_ids = 0
        self.alone: dict[int, tuple[list[int], FinishReason]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.faulty: set[int] = set()
        self.released: Counter[int] = Counter()

    def on_release(self, request: Request) -> None:
        assert request.is_finished
        assert request.num_in_flight == 0
        self.released[request.group_id] += 1

    # -- what may happen ---------------------------------------------------------------------------------

    @rule(
        prompt=prompts(16),
        tenant=st.sampled_from("xxy"),
        adapter_slot=st.sampled_from([-1, -1, 0, 1]),
        priority=st.integers(0, 2),
        max_tokens=st.sampled_from([0, 1, 5, 12, 100]),
        min_tokens=st.integers(0, 3),
        ends=st.booleans(),
        wait=st.sampled_from([NEVER, NEVER, NEVER, 0.0, 4.0]),
        blocked=st.sampled_from([False, False, True]),
        rules=st.sampled_from([None, RULES]),
        n=st.sampled_from([1, 1, 2, 3]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(
        self,
        prompt: list[int],
        tenant: str,
        adapter_slot: int,
        priority: int,
        max_tokens: int,
        min_tokens: int,
        ends: bool,
        wait: float,
        blocked: bool,
        rules: LogitsRules | None,
        n: int,
        prompt_logprobs: int | None,
    ) -> None:
        request = make_request(
            prompt[: self.capacity - min(max_tokens, 1)],
            request_id=self.num_ids,
            tenant=tenant,
            adapter_slot=adapter_slot,
            priority=priority,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            end_token_ids=(END, 5) if ends else (),
            max_total_tokens=self.capacity,
            deadline=self.clock() + wait,
            prerequisites={"tokenizing"} if blocked else (),
            seed=self.num_ids % 2,
            n=n,
            prompt_logprobs=prompt_logprobs,
            clock=self.clock,
            rules=rules,
        )
        self.take_in(request)

    def take_in(self, request: Request) -> None:
        for choice in range(request.params.n):
            self.alone[self.num_ids + choice] = solo_run(request, choice)
            self.outputs[self.num_ids + choice] = []
        self.num_ids += request.params.n
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    @precondition(lambda self: any(request.prerequisites for request in self.requests.values()))
    @rule(data=st.data())
    def unblock(self, data: st.DataObject) -> None:
        blocked = [request for request in self.requests.values() if request.prerequisites]
        self.scheduler.unblock(data.draw(st.sampled_from(blocked)), "tokenizing")

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.core.has_work:
                self.take(self.core.step())
                self.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), kind=st.sampled_from(["abort", "abort twice", "fault", "time", "time"]))
    def disturb(self, data: st.DataObject, kind: str) -> None:
        if kind == "time":
            self.let_time_pass(data.draw(st.sampled_from([0.5, 2.0])))
            return
        request_id = data.draw(st.integers(0, self.num_ids))  # one past the end: unknown
        if kind == "fault":
            self.runner.faults[request_id] = RequestFailed("not a number")
            self.faulty.add(request_id)
        else:
            self.end(request_id, FinishReason.ABORT)
        if kind == "abort twice":
            self.end(request_id, FinishReason.ABORT)

    def let_time_pass(self, by: float) -> None:
        self.clock.now += by
        late = {
            r.group_id
            for r in self.requests.values()
            if r.deadline <= self.clock() and r.request_id not in self.ended
        }
        expired = self.scheduler.expired(self.clock())
        assert set(expired) == late
        for group_id in expired:
            self.end(group_id, FinishReason.TIMEOUT)

    # -- what must hold ------------------------------------------------------------------------------------

    def end(self, group_id: int, reason: FinishReason) -> None:
        error = DeadlineExceeded("late") if reason is FinishReason.TIMEOUT else RequestAborted("cancelled")
        live = {r.request_id for r in self.requests.values() if r.group_id == group_id} - self.ended
        deltas = self.scheduler.finish(group_id, reason, error)
        assert {delta.request.request_id for delta in deltas} == live
        assert all((delta.sample, delta.request.error) == (None, error) for delta in deltas)
        self.take(deltas)

    def take(self, deltas: list[Delta]) -> None:
        """One token a request, none behind its end, and each as if the request were alone."""
        last = {delta.request.request_id: delta for delta in deltas}
        sampled = [delta.request.request_id for delta in deltas if delta.sample is not None]
        assert len(set(sampled)) == len(sampled)
        for delta in deltas:
            request = delta.request
            assert request.request_id not in self.ended, "told of after its end"
            self.requests.setdefault(request.request_id, request)
            if delta.sample is not None:
                self.outputs[request.request_id].append(delta.sample.token_id)
            if delta is last[request.request_id]:
                if request.is_finished:
                    self.ended.add(request.request_id)
                self.check_output(request)
            else:
                assert request.error is not None, "only a sibling's fault ends a request that goes on"

    def check_output(self, request: Request) -> None:
        output = self.outputs[request.request_id]
        alone, reason = self.alone[request.request_id]
        assert output == request.token_ids[request.num_prompt_tokens :]
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (output, request.finish_reason) == (alone, reason)
        else:
            assert output == alone[: len(output)]
            assert request.is_finished or len(output) < len(alone), "it should have ended"
        of_prompt = solo_prompt_logprobs(request) if request.sampling.prompt_logprobs is not None else []
        if output or request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert request.prompt_logprobs == of_prompt
        else:
            assert request.prompt_logprobs == of_prompt[: len(request.prompt_logprobs)]
        if request.finish_reason is FinishReason.ERROR:
            assert self.faulty & set(range(request.group_id, request.group_id + request.params.n))
            assert isinstance(request.error, RequestFailed)

    @invariant()
    def check(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        scheduler.check_integrity()
        self.requests |= {request.request_id: request for request in scheduler.requests}
        tables = {request_id: scheduler.kv.table(request) for request_id, request in self.requests.items()}
        held = {block_id for table in tables.values() for block_id in table}
        assert pool.num_free + len(held) == pool.num_blocks
        assert self.runner.blocks_in_flight <= held, "given back while a plan in flight names it"
        live = [request for request in self.requests.values() if request.request_id not in self.ended]
        assert scheduler.num_running + scheduler.num_waiting + scheduler.num_blocked == len(live)
        assert scheduler.num_blocked == sum(request.status is RequestStatus.BLOCKED for request in live)
        assert scheduler.next_deadline == min((r.deadline for r in live if r.deadline < NEVER), default=None)
        for request in live:
            most = scheduler.kv.num_blocks_for(request.num_tokens + request.num_awaited_tokens)
            assert len(tables[request.request_id]) <= most, "more than a block is wasted"
            assert request.num_cached_tokens < request.num_prompt_tokens
            assert request.status is RequestStatus.RUNNING or request.num_computed_tokens == 0
            assert scheduler.kv.enable_prefix_caching or request.num_cached_tokens == 0
            assert request.sampling.prompt_logprobs is None or request.num_cached_tokens == 0
            assert not request.sibling_ids or request.num_output_tokens == 0, "it shares its prompt first"
        for reader, writers in self.runner.cells_read_from.items():
            roots = {self.requests[writer].root_hash for writer in writers}
            assert roots <= {self.requests[reader].root_hash}, "one sees another's KV"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.runner.faults.clear()
        for request in self.requests.values():
            if request.prerequisites:
                self.scheduler.unblock(request, "tokenizing")
        self.run_until_done()
        assert self.ended == self.requests.keys()
        assert self.released == Counter({request.group_id for request in self.requests.values()})
        for request in self.requests.values():
            if request.index == 0 and request.error is None:
                siblings = range(request.request_id, request.request_id + request.params.n)
                assert self.ended.issuperset(siblings), "an output is missing"
        assert self.scheduler.requests == []
        assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_blocks
        # What ended last is dropped by the next plan, whose own request is all that is left.
        last = make_request((1,), request_id=self.num_ids, max_tokens=0, clock=self.clock)
        self.take_in(last)
        self.run_until_done()
        assert set(self.runner.rows) == {last.request_id}

    def run_until_done(self) -> None:
        """Every step computes something, and whoever is preempted waits for another to go on meanwhile."""
        for _ in range(200 + self.num_ids**2 * self.capacity):
            if not self.core.has_work:
                return
            self.take(self.core.step())
            self.check()
        raise AssertionError("some request makes no progress")


class SchedulerMachineAtDepth2(SchedulerMachine):
    depth = 2


@pytest.mark.parametrize("machine", [SchedulerMachine, SchedulerMachineAtDepth2], ids=["depth 1", "depth 2"])
@pytest.mark.parametrize(
    "examples",
    [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
    ids=["few", "many"],
)
def test_any_history_gives_each_request_its_solo_tokens_and_leaks_nothing(
    machine: type[SchedulerMachine], examples: settings
) -> None:
    run_state_machine_as_test(machine, settings=examples)
