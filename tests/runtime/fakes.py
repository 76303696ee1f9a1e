"""Factories with keyword defaults, and a fake tensor side that shows every fault of the bookkeeping.

`FakeRunner` has a KV memory, one cell per KV slot, which it finds only through the block tables that plans
tell it. What it writes for a token depends on all tokens before it and on the adapter, as real KV does, and
what it samples depends on all cells of the request, read back. A block given to two, freed too early or
shared between adapters, a token lost, a wrong resume: each gives other tokens than `solo_run`.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from motet.errors import RequestFailed
from motet.lora.generation import AdapterLease, Generation
from motet.params import SamplingParams
from motet.runtime.block_hash import root_hash
from motet.runtime.block_pool import BlockPool
from motet.runtime.engine_core import EngineCore
from motet.runtime.kv_cache_manager import KVCacheManager
from motet.runtime.policy import POLICIES
from motet.runtime.request import Delta, FinishReason, Request
from motet.runtime.scheduler import Scheduler
from motet.runtime.scheduler_output import (
    IN_FLIGHT,
    Chunk,
    LogitsRules,
    NewRequest,
    Sample,
    SamplingSpec,
    SchedulerOutput,
    StepResult,
)

if TYPE_CHECKING:
    from motet.runtime.detokenizer import Detokenizer
    from motet.runtime.places import Place

VOCAB_SIZE = 13
RULES = LogitsRules(repetition_penalty=1.5)
"""Any but None has the fake model look at the request's tokens, as the tensor side knows them."""
END = 0
"""The end token of requests made with `end_token_ids=(END,)`."""


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeDetokenizer:
    """Spells token 1 as "b". Stops at one token's spelling, fails at another's, holds back a third's."""

    stop_at: int | None = None
    fail_at: int | None = None
    hold_back: int | None = None
    _held: str = ""

    def fork(self) -> FakeDetokenizer:
        return replace(self)

    def push(
        self, token_id: int, *, is_stop_token: bool = False, last: bool = False
    ) -> tuple[str, str | None]:
        if token_id == self.fail_at:
            raise ValueError("no such character")
        text, self._held = self._held + ("" if is_stop_token else chr(ord("a") + token_id)), ""
        if token_id == self.stop_at:
            return text[:-1], text[-1]
        if token_id == self.hold_back and not last:
            text, self._held = "", text
        return text, None


def make_sampling(
    *,
    seed: int = 0,
    min_tokens: int = 0,
    end_token_ids: Iterable[int] = (),
    temperature: float = 0.0,
    rules: LogitsRules | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingSpec:
    return SamplingSpec(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        logprobs=None,
        min_tokens=min_tokens,
        end_token_ids=frozenset(end_token_ids),
        rules=rules,
        prompt_logprobs=prompt_logprobs,
    )


def make_request(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    request_id: int = 0,
    max_tokens: int = 4,
    min_tokens: int = 0,
    max_total_tokens: int = 1000,
    end_token_ids: Iterable[int] = (),
    seed: int = 0,
    n: int = 1,
    prompt_logprobs: int | None = None,
    group_id: int = -1,
    tenant: str = "default",
    adapter_slot: int = -1,
    priority: int = 0,
    deadline: float = float("inf"),
    prerequisites: Iterable[str] = (),
    clock: Callable[[], float] | None = None,
    detokenizer: FakeDetokenizer | None = None,
    rules: LogitsRules | None = None,
    place: Place | None = None,
) -> Request:
    """A request with its prompt; ids are also the order of arrival. Each adapter slot has a digest of its own.

    Its siblings have the ids behind its own.
    """
    digest = None if adapter_slot < 0 else b"adapter %d" % adapter_slot
    request = Request(
        request_id=request_id,
        params=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, n=n),
        sampling=make_sampling(
            seed=seed,
            min_tokens=min_tokens,
            end_token_ids=end_token_ids,
            rules=rules,
            prompt_logprobs=prompt_logprobs,
        ),
        max_total_tokens=max_total_tokens,
        clock=clock or FakeClock(),
        priority=priority,
        deadline=deadline,
        tenant=tenant,
        adapter=AdapterLease(Generation("adapter"), adapter_slot) if adapter_slot >= 0 else None,
        place=place,
        group_id=group_id,
        sibling_ids=tuple(range(request_id + 1, request_id + n)),
        root_hash=root_hash(b"model", "float32", "fake", digest, f"tenant:{tenant}"),
        prerequisites=set(prerequisites),
    )
    request.set_prompt(list(prompt), cast("Detokenizer | None", detokenizer))
    return request


def make_kv(
    *, num_blocks: int = 16, block_size: int = 4, enable_prefix_caching: bool = True
) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), block_size, enable_prefix_caching=enable_prefix_caching)


def make_scheduler(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    policy: str = "priority",
    itl_target: float | None = None,
    enable_prefix_caching: bool = True,
    on_release: Callable[[Request], None] = lambda request: None,
) -> Scheduler:
    return Scheduler(
        make_kv(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        POLICIES[policy],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        itl_target=itl_target,
        on_release=on_release,
    )


def make_core(scheduler: Scheduler, *, depth: int = 1) -> tuple[EngineCore, FakeRunner]:
    runner = FakeRunner(
        num_blocks=scheduler.kv.pool.num_blocks,
        block_size=scheduler.kv.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )
    return EngineCore(scheduler, runner, depth=depth), runner


def run_until_done(core: EngineCore, *, max_steps: int = 1000) -> list[Delta]:
    """Steps until there is no work, with `check_integrity` behind each step."""
    deltas: list[Delta] = []
    for _ in range(max_steps):
        if not core.has_work:
            return deltas
        deltas += core.step()
        core.scheduler.check_integrity()
    raise AssertionError(f"not done after {max_steps} steps")


def solo_run(request: Request, choice: int = 0) -> tuple[list[int], FinishReason]:
    """What the fake model says to a request that is alone: no blocks, no chunks, no plans, no siblings."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    sampling = replace(request.sampling, choice=choice)
    output: list[int] = []
    limit = min(request.params.max_tokens, request.max_total_tokens - len(prompt))
    while len(output) < limit:
        states = _states(prompt + output, request.adapter_slot)
        output.append(_choose(states, sampling, len(output), prompt + output))
        if output[-1] in sampling.end_token_ids and len(output) > request.params.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def solo_prompt_logprobs(request: Request) -> list[dict[int, float] | None]:
    """What the fake model says of a request's prompt."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    states = _states(prompt, request.adapter_slot)
    return [None, *(_logprobs(states[:i], prompt[i]) for i in range(1, len(prompt)))]


def _states(token_ids: Sequence[int], adapter_slot: int) -> list[int]:
    states: list[int] = []
    for token_id in token_ids:
        states.append(_kv_of(states[-1] if states else 0, token_id, adapter_slot))
    return states


def _kv_of(before: int, token_id: int, adapter_slot: int) -> int:
    return hash((before, token_id, adapter_slot))


def _choose(
    states: Sequence[int], sampling: SamplingSpec, output_index: int, token_ids: Sequence[int]
) -> int:
    masked = sampling.end_token_ids if output_index < sampling.min_tokens else frozenset()
    candidates = [token_id for token_id in range(VOCAB_SIZE) if token_id not in masked]
    seen = () if sampling.rules is None else tuple(token_ids)
    return candidates[hash((*states, sampling.seed, sampling.choice, *seen)) % len(candidates)]


def _logprobs(states: Sequence[int], token_id: int) -> dict[int, float]:
    return {token_id: float(hash((*states, token_id)))}


@dataclass
class _Cell:
    """One KV slot's content."""

    state: int
    writer: int
    """The request that computed it."""


@dataclass
class _Row:
    """What the tensor side keeps of a request."""

    new: NewRequest
    block_ids: list[int] = field(default_factory=list)
    num_tokens: int | None = None
    """Tokens whose KV is there; None before the first chunk."""
    last_sample: int | None = None
    token_ids: list[int] = field(default_factory=list)
    """What rules would look at."""


@dataclass
class _Handle:
    runner: FakeRunner
    step_result: StepResult
    named_blocks: set[int]
    runs: bool

    def wait(self) -> None:
        self.runner.waited.append(self)

    def result(self) -> StepResult:
        assert self.runner.in_flight.popleft() is self, (
            "plans are taken in in the order in which they were made"
        )
        return self.step_result


class FakeRunner:
    """Keeps what a plan must keep to, and computes it with the fake model when it is submitted."""

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.rows: dict[int, _Row] = {}
        self.plans: list[SchedulerOutput] = []
        self.in_flight: deque[_Handle] = deque()
        self.runs: Callable[[SchedulerOutput], bool] = lambda plan: True
        """Which plans are computed by themselves."""
        self.waited: list[_Handle] = []
        self.faults: dict[int, RequestFailed] = {}
        """Requests to report as faulty in the next plan that names them."""
        self.cells_read_from: dict[int, set[int]] = {}
        """By request: which requests had computed the cells that it read."""
        self._memory: dict[tuple[int, int], _Cell] = {}

    @property
    def blocks_in_flight(self) -> set[int]:
        """The blocks of all requests that plans in flight name."""
        return set().union(*(handle.named_blocks for handle in self.in_flight))

    def submit(self, plan: SchedulerOutput) -> _Handle:
        plan = pickle.loads(pickle.dumps(plan))
        self.plans.append(plan)
        for request_id in plan.dropped:
            del self.rows[request_id]
        for new in plan.new:
            assert new.request_id not in self.rows, "told twice"
            self.rows[new.request_id] = _Row(new, token_ids=list(new.token_ids))
        assert len(self.rows) <= self.max_num_seqs, "no row left"
        assert 0 < sum(len(chunk.token_ids) for chunk in plan.chunks) <= self.max_num_batched_tokens
        counts = Counter(chunk.request_id for chunk in plan.chunks)
        assert set(counts.values()) == {1}, "one chunk a request"
        samples: dict[int, tuple[Sample, ...]] = {}
        faults: dict[int, RequestFailed] = {}
        of_prompts: dict[int, tuple[dict[int, float], ...]] = {}
        self._copy(plan.copies)
        for chunk in plan.chunks:
            self._compute(chunk)
            if chunk.next_prompt_ids:
                of_prompts[chunk.request_id] = self._prompt_logprobs(chunk)
            if chunk.request_id in self.faults:
                faults[chunk.request_id] = self.faults.pop(chunk.request_id)
                row = self.rows[chunk.request_id]
                row.last_sample = END  # the next plan may be on its way and name it
                row.token_ids += [END] * (chunk.output_index >= 0)
            elif chunk.output_index >= 0:
                samples[chunk.request_id] = (self._sample(chunk),)
        named = {block_id for chunk in plan.chunks for block_id in self.rows[chunk.request_id].block_ids}
        handle = _Handle(self, StepResult(samples, faults, of_prompts), named, self.runs(plan))
        self.in_flight.append(handle)
        return handle

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        destinations = {destination for _, destination in copies}
        assert len(destinations) == len(copies), "one block becomes two"
        assert not destinations & {source for source, _ in copies}, "copied before it is whole"
        assert not destinations & {b for row in self.rows.values() for b in row.block_ids}, (
            "overwritten in use"
        )
        for source, destination in copies:
            for offset in range(self.block_size):
                if (source, offset) in self._memory:
                    self._memory[destination, offset] = self._memory[source, offset]

    def _prompt_logprobs(self, chunk: Chunk) -> tuple[dict[int, float], ...]:
        assert len(chunk.next_prompt_ids) <= len(chunk.token_ids)
        first = chunk.start + 1
        states = self._read(chunk.request_id, first + len(chunk.next_prompt_ids) - 1)
        return tuple(_logprobs(states[:i], t) for i, t in enumerate(chunk.next_prompt_ids, first))

    def _compute(self, chunk: Chunk) -> None:
        row = self.rows[chunk.request_id]
        assert row.num_tokens in (None, chunk.start), "each chunk goes on where the one before it ended"
        (new_block_ids,) = chunk.new_block_ids
        row.block_ids += new_block_ids
        assert len(set(row.block_ids)) == len(row.block_ids)
        assert all(0 <= block_id < self.num_blocks for block_id in row.block_ids)
        others = {b for other in self.rows.values() if other is not row for b in other.block_ids}
        states = self._read(chunk.request_id, chunk.start)
        for position, token_id in enumerate(chunk.token_ids, chunk.start):
            if token_id == IN_FLIGHT:
                assert row.last_sample is not None, "nothing is in flight"
                token_id = row.last_sample
            states.append(_kv_of(states[-1] if states else 0, token_id, row.new.adapter_slot))
            assert row.block_ids[position // self.block_size] not in others, "writes into a shared block"
            self._memory[self._slot(row, position)] = _Cell(states[-1], chunk.request_id)
        row.num_tokens = chunk.start + len(chunk.token_ids)

    def _sample(self, chunk: Chunk) -> Sample:
        row = self.rows[chunk.request_id]
        assert row.num_tokens is not None
        states = self._read(chunk.request_id, row.num_tokens)
        if row.new.sampling.rules is not None:
            assert len(row.token_ids) == row.new.num_prompt_tokens + chunk.output_index
        row.last_sample = _choose(states, row.new.sampling, chunk.output_index, row.token_ids)
        row.token_ids.append(row.last_sample)
        return Sample(row.last_sample)

    def _read(self, request_id: int, num_tokens: int) -> list[int]:
        row = self.rows[request_id]
        cells = [self._memory[self._slot(row, position)] for position in range(num_tokens)]
        self.cells_read_from.setdefault(request_id, set()).update(cell.writer for cell in cells)
        return [cell.state for cell in cells]

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        return row.block_ids[position // self.block_size], position % self.block_size
