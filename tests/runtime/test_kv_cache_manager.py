from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import make_kv, make_request
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

from motet.runtime.kv_cache_manager import KVCacheManager
from motet.runtime.request import Request
from strategies import FEW, MANY, prompts

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


class KVCacheManagerMachine(RuleBasedStateMachine):
    """A manager beside the contents that its blocks would have: (root hash, all tokens up to the block's end)."""

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.integers(1, 3),
        caching=st.sampled_from([True, True, False]),
    )
    def make(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.kv = make_kv(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching)
        self.num_requests = 0
        self.outside: list[Request] = []
        self.inside: list[Request] = []
        self.contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    def content(self, request: Request, index: int) -> tuple[bytes, tuple[int, ...]]:
        return request.root_hash, tuple(request.token_ids[: (index + 1) * self.kv.block_size])

    @rule(
        prompt=prompts(12),
        tenant=st.sampled_from("xxy"),
        adapter_slot=st.sampled_from([-1, -1, 0]),
        group_size=st.sampled_from([1, 1, 2, 3]),
    )
    def enter(self, prompt: list[int], tenant: str, adapter_slot: int, group_size: int) -> None:
        group_id = self.num_requests
        for _ in range(group_size):
            request = make_request(
                prompt,
                request_id=self.num_requests,
                group_id=group_id,
                tenant=tenant,
                adapter_slot=adapter_slot,
            )
            self.outside.append(request)
            self.num_requests += 1

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.outside))
        siblings = [other for other in self.inside if other.group_id == request.group_id]
        others = [other for other in self.inside if other not in siblings]
        victims = data.draw(st.lists(st.sampled_from(others), unique=True)) if others else []
        missing = self.kv.missing_for(request, self.kv.match(request, siblings), victims)
        for victim in victims:
            self.free(victim)
        assert missing == self.kv.missing_for(request, self.kv.match(request, siblings)), (
            "what victims give back is foretold exactly"
        )
        if missing:
            assert self.kv.pool.num_free < self.kv.num_blocks_for(request.num_tokens)
            return
        free_before = self.kv.pool.num_free
        prefix = self.kv.match(request, siblings)
        copy = self.kv.admit(request, prefix)
        self.outside.remove(request)
        self.inside.append(request)
        num_computed = prefix.num_tokens
        assert num_computed < request.num_tokens
        table = self.kv.table(request)
        num_hits = num_computed // self.kv.block_size
        assert (copy is None) == (num_computed % self.kv.block_size == 0)
        if copy is not None:
            assert copy[1] == table[num_hits]
            assert any(
                self.kv.table(s)[num_hits] == copy[0]
                for s in siblings
                if s.num_computed_tokens >= num_computed
            )
        assert num_computed == 0 or self.kv.enable_prefix_caching or siblings
        shared = request.num_prompt_tokens - 1
        assert num_computed >= shared or all(s.num_computed_tokens < shared for s in siblings), "not shared"
        for index in range(num_hits):
            assert self.contents[table[index]] == self.content(request, index), "a hit that is not the same"
        for block_id in table[num_hits:]:
            self.contents.pop(block_id, None)
        assert free_before - self.kv.pool.num_free <= len(table)
        request.num_computed_tokens = num_computed

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), share=st.sampled_from([0.3, 0.7, 1.0]))
    def compute_and_publish(self, data: st.DataObject, share: float) -> None:
        request = data.draw(st.sampled_from(self.inside))
        request.num_computed_tokens += round(share * (request.num_tokens - request.num_computed_tokens))
        for index in range(request.num_computed_tokens // self.kv.block_size):
            self.contents[self.kv.table(request)[index]] = self.content(request, index)
        self.kv.publish(request, request.num_computed_tokens)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), token_id=st.integers(0, 2))
    def grow_by_a_token(self, data: st.DataObject, token_id: int) -> None:
        request = data.draw(st.sampled_from(self.inside))
        others = [other for other in self.inside if other is not request]
        victims = data.draw(st.lists(st.sampled_from(others), unique=True)) if others else []
        num_tokens = request.num_tokens + 1
        missing = self.kv.missing_to_grow(request, num_tokens, victims)
        for victim in victims:
            self.free(victim)
        assert missing == self.kv.missing_to_grow(request, num_tokens)
        num_before = len(self.kv.table(request))
        assert missing == max(0, self.kv.num_blocks_for(num_tokens) - num_before - self.kv.pool.num_free)
        if not missing:
            self.kv.grow(request, num_tokens)
            request.token_ids.append(token_id)
            for block_id in self.kv.table(request)[num_before:]:
                self.contents.pop(block_id, None)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        self.free(data.draw(st.sampled_from(self.inside)))

    def free(self, request: Request) -> None:
        self.inside.remove(request)
        self.outside.append(request)
        request.num_computed_tokens = 0
        self.kv.free(request)

    @rule()
    def free_whoever_holds_nothing(self) -> None:
        for request in self.outside:
            self.kv.free(request)

    @invariant()
    def tables_are_counted_and_tight(self) -> None:
        self.kv.check_integrity()
        held = {block_id for request in self.inside for block_id in self.kv.table(request)}
        assert self.kv.pool.num_free + len(held) == self.kv.pool.num_blocks
        for request in self.inside:
            assert len(self.kv.table(request)) == self.kv.num_blocks_for(request.num_tokens)
        assert not any(self.kv.table(request) for request in self.outside)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for request in list(self.inside):
                self.free(request)
            assert self.kv.pool.num_free == self.kv.pool.num_blocks


@pytest.mark.parametrize(
    "examples",
    [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["few", "many"],
)
def test_any_history_shares_only_equal_content_and_gives_all_back(examples: settings) -> None:
    run_state_machine_as_test(KVCacheManagerMachine, settings=examples)


def warm(
    kv: KVCacheManager, prompt: Sequence[int] = PROMPT, *, tenant: str = "x", adapter_slot: int = -1
) -> None:
    """Leaves the prompt's full blocks in the cache."""
    request = make_request(prompt, request_id=1000, tenant=tenant, adapter_slot=adapter_slot)
    kv.admit(request, kv.match(request))
    kv.publish(request, request.num_tokens)
    kv.free(request)


def hits(
    kv: KVCacheManager, prompt: Sequence[int] = PROMPT, *, tenant: str = "x", adapter_slot: int = -1
) -> int:
    request = make_request(prompt, request_id=1001, tenant=tenant, adapter_slot=adapter_slot)
    prefix = kv.match(request)
    kv.admit(request, prefix)
    kv.free(request)
    return prefix.num_tokens


def test_the_longest_cached_prefix_of_full_blocks_is_hit() -> None:
    kv = make_kv(block_size=4)
    warm(kv)
    assert hits(kv, PROMPT) == 8
    assert hits(kv, (*PROMPT[:7], 0, 0, 0)) == 4
    assert hits(kv, (0, *PROMPT[1:])) == 0


def test_the_last_token_is_always_computed() -> None:
    kv = make_kv(block_size=4)
    warm(kv, PROMPT[:8])
    assert hits(kv, PROMPT[:8]) == 4, "a hit on all eight would leave no logits to sample from"


def test_case_9_a_tenant_hits_its_own_blocks_and_no_other_tenants() -> None:
    kv = make_kv(block_size=4)
    warm(kv, tenant="x")
    assert hits(kv, tenant="y") == 0
    assert hits(kv, tenant="x") == 8


@pytest.mark.parametrize("first", [-1, 0, 1])
@pytest.mark.parametrize("second", [-1, 0, 1])
def test_case_7_an_adapter_or_the_base_hits_only_its_own_blocks(first: int, second: int) -> None:
    kv = make_kv(block_size=4)
    warm(kv, adapter_slot=first)
    assert hits(kv, adapter_slot=second) == (8 if first == second else 0)


def test_without_prefix_caching_nothing_is_ever_hit() -> None:
    kv = make_kv(block_size=4, enable_prefix_caching=False)
    warm(kv)
    assert (hits(kv), kv.pool.num_cached) == (0, 0)


def test_only_blocks_full_of_computed_tokens_are_published() -> None:
    kv = make_kv(block_size=4)
    request = make_request(PROMPT)
    kv.admit(request, kv.match(request))
    kv.publish(request, 7)
    assert hits(kv, tenant="default") == 4
    kv.publish(request, 8)
    assert hits(kv, tenant="default") == 8


def test_a_request_takes_what_its_prompt_needs_and_no_reservation_of_max_tokens() -> None:
    kv = make_kv(block_size=4, num_blocks=100)
    request = make_request(PROMPT, max_tokens=300)
    kv.admit(request, kv.match(request))
    assert len(kv.table(request)) == 3


@pytest.mark.parametrize("block_size", [1, 2, 4, 5])
def test_a_table_wastes_less_than_one_block(block_size: int) -> None:
    kv = make_kv(block_size=block_size, num_blocks=100)
    request = make_request(PROMPT)
    kv.admit(request, kv.match(request))
    for num_tokens in range(len(PROMPT), 40):
        kv.grow(request, num_tokens)
        assert 0 <= len(kv.table(request)) * block_size - num_tokens < block_size


def test_blocks_that_are_hit_are_not_counted_as_free_for_the_rest() -> None:
    kv = make_kv(block_size=4, num_blocks=3)
    warm(kv)
    other = make_request((0,), request_id=7)
    kv.admit(other, kv.match(other))
    request = make_request(PROMPT, tenant="x")
    assert kv.pool.num_free == 2
    assert kv.missing_for(request, kv.match(request)) == 1, (
        "two of three blocks are hits, and both are the free ones"
    )
    kv.free(other)
    assert kv.missing_for(request, kv.match(request)) == 0


def test_blocks_that_victims_share_with_the_newcomer_make_no_room_for_it() -> None:
    kv = make_kv(block_size=4, num_blocks=3)
    sharer, other = make_request(PROMPT[:8], request_id=1), make_request((0,), request_id=2)
    kv.admit(sharer, kv.match(sharer))
    kv.publish(sharer, 8)
    kv.admit(other, kv.match(other))
    newcomer = make_request(PROMPT, request_id=3)
    assert kv.missing_for(newcomer, kv.match(newcomer)) == 1
    assert kv.missing_for(newcomer, kv.match(newcomer), [sharer]) == 1, (
        "it would hit both blocks that come free"
    )
    assert kv.missing_for(newcomer, kv.match(newcomer), [other]) == 0


def test_a_victim_gives_back_only_what_nobody_else_holds() -> None:
    kv = make_kv(block_size=4, num_blocks=4)
    first, second = (make_request((*PROMPT[:4], i, i), request_id=i) for i in (1, 2))
    kv.admit(first, kv.match(first))
    kv.publish(first, 4)
    kv.admit(second, kv.match(second))
    newcomer = make_request([0] * 12, request_id=3)
    assert kv.missing_for(newcomer, kv.match(newcomer)) == 2
    assert (
        kv.missing_for(newcomer, kv.match(newcomer), [first])
        == kv.missing_for(newcomer, kv.match(newcomer), [second])
        == 1
    )
    assert kv.missing_for(newcomer, kv.match(newcomer), [first, second]) == 0
    assert kv.missing_to_grow(first, 16, [second]) == 0
    assert kv.missing_to_grow(first, 16) == 1


@pytest.mark.parametrize(
    ("length", "num_shared", "copies"),
    [(9, 2, False), (10, 2, True), (8, 1, True), (1, 0, False), (2, 0, True)],
)
@pytest.mark.parametrize("caching", [True, False])
def test_a_sibling_shares_full_blocks_and_copies_the_one_behind_them(
    length: int, num_shared: int, copies: bool, caching: bool
) -> None:
    kv = make_kv(block_size=4, enable_prefix_caching=caching)
    first, second = (make_request(range(length), request_id=i, group_id=0) for i in (0, 1))
    kv.admit(first, kv.match(first))
    assert kv.match(second, [first]).num_tokens == 0, "nothing is computed yet"
    kv.publish(first, length - 1)
    prefix = kv.match(second, [first])
    copy = kv.admit(second, prefix)
    assert prefix.num_tokens == length - 1
    assert [a == b for a, b in zip(kv.table(first), kv.table(second), strict=True)] == [True] * num_shared + [
        False
    ]
    assert copy == ((kv.table(first)[num_shared], kv.table(second)[num_shared]) if copies else None)
    assert kv.pool.num_blocks - kv.pool.num_free == num_shared + 2
    kv.check_integrity()


def test_a_copy_that_a_plan_has_yet_to_make_is_no_source_of_another() -> None:
    kv = make_kv(block_size=4, enable_prefix_caching=False)
    first, second, third = (make_request(range(6), request_id=i, group_id=0) for i in range(3))
    kv.admit(first, kv.match(first))
    kv.publish(first, 5)
    kv.admit(second, kv.match(second, [first]))
    kv.free(first)
    assert kv.match(third, [first, second]).num_tokens == 0
    kv.publish(second, 6)
    assert kv.match(third, [first, second]).num_tokens == 5


def test_who_wants_the_log_probabilities_of_its_prompt_reuses_only_what_has_told_them() -> None:
    kv = make_kv(block_size=4)
    warm(kv, tenant="default")
    request = make_request(PROMPT, prompt_logprobs=0)
    assert kv.match(request).num_tokens == 0
    request.prompt_logprobs += [{1: -1.0}] * 5
    assert kv.match(request).num_tokens == 4
    request.prompt_logprobs += [{1: -1.0}] * 3
    assert kv.match(request).num_tokens == 8


def test_a_request_cannot_be_admitted_twice() -> None:
    kv = make_kv()
    request = make_request()
    kv.admit(request, kv.match(request))
    with pytest.raises(AssertionError, match="admitted twice"):
        kv.admit(request, kv.match(request))
