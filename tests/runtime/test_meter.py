from __future__ import annotations

from collections import Counter

import pytest
from fakes import FakeClock, make_core, make_request, make_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from motet.lora.generation import AdapterLease, Generation
from motet.runtime.meter import OTHER, POWERS, REQUEST_SECONDS, STEP_SECONDS, Histogram, Meter, Tallies
from motet.runtime.request import FinishReason, Request


@given(st.lists(st.floats(0, 1e4) | st.sampled_from(STEP_SECONDS)))
@settings(max_examples=200)
def test_a_histogram_counts_as_prometheus_own(values: list[float]) -> None:
    ours = Histogram(STEP_SECONDS)
    theirs = TheirHistogram("x", "x", buckets=STEP_SECONDS, registry=CollectorRegistry())
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    samples = {s.labels["le"]: s.value for s in next(iter(theirs.collect())).samples if s.name == "x_bucket"}
    cumulated = [sum(ours.counts[: i + 1]) for i in range(len(ours.counts))]
    assert cumulated == list(samples.values())
    assert [*ours.bounds, float("inf")] == [float(bound) for bound in samples]
    assert ours.sum == pytest.approx(sum(values))


def test_a_value_observed_several_times_counts_as_often() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(2.0, 3)
    histogram.observe(2.5)
    assert (histogram.counts, histogram.sum) == ([0, 3, 1], 8.5)


@pytest.mark.parametrize("bounds", [STEP_SECONDS, REQUEST_SECONDS, POWERS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_buckets_of_time_reach_from_below_a_millisecond_to_minutes() -> None:
    assert REQUEST_SECONDS[0] < 0.001 and REQUEST_SECONDS[-1] >= 300
    assert STEP_SECONDS[0] < 0.001 and STEP_SECONDS[-1] >= 60


def test_names_beyond_the_limit_share_one_tally() -> None:
    tallies = Tallies(2)
    for name in ["", "a", "b", "c", "a", "d", ""]:
        tallies.of(name).requests += 1
    assert {name: tally.requests for name, tally in tallies.items()} == {"": 2, "a": 2, "b": 1, OTHER: 2}
    assert [name for name, _ in Tallies(0).items()] == []
    assert Tallies(0).of("a") == Tallies(0).of(OTHER)


def test_waits_between_tokens_are_counted_by_their_length() -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler)
    clock = FakeClock()
    meter = Meter(5, clock=clock)
    for i in range(3):
        request = make_request((1, i, 2), request_id=i, max_tokens=4, clock=clock)
        meter.enter(request)
        scheduler.add(request)
    clock.now = 5.0
    while core.has_work:
        clock.now += 0.03
        deltas = core.step()
        meter.count(deltas)
    assert meter.time_to_first_token.sum == pytest.approx(3 * 5.03)
    assert meter.inter_token_latency.sum == pytest.approx(3 * 3 * 0.03)
    assert sum(meter.inter_token_latency.counts) == 9
    assert sum(meter.queue_time.counts) == 3
    assert meter.request_duration.sum == pytest.approx(3 * 5.12)


def test_a_request_that_never_ran_has_an_end_but_no_prompt_and_no_queue_time() -> None:
    scheduler = make_scheduler()
    meter = Meter(5)
    request = make_request((1, 2, 3))
    meter.enter(request)
    scheduler.add(request)
    meter.count(scheduler.finish(0, FinishReason.ABORT))
    assert (meter.prompt_tokens, sum(meter.queue_time.counts), sum(meter.time_to_first_token.counts)) == (
        0,
        0,
        0,
    )
    assert meter.finished["abort"] == 1
    assert sum(meter.request_duration.counts) == 1


@st.composite
def plans(draw: st.DrawFn) -> list[dict]:
    kind = st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(1, 5), min_size=1, max_size=9),
            "max_tokens": st.integers(0, 5),
            "tenant": st.sampled_from("uvwxyz"),
            "adapter": st.sampled_from(["", *"abcde"]),
            "end_token_ids": st.sampled_from([(), (0, 1, 2, 3)]),
            "n": st.sampled_from([1, 1, 3]),
            "abort_at": st.integers(0, 12) | st.none(),
        }
    )
    return draw(st.lists(kind, min_size=1, max_size=8))


def check_a_random_run(kinds: list[dict], depth: int) -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=7)
    core, _ = make_core(scheduler, depth=depth)
    meter = Meter(3)
    requests: list[Request] = []
    for i, kind in enumerate(kinds):
        request = make_request(
            kind["prompt"],
            request_id=3 * i,
            n=kind["n"],
            max_tokens=kind["max_tokens"],
            tenant=kind["tenant"],
            end_token_ids=kind["end_token_ids"],
            max_total_tokens=20,
        )
        request.adapter = AdapterLease(Generation(kind["adapter"]), slot=0) if kind["adapter"] else None
        meter.enter(request)
        scheduler.add(request)
        requests.append(request)
    tokens: Counter[int] = Counter()
    step = 0
    while core.has_work:
        deltas = core.step()
        assert core.last_plan is not None
        meter.step(core.last_plan, 0.01)
        for i, kind in enumerate(kinds):
            if kind["abort_at"] == step:
                deltas += scheduler.finish(3 * i, FinishReason.ABORT)
        requests += {d.request: None for d in deltas if d.request not in requests}
        meter.count(deltas)
        tokens.update(delta.request.request_id for delta in deltas if delta.sample is not None)
        step += 1
    assert sum(meter.step_duration.counts) == sum(meter.step_requests.counts) == step
    assert meter.output_tokens == tokens.total() == sum(r.num_output_tokens for r in requests)
    assert +meter.finished == Counter(r.finish_reason.value for r in requests if r.finish_reason)
    assert sum(meter.request_duration.counts) == len(requests)
    assert sum(meter.time_to_first_token.counts) == len(tokens)
    assert sum(meter.inter_token_latency.counts) == tokens.total() - len(tokens)
    ran = [r for r in requests if "running" in dict(r.timeline)]
    assert sum(meter.queue_time.counts) == len(ran)
    of_prompts = sum(r.num_prompt_tokens for r in ran if r.index == 0)
    assert meter.prompt_tokens == of_prompts == scheduler.prefix_query_tokens
    for tallies, name_of in (
        (meter.adapters, lambda r: r.adapter.name if r.adapter else ""),
        (meter.tenants, lambda r: r.tenant),
    ):
        shown = dict(tallies.items())
        assert len(shown.keys() - {"", OTHER}) <= 3
        expected: dict[str, list[int]] = {}
        for request in requests:
            name = name_of(request)
            entry = expected.setdefault(name if name in shown else OTHER, [0, 0, 0])
            entry[0] += 1
            entry[1] += request.num_prompt_tokens if request in ran and request.index == 0 else 0
            entry[2] += tokens[request.request_id]
        assert {n: [t.requests, t.prompt_tokens, t.output_tokens] for n, t in shown.items()} == expected
    assert not meter._live


@given(plans(), st.sampled_from([1, 2]))
@settings(max_examples=200, deadline=None)
def test_what_is_counted_is_what_happened(kinds: list[dict], depth: int) -> None:
    check_a_random_run(kinds, depth)


@pytest.mark.slow
@given(plans(), st.sampled_from([1, 2]))
@settings(max_examples=4000, deadline=None)
def test_what_is_counted_is_what_happened_in_long_runs(kinds: list[dict], depth: int) -> None:
    check_a_random_run(kinds, depth)
