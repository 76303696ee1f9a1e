"""n > 1: several answers to one prompt, in one stream."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from transformers import LlamaForCausalLM

from motet import (
    AdapterNotFound,
    AsyncEngine,
    DeadlineExceeded,
    EngineClosed,
    EngineConfig,
    EngineDead,
    PromptTooLong,
    RequestAborted,
    RequestFailed,
    SamplingParams,
)
from tests.sdk.checks import settled, until
from tests.sdk.conftest import CONFIG
from tests.tiny import EOS, greedy

pytestmark = pytest.mark.anyio

PROMPT = [3 + (7 * i) % 250 for i in range(37)]
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16
"""Of one block of 16 tokens of the tiny model."""


def sampled(n: int, num_tokens: int, *, seed: int | None = 5, **more) -> SamplingParams:
    settings = {"ignore_eos": True, "temperature": 1.5} | more
    return SamplingParams(n=n, max_tokens=num_tokens, seed=seed, **settings)


def ids(completion) -> list[tuple[int, ...]]:
    return [output.token_ids for output in completion.outputs]


async def test_case_28_a_seed_gives_four_different_answers_the_same_each_time_and_in_company(
    engine: AsyncEngine,
):
    first = await engine.generate(PROMPT, sampled(4, 20))
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert len(set(ids(first))) == 4
    assert (first.text, first.token_ids, first.finish_reason) == (
        first.outputs[0].text,
        first.outputs[0].token_ids,
        "length",
    )
    again = []

    async def run() -> None:
        again.append(await engine.generate(PROMPT, sampled(4, 20)))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(run)
    assert [ids(completion) for completion in again] == [ids(first)] * 3
    assert (await engine.generate(PROMPT, sampled(1, 20))).token_ids == first.token_ids
    assert ids(await engine.generate(PROMPT, sampled(2, 20))) == ids(first)[:2]
    unseeded = [ids(await engine.generate(PROMPT, sampled(2, 20, seed=None))) for _ in range(2)]
    assert len({answer for answers in unseeded for answer in answers}) == 4


async def test_greedy_answers_are_all_transformers_own(engine: AsyncEngine, tiny_model: LlamaForCausalLM):
    completion = await engine.generate(
        PROMPT, SamplingParams(n=3, max_tokens=15, ignore_eos=True, temperature=0)
    )
    assert ids(completion) == [tuple(greedy(tiny_model, PROMPT, 15))] * 3


async def test_usage_counts_the_prompt_once_and_the_tokens_of_all(engine: AsyncEngine):
    usage = (await engine.generate(PROMPT, sampled(3, 9))).usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (37, 0, 27)
    assert 0 <= usage.queue_time <= usage.ttft <= usage.total_time
    assert (await engine.generate(PROMPT, sampled(3, 9))).usage.cached_tokens == 32
    assert engine.stats().prefix_query_tokens == 2 * 37


async def test_case_28_the_first_that_ends_does_not_mute_the_rest(engine: AsyncEngine):
    free = await engine.generate(PROMPT, sampled(4, 40))
    stop = free.outputs[2].token_ids[3]
    params = sampled(4, 40, stop_token_ids=[stop])
    expected = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in ids(free)]
    assert len(set(map(len, expected))) > 1
    stream = engine.stream(PROMPT, params)
    tokens = [token async for token in stream]
    for index, answer in enumerate(expected):
        own = [token for token in tokens if token.index == index]
        assert tuple(token.token_id for token in own) == answer
        reason = "stop" if answer[-1] == stop else "length"
        assert [token.finish_reason for token in own] == [None] * (len(own) - 1) + [reason]
    completion = await stream.result()
    assert ids(completion) == expected
    for output in completion.outputs:
        assert output.text == "".join(token.text for token in tokens if token.index == output.index)
        assert output.stop_reason == (stop if output.finish_reason == "stop" else None)


async def test_answers_of_one_prompt_hold_its_full_blocks_once(tiny_folder: Path):
    for caching in (True, False):
        config = EngineConfig(kv_cache_bytes=64 * BLOCK_BYTES, threads=1, enable_prefix_caching=caching)
        async with AsyncEngine(tiny_folder, config) as engine:
            prompt = [5 + i % 200 for i in range(20 * 16 + 3)]
            async with engine.stream(prompt, sampled(8, 400)) as stream:
                seen: set[int] = set()
                async for token in stream:
                    seen.add(token.index)
                    if len(seen) == 8:
                        break
                assert 28 <= engine.stats().kv_blocks_used <= 36, (
                    "20 are shared, and each has one or two alone"
                )
            await settled(engine)


async def test_logprobs_are_each_answers_own(engine: AsyncEngine):
    completion = await engine.generate(PROMPT, sampled(3, 6, logprobs=1))
    for output in completion.outputs:
        assert output.logprobs is not None
        assert all(t in top for t, top in zip(output.token_ids, output.logprobs, strict=True))


async def test_case_5_max_tokens_0_and_1(engine: AsyncEngine):
    none = await engine.generate(PROMPT, sampled(3, 0))
    assert [(o.token_ids, o.finish_reason) for o in none.outputs] == [((), "length")] * 3
    assert none.usage.output_tokens == 0
    one = await engine.generate(PROMPT, sampled(16, 1))
    assert [len(answer) for answer in ids(one)] == [1] * 16
    assert len(set(ids(one))) > 1


async def test_more_answers_than_seats_all_come(tiny_folder: Path, engine: AsyncEngine):
    expected = ids(await engine.generate(PROMPT, sampled(7, 12)))
    for caching in (True, False):
        config = EngineConfig(
            kv_cache_bytes=4 << 20,
            threads=1,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            enable_prefix_caching=caching,
        )
        async with AsyncEngine(tiny_folder, config) as narrow:
            assert ids(await narrow.generate(PROMPT, sampled(7, 12))) == expected
            await settled(narrow)


async def test_case_18_and_21_a_pool_too_small_for_all_gives_the_same_answers(
    tiny_folder: Path, engine: AsyncEngine
):
    params = sampled(5, 40, logprobs=2, repetition_penalty=1.2, frequency_penalty=0.5)
    expected = await engine.generate(PROMPT, params)
    config = EngineConfig(kv_cache_bytes=8 * BLOCK_BYTES, threads=1, max_num_batched_tokens=16)
    async with AsyncEngine(tiny_folder, config) as tight:
        completion = await tight.generate(PROMPT, params)
        assert completion.usage.preemptions >= 3
        assert ids(completion) == ids(expected)
        for ours, theirs in zip(completion.outputs, expected.outputs, strict=True):
            for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert a == pytest.approx(b, abs=1e-3)
        with pytest.raises(PromptTooLong):
            tight.stream([5] * 128, params)
        fills_all = await tight.generate([5] * 100, sampled(2, 400))
        assert [(len(o.token_ids), o.finish_reason) for o in fills_all.outputs] == [(28, "length")] * 2
        await settled(tight)


async def test_case_22_leaving_or_aborting_the_stream_ends_all_answers(engine: AsyncEngine):
    async with engine.stream(PROMPT, sampled(6, 400)) as stream:
        async for _ in stream:
            break
    await settled(engine)
    stream = engine.stream(PROMPT, sampled(6, 400), request_id="six")
    await stream.__anext__()
    assert await engine.abort("six")
    assert not await engine.abort("six")
    with pytest.raises(RequestAborted):
        await stream.result()
    await settled(engine)


async def test_a_deadline_ends_all_answers_and_the_stream_raises_once(engine: AsyncEngine):
    stream = engine.stream(PROMPT, sampled(6, 400), deadline=0.15)
    with pytest.raises(DeadlineExceeded):
        async for _ in stream:
            pass
    assert stream.usage is not None and stream.usage.prompt_tokens == 37
    await settled(engine)


async def test_a_fault_of_one_answer_fails_the_request_and_no_other(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
):
    from motet.runtime.detokenizer import Detokenizer

    fork = Detokenizer.fork

    def broken(self: Detokenizer) -> Detokenizer:
        twin = fork(self)
        monkeypatch.setattr(twin, "push", lambda *args, **kw: 1 / 0)
        return twin

    other = engine.stream([9, 8, 7], sampled(1, 30))
    monkeypatch.setattr(Detokenizer, "fork", broken)
    stream = engine.stream(PROMPT, sampled(3, 30))
    with pytest.raises(RequestFailed, match="could not be turned into text"):
        await stream.result()
    with pytest.raises(RequestFailed, match="could not be turned into text"):
        await stream.__anext__()
    assert len((await other.result()).token_ids) == 30


async def test_case_11_unloaded_in_mid_decode_sixteen_answers_finish_on_the_old_weights(
    engine: AsyncEngine, adapters: dict[str, Path]
):
    await engine.load_adapter("a", adapters["r8"])
    params = sampled(16, 60)
    expected = ids(await engine.generate(PROMPT, params, adapter="a"))
    stream = engine.stream(PROMPT, params, adapter="a")
    await stream.__anext__()
    await engine.unload_adapter("a")
    assert engine.adapters() == []
    await engine.load_adapter("a", adapters["r64"])
    assert ids(await stream.result()) == expected
    assert ids(await engine.generate(PROMPT, params, adapter="a")) != expected
    aborted = engine.stream(PROMPT, params, adapter="a")
    await aborted.__anext__()
    await engine.unload_adapter("a", in_flight="abort")
    with pytest.raises(RequestAborted):
        await aborted.result()
    with pytest.raises(AdapterNotFound):
        engine.stream(PROMPT, params, adapter="a")
    arena = engine._running()[1].adapters._tiers._arena
    await until(lambda: arena.used_bytes == 0)


async def test_end_tokens_end_each_answer_by_itself(engine: AsyncEngine):
    params = SamplingParams(n=8, max_tokens=80, temperature=8.0, seed=3)
    completion = await engine.generate("hello", params)
    reasons = {output.finish_reason for output in completion.outputs}
    for output in completion.outputs:
        assert (output.token_ids[-1] == EOS) == (output.finish_reason == "stop")
        assert EOS not in output.token_ids[:-1]
    assert "stop" in reasons


async def test_penalties_look_at_each_answers_own_tokens(engine: AsyncEngine):
    """Greedy answers must all be the one that a request with n = 1 has."""
    penalised = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0, repetition_penalty=1.5, n=1)
    alone = await engine.generate(PROMPT, penalised)
    plain = await engine.generate(PROMPT, penalised.model_copy(update={"repetition_penalty": None}))
    assert alone.token_ids != plain.token_ids
    assert ids(await engine.generate(PROMPT, penalised.model_copy(update={"n": 3}))) == [alone.token_ids] * 3


async def test_case_24_a_dead_engine_ends_all_answers_once(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    async with AsyncEngine(tiny_folder, CONFIG) as engine:
        stream = engine.stream(PROMPT, sampled(4, 400))
        await stream.__anext__()
        runner = engine._running()[1].core._runner
        monkeypatch.setattr(runner, "submit", lambda plan: 1 / 0)
        for _ in range(2):
            with pytest.raises(EngineDead):
                await stream.result()


async def test_case_30_closed_in_mid_stream_all_answers_end(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    await engine.start()
    stream = engine.stream(PROMPT, sampled(4, 400))
    await stream.__anext__()
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await stream.result()
