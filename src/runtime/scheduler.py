"""Scheduler: which tokens of which requests the next step computes, and what its result means.

There is no prefill phase and no decode phase, only `num_computed_tokens` catching up with the tokens that
are known. One token budget is spent over prefill chunks and decodes alike, in the policy's order. A plan
may be made while earlier ones are still in flight; KV blocks and slots are given back only when no plan in
flight names their request.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable

from motet.errors import MotetError, RequestFailed
from motet.runtime.kv_cache_manager import KVCacheManager
from motet.runtime.policy import Policy, order
from motet.runtime.request import Delta, FinishReason, Request, RequestStatus
from motet.runtime.scheduler_output import IN_FLIGHT, Chunk, NewRequest, SchedulerOutput, StepResult
from motet.runtime.step_budget import StepBudget


class Scheduler:
    """Owns every live request. Not thread-safe: the engine thread owns it.

    The n outputs that a user asked for with one prompt are a *group*, each a request of its own once the first
    of them, alone until then, has forked the others (its *siblings*). They share KV and a fate: what ends one
    before its time ends all. `on_release` is called once for each group, when all in it have ended and no plan
    in flight names them.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        itl_target: float | None = None,
        on_release: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.step_budget = StepBudget(max_num_batched_tokens, itl_target)
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._policy = policy
        self._on_release = on_release
        self._requests: dict[int, Request] = {}
        self._groups: dict[int, list[Request]] = {}
        """The same requests, by group."""
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._deadlines: list[tuple[float, int]] = []
        """Of groups, a heap."""
        self._num_blocks_sent: dict[int, int] = {}
        """For each request that the tensor side knows: how many of its blocks it was told."""
        self._dropped: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._leaving: list[Request] = []
        """Requests that ended while a plan in flight names them: they still hold what they held."""

    def _order(self, request: Request) -> tuple[int, bool, int]:
        return order(self._policy, request)

    # -- intake and ends ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a request in. Without prerequisites it waits for its turn at once."""
        self._requests[request.request_id] = request
        self._groups.setdefault(request.group_id, []).append(request)
        if request.deadline != float("inf") and request.index == 0:
            heapq.heappush(self._deadlines, (request.deadline, request.group_id))
        if not request.prerequisites:
            self._enqueue(request, RequestStatus.WAITING)

    def unblock(self, request: Request, prerequisite: str) -> None:
        """Something that a blocked request waited for is there. An ended request is left alone."""
        if not request.is_finished:
            request.prerequisites.remove(prerequisite)
            if not request.prerequisites:
                self._enqueue(request, RequestStatus.WAITING)

    def finish(self, group_id: int, reason: FinishReason, error: MotetError | None = None) -> list[Delta]:
        """Ends those of a group that have not ended, in whatever state they are; empty if all have."""
        deltas = []
        for request in list(self._groups.get(group_id, ())):
            if not request.is_finished:
                request.finish_reason, request.error = reason, error
                self._end(request)
                deltas.append(Delta(request, None))
        return deltas

    def abandon(self, reason: FinishReason, error: Callable[[], MotetError]) -> list[Delta]:
        """Ends every request although plans in flight may name it: nobody will wait for those any more.

        Each group gets an error of its own.
        """
        for request in self.requests:
            request.num_in_flight = 0
            if request.is_finished:
                self._release(request)
        return [delta for group_id in list(self._groups) for delta in self.finish(group_id, reason, error())]

    def expired(self, now: float) -> list[int]:
        """The live groups whose deadline has passed. Each is told once."""
        ids = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            ids.append(heapq.heappop(self._deadlines)[1])
        return ids

    @property
    def next_deadline(self) -> float | None:
        """When the next live group expires."""
        while self._deadlines and not self._is_live(self._deadlines[0][1]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_live(self, group_id: int) -> bool:
        return any(not request.is_finished for request in self._groups.get(group_id, ()))

    @property
    def has_work(self) -> bool:
        """Whether some request can be scheduled, now or when a plan in flight is done."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Preempted ones included."""
        return len(self._waiting)

    @property
    def num_blocked(self) -> int:
        return len(self._requests) - len(self._running) - len(self._waiting) - len(self._leaving)

    @property
    def requests(self) -> list[Request]:
        """All that are live, each sibling by itself, and those that ended while a plan in flight names them."""
        return list(self._requests.values())

    # -- the plan ------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step's plan; None if no request can advance now.

        Walks running and waiting requests in the policy's order. Whoever lacks KV blocks or a seat takes them
        from the last in that order, which the walk has not reached: planning never undoes itself. A victim that
        a plan in flight names sits this plan out instead, and gives its blocks to the next one.
        """
        budget = self.step_budget.tokens(self._running)
        self._running.sort(key=self._order)
        unvisited = list(self._running)
        new: list[NewRequest] = []
        chunks: list[Chunk] = []
        admitting = True
        while budget > 0:
            head = self._waiting[0] if admitting and self._waiting else None
            if unvisited and (head is None or self._order(unvisited[0]) < self._order(head)):
                request = unvisited.pop(0)
                ready = self._grow(request, unvisited)
            elif head is not None:
                request = head
                ready = admitting = self._admit(head, unvisited)
            else:
                break
            # Each running request behind this one keeps a token, so a long prompt delays nobody's next token.
            num_tokens = min(request.num_uncomputed_tokens, max(1, budget - len(unvisited))) if ready else 0
            if num_tokens > 0:
                if request.request_id not in self._num_blocks_sent:
                    new.append(_new(request))
                chunks.append(self._chunk(request, num_tokens))
                budget -= num_tokens
        if not chunks:
            return None
        plan = SchedulerOutput(tuple(self._dropped), tuple(new), tuple(chunks), tuple(self._copies))
        self._dropped, self._copies = [], []
        return plan

    def _grow(self, request: Request, later: list[Request]) -> bool:
        """Whether a running request has blocks for the tokens it may compute, now."""
        num_tokens = request.num_computed_tokens + request.num_uncomputed_tokens
        if not self._make_room(later, lambda victims: self.kv.missing_to_grow(request, num_tokens, victims)):
            return False
        self.kv.grow(request, num_tokens)
        return True

    def _admit(self, request: Request, later: list[Request]) -> bool:
        """Whether a waiting request could be made a running one, now."""
        seats = len(self._running) + len(self._leaving) + 1 - self.max_num_seqs
        prefix = self.kv.match(request, self._groups[request.group_id])
        if not self._make_room(later, lambda victims: self.kv.missing_for(request, prefix, victims), seats):
            return False
        self._waiting.remove(request)
        request.move_to(RequestStatus.RUNNING)
        self._running.append(request)
        request.num_computed_tokens = prefix.num_tokens
        if (copy := self.kv.admit(request, prefix)) is not None:
            self._copies.append(copy)
        if request.num_preemptions == 0 and request.index == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_query_tokens += request.num_prompt_tokens
            self.prefix_hit_tokens += request.num_cached_tokens
        self._fork(request)
        return True

    def _fork(self, request: Request) -> None:
        """Adds a request's siblings once they can share its prompt: all of it is computed but the last token."""
        if request.sibling_ids and self.kv.num_stored(request) >= request.num_prompt_tokens - 1:
            for sibling in request.fork():
                self.add(sibling)

    def _make_room(
        self, later: list[Request], missing: Callable[[list[Request]], int], seats: int = 0
    ) -> bool:
        """Takes blocks and seats from others until nothing is missing; False if something still is.

        First from those that are leaving anyway, then from the end of `later`; from nobody at all if even all
        of them together would not do.
        """
        candidates = [*self._leaving, *reversed(later)]
        victims: list[Request] = []
        while missing(victims) or len(victims) < seats:
            if len(victims) == len(candidates):
                return False
            victims.append(candidates[len(victims)])
        for victim in victims:
            if victim.status is RequestStatus.RUNNING:
                later.remove(victim)
                if victim.num_in_flight == 0:
                    self._preempt(victim)
        return all(victim.num_in_flight == 0 for victim in victims)

    def _preempt(self, request: Request) -> None:
        """Takes a running request's blocks; its known tokens are computed again when its turn comes."""
        self._running.remove(request)
        self._give_back(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request, RequestStatus.PREEMPTED)

    def _chunk(self, request: Request, num_tokens: int) -> Chunk:
        start = request.num_computed_tokens
        end = start + num_tokens
        token_ids = tuple(request.token_ids[start:end])
        token_ids += (IN_FLIGHT,) * (num_tokens - len(token_ids))
        next_prompt_ids: tuple[int, ...] = ()
        if request.sampling.prompt_logprobs is not None:
            last = min(end + 1, request.num_prompt_tokens)
            if last > len(request.prompt_logprobs):  # otherwise they were known before a preemption
                next_prompt_ids = tuple(request.token_ids[start + 1 : last])
        output_index = -1
        if end == request.num_tokens + request.num_awaited_tokens and request.max_output_tokens > 0:
            output_index = request.num_output_tokens + request.num_awaited_tokens
            request.num_awaited_tokens += 1
        request.num_computed_tokens = end
        request.num_in_flight += 1
        table = self.kv.table(request)
        sent = self._num_blocks_sent.get(request.request_id, 0)
        self._num_blocks_sent[request.request_id] = len(table)
        new_block_ids = (tuple(table[sent:]),)
        return Chunk(request.request_id, start, token_ids, new_block_ids, output_index, next_prompt_ids)

    # -- the result ----------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[Delta]:
        """Takes in what a plan brought, in the order in which plans were made."""
        deltas = []
        for chunk in plan.chunks:
            request = self._requests[chunk.request_id]
            request.num_in_flight -= 1
            if chunk.output_index >= 0:
                request.num_awaited_tokens -= 1
            if request.is_finished:
                if request.num_in_flight == 0:
                    self._release(request)
                continue
            deltas += self._take_samples(request, chunk, result)
            if request.error is None:  # what a fault has touched is for nobody else
                self.kv.publish(request, chunk.start + len(chunk.token_ids))
                self._fork(request)
            if request.finish_reason is not None:
                self._end(request)
                if request.error is not None:  # without one of its outputs there is no answer
                    deltas += self.finish(request.group_id, request.finish_reason, request.error)
        return deltas

    def _take_samples(self, request: Request, chunk: Chunk, result: StepResult) -> list[Delta]:
        fault = result.faults.get(request.request_id)
        if fault is not None:
            request.finish_reason, request.error = FinishReason.ERROR, fault
            return [Delta(request, None)]
        if chunk.next_prompt_ids:
            first = chunk.start + 1
            last = first + len(chunk.next_prompt_ids)
            request.prompt_logprobs[first:last] = result.prompt_logprobs[request.request_id]
        if request.max_output_tokens == 0 and chunk.start + len(chunk.token_ids) == request.num_prompt_tokens:
            request.finish_reason = FinishReason.LENGTH
            return [Delta(request, None)]
        deltas = []
        for sample in result.samples.get(request.request_id, ()) if chunk.output_index >= 0 else ():
            try:
                deltas.append(request.accept(sample))
            except Exception as exc:  # whatever a tokenizer may raise concerns this request's text alone
                request.finish_reason = FinishReason.ERROR
                request.error = RequestFailed(f"token {sample.token_id} could not be turned into text: {exc}")
                request.error.__cause__ = exc
                deltas.append(Delta(request, None))
            if request.finish_reason is not None:
                break
        return deltas

    # -- the one way out ---------------------------------------------------------------------------------

    def _enqueue(self, request: Request, status: RequestStatus) -> None:
        request.move_to(status)
        insort(self._waiting, request, key=self._order)

    def _end(self, request: Request) -> None:
        """Stop, length, abort, timeout, error: all ends of a request pass here."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status is not RequestStatus.BLOCKED:
            del self._waiting[bisect_left(self._waiting, self._order(request), key=self._order)]
        request.move_to(RequestStatus.FINISHED)
        self._leaving.append(request)
        if request.num_in_flight == 0:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Gives back all that an ended request holds, once no plan in flight names it."""
        self._give_back(request)
        del self._requests[request.request_id]
        self._leaving.remove(request)
        group = self._groups[request.group_id]
        group.remove(request)
        if not group:
            del self._groups[request.group_id]
            self._on_release(request)

    def _give_back(self, request: Request) -> None:
        """The one release site of KV blocks and of the runner's row: for preemption and for every end."""
        self.kv.free(request)
        if self._num_blocks_sent.pop(request.request_id, None) is not None:
            self._dropped.append(request.request_id)

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        self.kv.check_integrity()
        live = self._requests.values()
        grouped = {(r.request_id, group_id) for group_id, group in self._groups.items() for r in group}
        assert grouped == {(r.request_id, r.group_id) for r in live}
        assert sum(map(len, self._groups.values())) == len(live)
        assert self._waiting == sorted(self._waiting, key=self._order)
        assert {r.request_id for r in self._running} == {
            r.request_id for r in live if r.status is RequestStatus.RUNNING
        }
        assert {r.request_id for r in self._waiting} == {
            r.request_id for r in live if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        }
        assert len(self._running) + len(self._leaving) <= self.max_num_seqs, "the tensor side lacks rows"
        assert {r.request_id for r in self._leaving} == {r.request_id for r in live if r.is_finished}
        for request in live:
            holds = bool(self.kv.table(request))
            assert holds == (request.status is RequestStatus.RUNNING or request.num_in_flight > 0)
            assert not request.is_finished or request.num_in_flight > 0, "an ended request is kept"


def _new(request: Request) -> NewRequest:
    """Full data, as it stands: whoever is told anew has nothing in flight."""
    token_ids = request.token_ids if request.sampling.rules is not None else ()
    return NewRequest(
        request.request_id,
        request.adapter_slot,
        request.sampling,
        tuple(token_ids),
        request.num_prompt_tokens,
    )
