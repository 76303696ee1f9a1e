"""Bounds on what waits, quotas, and how long steps take, on a running engine."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from motet import (
    AdapterNotFound,
    AsyncEngine,
    DeadlineExceeded,
    EngineClosed,
    EngineConfig,
    InvalidRequest,
    QueueFull,
    QuotaExceeded,
    RequestAborted,
    SamplingParams,
    TenantPolicy,
)
from motet.runtime.recorded_steps import RecordedSteps
from tests.sdk.checks import settled, until

pytestmark = pytest.mark.anyio
PROMPT = list(range(3, 23))
ONE = SamplingParams(max_tokens=1)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SPENT = TenantPolicy(tokens_per_second=0.001, burst=20)
"""Enough for one prompt, and then for a long time nothing."""


def config(**settings) -> EngineConfig:
    return EngineConfig(kv_cache_bytes=4 << 20, threads=1, **settings)


async def spend(engine: AsyncEngine, **limits) -> None:
    """Uses up a quota of tenant x."""
    engine.set_tenant("x", SPENT.model_copy(update=limits))
    await engine.generate(PROMPT, ONE, tenant="x")


# -- quotas ----------------------------------------------------------------------------------------------


async def test_a_quota_delays_its_tenant_and_nobody_else(engine: AsyncEngine):
    engine.set_tenant("x", TenantPolicy(tokens_per_second=50.0, burst=20))
    first, second, text = [engine.stream(prompt, ONE, tenant="x") for prompt in (PROMPT, PROMPT, "ab")]
    other = await engine.generate(PROMPT, SHORT, tenant="y")
    assert len(other.token_ids) == 4
    assert first.usage is not None and second.usage is None
    await until(lambda: engine.stats().blocked == 2)
    assert len((await second.result()).token_ids) == 1
    assert second.usage.queue_time > 0.35 > first.usage.queue_time, "21 tokens at 50 a second"
    assert [state for state, _ in second.usage.timeline] == ["blocked", "waiting", "running", "finished"]
    assert (await text.result()).usage.queue_time > second.usage.queue_time
    assert second.usage.cached_tokens == 16, "and are charged as all others"


async def test_every_output_is_charged(engine: AsyncEngine):
    engine.set_tenant("x", TenantPolicy(tokens_per_second=100.0, burst=20))
    await engine.generate([5], SamplingParams(max_tokens=10, n=4, ignore_eos=True), tenant="x")
    assert (await engine.generate([5], ONE, tenant="x")).usage.queue_time > 0.15, "20 that it owes"


@pytest.mark.parametrize("prompt", [PROMPT, "some text"])
async def test_whatever_ends_a_delayed_request_ends_it_at_once(engine: AsyncEngine, prompt: object):
    await spend(engine)
    cancelled, aborted = (engine.stream(prompt, ONE, tenant="x", request_id=name) for name in ("c", "a"))
    late = engine.stream(prompt, ONE, tenant="x", deadline=0.1)
    dropped = engine.stream(prompt, ONE, tenant="x")
    await until(lambda: engine.stats().blocked == 4)
    cancelled.cancel()
    assert await engine.abort("a") is True
    del dropped
    for stream, error in ((cancelled, RequestAborted), (aborted, RequestAborted), (late, DeadlineExceeded)):
        with pytest.raises(error):
            await stream.__anext__()
    await settled(engine)


async def test_closing_ends_the_delayed_and_draining_waits_for_them(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, config())
    await engine.start()
    await spend(engine)
    delayed = engine.stream(PROMPT, ONE, tenant="x")
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await delayed.result()
    async with engine:
        await spend(engine, tokens_per_second=100.0)
        delayed = engine.stream(PROMPT, ONE, tenant="x")
        await engine.aclose(drain=None)
        assert len((await delayed.result()).token_ids) == 1


async def test_a_quota_that_changes_holds_for_what_waits(engine: AsyncEngine):
    await spend(engine)
    delayed = [engine.stream(PROMPT, ONE, tenant="x") for _ in range(3)]
    await until(lambda: engine.stats().blocked == 3)
    engine.set_tenant("x", TenantPolicy())
    with anyio.fail_after(20):
        for stream in delayed:
            await stream.result()


async def test_beyond_its_queue_a_quota_refuses_at_once_and_says_when_to_come_back(engine: AsyncEngine):
    await spend(engine, tokens_per_second=10.0, max_waiting=1)
    waiting = engine.stream([5], ONE, tenant="x")
    for prompt in (PROMPT, "some text"):
        with pytest.raises(QuotaExceeded, match="tenant 'x' has used up its quota") as caught:
            engine.stream(prompt, ONE, tenant="x")
        assert caught.value.retry_after > 0.0
    await engine.generate(PROMPT, ONE, tenant="y")
    await waiting.result()


async def test_a_text_that_the_quota_has_no_tokens_for_is_refused_by_the_stream(engine: AsyncEngine):
    engine.set_tenant("x", SPENT.model_copy(update={"max_waiting": 0}))
    await engine.generate(PROMPT[:15], ONE, tenant="x")
    stream = engine.stream("a text of more than four tokens", ONE, tenant="x")
    with pytest.raises(QuotaExceeded):
        await stream.__anext__()


async def test_a_batch_waits_for_its_quota(engine: AsyncEngine):
    engine.set_tenant("x", TenantPolicy(tokens_per_second=200.0, burst=20, max_waiting=0))
    results = await engine.generate_batch([PROMPT] * 5, ONE, tenant="x")
    assert [len(result.token_ids) for result in results] == [1] * 5


async def test_what_fails_before_it_begins_costs_nothing(engine: AsyncEngine):
    engine.set_tenant("x", SPENT.model_copy(update={"max_waiting": 0}))
    with pytest.raises(AdapterNotFound):
        engine.stream(PROMPT, ONE, tenant="x", adapter="unknown")
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine.stream(PROMPT, SamplingParams(logit_bias={10**6: 1.0}), tenant="x")
    stream = engine.stream([5], LONG, request_id="a")
    with pytest.raises(InvalidRequest, match="still live"):
        engine.stream(PROMPT, ONE, tenant="x", request_id="a")
    stream.cancel()
    await engine.generate(PROMPT, ONE, tenant="x")


# -- queues ----------------------------------------------------------------------------------------------


async def test_one_request_after_another_never_finds_the_queue_full(tiny_folder: Path):
    async with AsyncEngine(tiny_folder, config(max_num_seqs=1, max_waiting=0)) as engine:
        engine.set_tenant("x", TenantPolicy(max_waiting=0))
        ends = (await engine.generate(PROMPT, SHORT)).token_ids
        for stop in ends:
            stops = SamplingParams(max_tokens=20, stop_token_ids=[stop])
            await engine.generate(PROMPT, stops, tenant="x")  # another step was planned when it ended
            await engine.generate(PROMPT, SamplingParams(max_tokens=0), tenant="x")
        await settled(engine)


async def test_prompts_that_wait_have_a_bound_in_tokens(tiny_folder: Path):
    async with AsyncEngine(tiny_folder, config(max_num_seqs=1, max_waiting_tokens=30)) as engine:
        running = engine.stream(PROMPT, LONG)
        await running.__anext__()
        waiting = engine.stream(PROMPT, ONE)
        with pytest.raises(QueueFull, match=r"max_waiting_tokens \(30\)"):
            engine.stream(PROMPT, ONE)
        text = engine.stream("a text of more than ten tokens", ONE)
        with pytest.raises(QueueFull, match="max_waiting_tokens"):
            await text.__anext__()
        running.cancel()
        await waiting.result()
        await engine.generate(PROMPT, ONE)
        await settled(engine)


async def test_a_tenant_that_fills_its_own_queue_leaves_that_of_others_alone(tiny_folder: Path):
    async with AsyncEngine(tiny_folder, config(max_num_seqs=1)) as engine:
        for tenant in "xy":
            engine.set_tenant(tenant, TenantPolicy(max_waiting=2))
        running = engine.stream(PROMPT, LONG, tenant="z")
        await running.__anext__()
        streams = [engine.stream(PROMPT, ONE, tenant="x") for _ in range(2)]
        with pytest.raises(QueueFull, match=r"2 requests of tenant 'x' wait"):
            engine.stream(PROMPT, ONE, tenant="x")
        streams += [engine.stream(PROMPT, ONE, tenant="y") for _ in range(2)]
        running.cancel()
        for stream in streams:
            await stream.result()
        await settled(engine)


# -- steps -----------------------------------------------------------------------------------------------


async def test_prompts_take_less_of_each_step_where_a_stream_would_wait_longer_than_its_target(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RecordedSteps, "replays", lambda self, batch: False)
    async with AsyncEngine(tiny_folder, config(itl_target=0.02)) as engine:
        core = engine._running()[1].core
        steps, real, sizes = core._runner._steps, core._runner._steps._forward, []

        def slow_forward(batch):
            sizes.append(len(batch.input_ids))
            time.sleep(5e-4 * sizes[-1])
            return real(batch)

        steps._forward = slow_forward
        stream = engine.stream([5], SamplingParams(max_tokens=80, ignore_eos=True))
        await stream.__anext__()
        for i in range(2):
            once = SamplingParams(max_tokens=1)
            assert len((await engine.generate([5 + i] * 400, once)).token_ids) == 1
        beside = [size for size in sizes if size > 1]
        assert beside[0] == 128 and len(beside) > 10
        assert max(beside[8:]) <= 40, "more take longer than the target"
        stream.cancel()
        del sizes[:]
        await engine.generate([7] * 400, once)
        assert max(sizes) == 128, "nobody waits for a next token"
        await settled(engine)
