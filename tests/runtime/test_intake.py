from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeClock
from pydantic import ValidationError

from motet.errors import InvalidRequest, PromptTooLong
from motet.lora.adapter import AdapterRef
from motet.lora.generation import AdapterLease, Generation
from motet.params import SamplingParams
from motet.runtime.block_hash import root_hash
from motet.runtime.intake import Intake
from motet.runtime.request import Request, RequestStatus
from motet.runtime.scheduler_output import LogitsRules

EOS = 2


def make_intake(
    *,
    max_model_len: int = 64,
    kv_capacity: int = 128,
    seed: int = 0,
    clock: FakeClock | None = None,
    model_digest: bytes = b"model",
    **defaults: Any,
) -> Intake:
    filled = {
        "do_sample": False,
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "repetition_penalty": None,
        **defaults,
    }
    return Intake(
        vocab_size=100,
        max_model_len=max_model_len,
        kv_capacity=kv_capacity,
        eos_token_ids=(EOS, 3),
        defaults=SimpleNamespace(**filled),  # type: ignore[arg-type]  # the real one lives behind torch
        model_digest=model_digest,
        kv_format=("float32", "fake:16"),
        seed=seed,
        clock=clock or FakeClock(),
    )


def lease(ref: AdapterRef | None, slot: int = 5) -> AdapterLease | None:
    return AdapterLease(Generation(ref.name, ref=ref), slot) if ref is not None else None


def make(
    intake: Intake,
    params: SamplingParams | None = None,
    *,
    tenant: str = "default",
    adapter: AdapterRef | None = None,
    priority: int = 0,
    deadline: float | None = None,
) -> Request:
    return intake.make_request(
        params or SamplingParams(),
        tenant=tenant,
        adapter=lease(adapter),
        priority=priority,
        deadline=deadline,
    )


# -- prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "max_tokens"), [(63, 1), (63, 256), (64, 0)])
def test_a_prompt_that_leaves_room_for_its_first_token_is_taken(length: int, max_tokens: int) -> None:
    make_intake(max_model_len=64).check_prompt([1] * length, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(("length", "max_tokens"), [(64, 1), (65, 0), (5000, 256)])
def test_case_21_a_prompt_longer_than_the_context_is_refused_at_once(length: int, max_tokens: int) -> None:
    with pytest.raises(PromptTooLong, match=rf"the prompt has {length} tokens.* 64 .*max_model_len.*shorten"):
        make_intake(max_model_len=64).check_prompt([1] * length, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(("length", "max_tokens"), [(32, 1), (33, 0)])
def test_case_21_a_prompt_longer_than_all_blocks_is_refused_at_once(length: int, max_tokens: int) -> None:
    intake = make_intake(max_model_len=64, kv_capacity=32)
    with pytest.raises(PromptTooLong, match=rf"the prompt has {length} tokens.*holds 32.*kv_cache_bytes"):
        intake.check_prompt([1] * length, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(("max_model_len", "kv_capacity"), [(10, 128), (64, 10)])
def test_case_21_an_answer_is_cut_to_what_the_context_and_the_cache_hold(
    max_model_len: int, kv_capacity: int
) -> None:
    request = make(make_intake(max_model_len=max_model_len, kv_capacity=kv_capacity))
    request.set_prompt([1] * 7, None)
    assert request.params.max_tokens == 256
    assert request.max_output_tokens == 3


def test_case_26_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"the prompt is empty.*at least one token"):
        make_intake().check_prompt([], SamplingParams())


@pytest.mark.parametrize("wrong", [-1, 100, 2**63])
def test_token_ids_outside_the_vocabulary_are_refused_by_name(wrong: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"the prompt: token id {wrong} is outside .*\(0 to 99\)"):
        make_intake().check_prompt([0, 99, wrong, 5], SamplingParams())
    make_intake().check_prompt([0, 99], SamplingParams())


# -- parameters ------------------------------------------------------------------------------------------------


def test_more_logprobs_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^logprobs is 101, but the vocabulary has 100"):
        make(make_intake(), SamplingParams(logprobs=101))
    with pytest.raises(InvalidRequest, match=r"^prompt_logprobs is 101, but the vocabulary has 100"):
        make(make_intake(), SamplingParams(prompt_logprobs=101))
    assert make(make_intake(), SamplingParams(logprobs=100)).sampling.logprobs == 100


def test_each_of_n_outputs_has_an_id_of_its_own() -> None:
    intake = make_intake()
    requests = [make(intake, SamplingParams(n=n)) for n in (1, 3, 2, 1)]
    ids = [i for request in requests for i in (request.request_id, *request.sibling_ids)]
    assert ids == sorted(set(ids))
    assert [len(request.sibling_ids) for request in requests] == [0, 2, 1, 0]
    assert [request.group_id for request in requests] == [request.request_id for request in requests]


def test_stop_token_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids: token id 100"):
        make(make_intake(), SamplingParams(stop_token_ids=(5, 100)))


def test_without_do_sample_decoding_is_greedy_whatever_temperature_the_model_names() -> None:
    sampling = make(make_intake(temperature=0.6)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 1.0, 0.0)


def test_what_is_not_given_comes_from_the_model() -> None:
    intake = make_intake(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)
    sampling = make(intake).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 0.9, 0.1)
    assert make(make_intake(do_sample=True)).sampling.temperature == 1.0


def test_what_is_given_is_kept_zeros_included() -> None:
    intake = make_intake(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)
    sampling = make(intake, SamplingParams(temperature=0.0, top_k=0, top_p=0.0, min_p=0.0)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 0.0, 0.0)


def test_case_4_ignore_eos_leaves_only_the_stop_token_ids() -> None:
    params = SamplingParams(stop_token_ids=(7,), min_tokens=5)
    assert make(make_intake(), params).sampling.end_token_ids == {EOS, 3, 7}
    assert make(make_intake(), params).sampling.min_tokens == 5
    ignoring = params.model_copy(update={"ignore_eos": True})
    assert make(make_intake(), ignoring).sampling.end_token_ids == {7}


def test_a_seed_is_kept_and_others_follow_from_the_engines_and_the_order_of_arrival() -> None:
    assert make(make_intake(), SamplingParams(seed=2**64 - 1)).sampling.seed == 2**64 - 1
    intakes = [make_intake(seed=seed) for seed in (0, 0, 1)]
    first, same, other = ([make(intake).sampling.seed for _ in range(3)] for intake in intakes)
    assert first == same
    assert len({*first, *other}) == 6
    assert all(0 <= seed < 2**64 for seed in first)


# -- the request -----------------------------------------------------------------------------------------------


def test_a_request_is_blocked_and_has_what_it_was_given() -> None:
    clock = FakeClock(100.0)
    ref = AdapterRef("acme", 3, b"digest")
    request = make(
        make_intake(clock=clock),
        tenant="t",
        adapter=ref,
        priority=-2,
        deadline=1.5,
    )
    assert (request.status, request.timeline) == (RequestStatus.BLOCKED, [("blocked", 100.0)])
    assert (request.tenant, request.adapter_slot, request.priority) == ("t", 5, -2)
    assert request.adapter is not None and request.adapter.ref is ref and request.uses(ref)
    assert request.deadline == 101.5
    assert make(make_intake(clock=clock)).deadline == float("inf")


def test_ids_are_never_used_twice_and_follow_the_order_of_arrival() -> None:
    intake = make_intake()
    requests = [make(intake) for _ in range(5)]
    assert [request.request_id for request in requests] == sorted(
        {request.request_id for request in requests}
    )


def test_case_7_and_9_only_equal_model_adapter_and_tenant_share_a_root() -> None:
    refs = [None, AdapterRef("a", 1, b"A"), AdapterRef("b", 2, b"B"), AdapterRef("", 3, b"")]
    roots = [
        make(make_intake(model_digest=model), tenant=tenant, adapter=ref).root_hash
        for model in (b"model", b"other")
        for ref in refs
        for tenant in ("x", "y")
    ]
    assert len(set(roots)) == len(roots)
    assert roots[2] == root_hash(b"model", "float32", "fake:16", b"A", "tenant:x")


def test_case_8_a_name_loaded_again_shares_a_root_only_if_its_content_is_the_same() -> None:
    intake = make_intake()
    old, reloaded, changed = (
        make(intake, adapter=AdapterRef("a", generation, digest)).root_hash
        for generation, digest in ((1, b"A"), (2, b"A"), (3, b"changed"))
    )
    assert old == reloaded != changed


def test_a_request_whose_adapter_is_not_known_yet_gets_its_root_when_it_is() -> None:
    intake = make_intake()
    unknown = AdapterLease(Generation("a"))
    request = intake.make_request(SamplingParams(), tenant="x", adapter=unknown, priority=0, deadline=None)
    assert (request.root_hash, request.adapter_slot) == (b"", -1)
    unknown.generation.ref = AdapterRef("a", 1, b"A")
    intake.set_root_hash(request)
    assert request.root_hash == root_hash(b"model", "float32", "fake:16", b"A", "tenant:x")


# -- rules for logits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "most"), [("stop", 10_000), ("bad_words", 100_000)])
def test_what_is_searched_for_in_each_step_has_a_bound(field: str, most: int) -> None:
    words = ("a" * (most - 1), "b")
    make(make_intake(), SamplingParams(**{field: words}))
    with pytest.raises(ValidationError, match=f"{field}: .*{most} characters"):
        SamplingParams(**{field: (*words, "c")})


def test_a_request_without_rules_has_none() -> None:
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}}
    for params in (SamplingParams(), SamplingParams(**neutral)):
        assert make(make_intake(), params).sampling.rules is None


def test_rules_are_resolved_with_the_models_own_repetition_penalty() -> None:
    intake = make_intake(repetition_penalty=1.2)
    assert make(intake).sampling.rules == LogitsRules(repetition_penalty=1.2)
    assert make(intake, SamplingParams(repetition_penalty=1.0)).sampling.rules is None
    params = SamplingParams(
        presence_penalty=1, frequency_penalty=-0.5, logit_bias={3: 2.0}, allowed_token_ids=(3, 4)
    )
    assert make(intake, params).sampling.rules == LogitsRules(1.2, -0.5, 1.0, ((3, 2.0),), (), (3, 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logit_bias": {0: 1.0, 100: 1.0}}, "logit_bias: token id 100 is outside the vocabulary"),
        ({"allowed_token_ids": (0, 100)}, "allowed_token_ids: token id 100 is outside"),
        ({"allowed_token_ids": ()}, "no token is left to choose"),
        ({"allowed_token_ids": (EOS, 3), "min_tokens": 1}, "no token is left to choose"),
    ],
    ids=str,
)
def test_case_27_ids_outside_the_vocabulary_and_nothing_allowed_are_refused(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make(make_intake(), SamplingParams(**wrong))


def test_case_27_allowed_without_bad_words_must_leave_something() -> None:
    intake = make_intake()
    few = make(intake, SamplingParams(allowed_token_ids=(7, 8, EOS), min_tokens=1)).sampling
    assert intake.forbid(few, ((7,), (8, 8))).rules == LogitsRules(
        bad_words=((7,), (8, 8)), allowed_token_ids=(7, 8, EOS)
    )
    with pytest.raises(InvalidRequest, match="no token is left to choose"):
        intake.forbid(few, ((7,), (8,)))
    everything = tuple((token_id,) for token_id in range(100))
    plain = make(intake).sampling
    assert intake.forbid(plain, everything[1:]).rules == LogitsRules(bad_words=everything[1:])
    with pytest.raises(InvalidRequest, match="no token is left to choose"):
        intake.forbid(plain, everything)
    with pytest.raises(InvalidRequest, match="bad_words: token id 100 is outside"):
        intake.forbid(plain, ((1, 100),))
