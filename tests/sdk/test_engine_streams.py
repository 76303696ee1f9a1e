"""Streams: what they yield, how they end, and what happens to their request when they are left."""

from __future__ import annotations

import gc
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from motet import (
    AsyncEngine,
    Completion,
    DeadlineExceeded,
    EngineConfig,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RequestAborted,
    SamplingParams,
    Token,
)
from tests.sdk.checks import settled, until
from tests.tiny import EOS, VOCAB_SIZE, greedy

pytestmark = pytest.mark.anyio
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def params(num_tokens: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)


async def test_tokens_are_those_of_transformers(engine: AsyncEngine, tiny_model: LlamaForCausalLM):
    prompt = [5, 6, 7, 8, 9, 10, 11]
    tokens = [token async for token in engine.stream(prompt, params(20))]
    assert [token.token_id for token in tokens] == greedy(tiny_model, prompt, 20)
    assert [token.finish_reason for token in tokens] == [None] * 19 + ["length"]
    assert all(isinstance(token, Token) and token.index == 0 and str(token) == token.text for token in tokens)


async def test_text_and_ids_are_the_same_prompt(engine: AsyncEngine):
    text = "hello, wörld"
    from_text = await engine.generate(text, params(8))
    from_ids = await engine.generate(list(from_text.prompt_token_ids), params(8))
    assert len(from_text.prompt_token_ids) == len(text.encode())
    assert from_text.outputs == from_ids.outputs


async def test_a_completion_tells_all_about_its_request(engine: AsyncEngine):
    completion = await engine.generate([4] * 40, params(5, logprobs=2))
    assert isinstance(completion, Completion)
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 5)
    usage = completion.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, usage.preemptions) == (40, 5, 0, 0)
    assert 0 <= usage.queue_time <= usage.ttft <= usage.total_time
    assert [state for state, _ in usage.timeline] == ["blocked", "waiting", "running", "finished"]
    assert [when for _, when in usage.timeline] == sorted(when for _, when in usage.timeline)
    for token_id, top in zip(completion.token_ids, completion.outputs[0].logprobs, strict=True):
        assert len(top) == 2 and max(top, key=top.__getitem__) == token_id  # greedy: the likeliest


async def test_a_result_holds_the_tokens_already_iterated(engine: AsyncEngine):
    stream = engine.stream([7, 8, 9], params(6))
    first = await stream.__anext__()
    completion = await stream.result()
    assert completion.token_ids[0] == first.token_id and len(completion.token_ids) == 6
    assert stream.usage == completion.usage
    assert await stream.result() == completion
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()


async def test_texts_joined_are_the_decoded_output(engine: AsyncEngine):
    from tests.tiny import tiny_tokenizer

    for seed in range(5):
        sampled = params(60, temperature=3.0, seed=seed)
        tokens = [token async for token in engine.stream("é" * 10, sampled)]
        ids = [token.token_id for token in tokens]
        assert "".join(token.text for token in tokens) == tiny_tokenizer().decode(ids)


async def test_batched_with_others_an_answer_stays_the_same(engine: AsyncEngine):
    prompts = [[3 + (i * j) % 250 for j in range(1, 2 + 3 * i)] for i in range(1, 12)]
    alone = [(await engine.generate(prompt, params(24))).token_ids for prompt in prompts]
    together: dict[int, tuple[int, ...]] = {}

    async def run(i: int) -> None:
        together[i] = (await engine.generate(prompts[i], params(24), tenant=f"t{i}")).token_ids

    async with anyio.create_task_group() as group:
        for i in range(len(prompts)):
            group.start_soon(run, i)
    assert [together[i] for i in range(len(prompts))] == alone


@pytest.mark.parametrize("temperature", [0.7, 1.5])
async def test_a_seed_gives_the_same_tokens_alone_and_in_company(engine: AsyncEngine, temperature: float):
    seeded = params(30, temperature=temperature, seed=11)
    alone = (await engine.generate([9, 8, 7], seeded)).token_ids
    outcomes: list[tuple[int, ...]] = []

    async def run(p: SamplingParams) -> None:
        outcomes.append((await engine.generate([9, 8, 7], p)).token_ids)

    async with anyio.create_task_group() as group:
        for p in [seeded] * 3 + [params(30, temperature=temperature)] * 3:
            group.start_soon(run, p)
    assert outcomes.count(alone) == 3
    assert len(set(outcomes)) == 4, "unseeded requests draw seeds of their own"


async def test_leaving_a_stream_early_ends_its_request(engine: AsyncEngine):
    async with engine.stream([5, 6], LONG) as stream:
        async for _ in stream:
            break
    await settled(engine)
    with pytest.raises(RequestAborted):
        await stream.__anext__()


async def test_a_bare_break_ends_the_request_once_the_stream_is_dropped(engine: AsyncEngine):
    async for _ in engine.stream([5, 6], LONG):
        break
    gc.collect()
    await settled(engine)


async def test_cancelling_the_consumer_ends_the_request_and_is_seen_by_it(engine: AsyncEngine):
    seen = []

    async def consume() -> None:
        try:
            async for _ in engine.stream([5, 6], LONG, request_id="mine"):
                pass
        except BaseException as exc:
            seen.append(type(exc))
            raise

    with anyio.move_on_after(0.05) as scope:
        await consume()
    assert scope.cancelled_caught
    assert seen == [anyio.get_cancelled_exc_class()]
    await settled(engine)


async def test_cancel_works_from_any_thread_and_many_times(engine: AsyncEngine):
    stream = engine.stream([5, 6], LONG)
    await stream.__anext__()
    for _ in range(2):
        await anyio.to_thread.run_sync(stream.cancel)
    with pytest.raises(RequestAborted):
        await stream.__anext__()
    await stream.aclose()


async def test_a_deadline_ends_the_request_after_its_tokens(engine: AsyncEngine):
    stream = engine.stream([5, 6], LONG, deadline=0.1)
    with pytest.raises(DeadlineExceeded, match="deadline"):
        async for _ in stream:
            pass
    assert stream.usage.output_tokens < 400
    assert stream.usage.timeline[-1][0] == "finished"


async def test_case_23_a_consumer_asleep_loses_nothing_and_hurts_nobody(
    engine: AsyncEngine, tiny_model: LlamaForCausalLM
):
    sleeper = engine.stream([5, 6, 7], params(300))
    read = [await sleeper.__anext__()]
    for start in range(
        20, 60, 8
    ):  # it does not ask again until others have come and gone, and it has ended itself
        prompts = [[start + i, 6, 7] for i in range(8)]
        for prompt, other in zip(prompts, await engine.generate_batch(prompts, params(30)), strict=True):
            assert isinstance(other, Completion)
            assert list(other.token_ids) == greedy(tiny_model, prompt, 30)
    await settled(engine)
    assert sleeper.usage is not None
    read += [token async for token in sleeper]
    assert [token.token_id for token in read] == greedy(tiny_model, [5, 6, 7], 300)


async def test_two_tasks_cannot_wait_on_one_stream(engine: AsyncEngine):
    stream = engine.stream([3] * 400, LONG)
    errors = []

    async def wait() -> None:
        try:
            await stream.__anext__()
        except RuntimeError as exc:
            errors.append(str(exc))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
    assert len(errors) == 1 and "another task" in errors[0]
    stream.cancel()


async def test_the_next_token_may_be_asked_for_by_ever_new_tasks(engine: AsyncEngine):
    stream = engine.stream([5, 6, 7], params(6))
    tokens: list[Token] = []

    async def take() -> None:
        tokens.append(await stream.__anext__())

    for _ in range(6):
        async with anyio.create_task_group() as group:
            group.start_soon(take)
    assert [token.token_id for token in tokens] == list(
        (await engine.generate([5, 6, 7], params(6))).token_ids
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": 5}, "prompt must be"),
        ({"prompt": ["a"]}, "prompt must be"),
        ({"prompt": b"abc"}, "decode it"),
        ({"tenant": "\ud800"}, "surrogate"),
        ({"request_id": "\ud800"}, "surrogate"),
        ({"deadline": True}, "deadline"),
        ({"deadline": 1e-9}, "deadline"),
        ({"prompt": [5, 100_000]}, "100000 is outside the vocabulary"),
        ({"prompt": [-1]}, "outside the vocabulary"),
        ({"params": {"max_tokens": 3}}, "SamplingParams, not dict"),
        ({"params": SamplingParams(stop_token_ids=[100_000])}, "stop_token_ids"),
        ({"params": SamplingParams(logprobs=1000)}, "logprobs"),
        ({"params": SamplingParams(min_tokens=1, stop_token_ids=range(VOCAB_SIZE))}, "every token"),
        ({"adapter": []}, "adapter"),
        ({"prompt": {5, 6}}, "not set"),
        ({"prompt": (i for i in [5])}, "not generator"),
        ({"prompt": torch.tensor([[5]])}, "not Tensor"),
        ({"deadline": 10**400}, "deadline"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": None}, "tenant"),
        ({"priority": "high"}, "priority"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"request_id": ""}, "request_id"),
    ],
)
async def test_bad_arguments_are_refused_at_once(engine: AsyncEngine, arguments: dict, message: str):
    with pytest.raises(InvalidRequest, match=message):
        engine.stream(**({"prompt": [5]} | arguments))
    assert (await engine.generate([5], params(1))).finish_reason == "length"


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor])
async def test_any_sequence_of_ids_is_a_prompt(engine: AsyncEngine, tiny_model: LlamaForCausalLM, kind):
    completion = await engine.generate(kind([5, 6]), params(12))
    assert list(completion.token_ids) == greedy(tiny_model, [5, 6], 12)


async def test_an_extreme_temperature_with_masked_tokens_is_defined(engine: AsyncEngine):
    wild = params(8, min_tokens=5, temperature=1e300, stop_token_ids=[EOS, 2])
    assert not set((await engine.generate([5, 6], wild)).token_ids[:5]) & {EOS, 2}


async def test_a_live_request_id_cannot_be_used_again(engine: AsyncEngine):
    stream = engine.stream([5], LONG, request_id="a")
    with pytest.raises(InvalidRequest, match="still live"):
        engine.stream([5], LONG, request_id="a")
    assert await engine.abort("a") is True
    await settled(engine)
    await engine.generate([5], params(1), request_id="a")
    with pytest.raises(RequestAborted):
        await stream.__anext__()


async def test_a_full_queue_refuses_and_says_when_to_come_back(tiny_folder: Path):
    config = EngineConfig(max_num_seqs=1, max_waiting=1, kv_cache_bytes=4 << 20)
    async with AsyncEngine(tiny_folder, config) as engine:
        streams = [engine.stream([5], LONG) for _ in range(2)]
        with pytest.raises(QueueFull, match="max_waiting") as caught:
            engine.stream([5], LONG)
        assert caught.value.retry_after > 0
        for stream in streams:
            stream.cancel()
        await settled(engine)
        await engine.generate([5], params(1))


async def test_case_04_min_tokens_holds_off_every_end_token(
    engine: AsyncEngine, tiny_model: LlamaForCausalLM
):
    favoured = greedy(tiny_model, [5, 6, 7], 1)[0]
    ends = SamplingParams(max_tokens=20, min_tokens=5, stop_token_ids=[favoured, EOS, 2, 0])
    completion = await engine.generate([5, 6, 7], ends)
    assert len(completion.token_ids) >= 5
    assert not set(completion.token_ids[:5]) & {favoured, EOS, 2, 0}


async def test_case_04_ignore_eos_leaves_stop_token_ids_at_work(
    engine: AsyncEngine, tiny_model: LlamaForCausalLM
):
    expected = greedy(tiny_model, [5, 6, 7], 12)
    stop = expected[6]
    completion = await engine.generate([5, 6, 7], params(12, stop_token_ids=[stop]))
    assert completion.finish_reason == "stop" and completion.outputs[0].stop_reason == stop
    assert list(completion.token_ids) == expected[: expected.index(stop) + 1]


async def test_case_05_max_tokens_0_and_1(engine: AsyncEngine):
    prompt = list(range(3, 43))
    nothing = await engine.generate(prompt, params(0))
    assert (nothing.token_ids, nothing.text, nothing.finish_reason) == ((), "", "length")
    one = await engine.generate(prompt, params(1))
    assert len(one.token_ids) == 1 and one.finish_reason == "length"
    assert one.usage.cached_tokens == 32, "the empty answer warmed the cache"


async def test_case_21_what_cannot_fit_is_refused_and_what_fits_ends_by_length(tiny_folder: Path):
    config = EngineConfig(max_model_len=64, kv_cache_bytes=4 << 20)
    async with AsyncEngine(tiny_folder, config) as engine:
        with pytest.raises(PromptTooLong, match="64"):
            engine.stream([5] * 64)
        with pytest.raises(PromptTooLong, match="64"):
            await engine.generate("x" * 64)
        completion = await engine.generate([5] * 60, params(100))
        assert completion.finish_reason == "length" and len(completion.token_ids) == 4
        await settled(engine)


async def test_case_21_a_prompt_longer_than_all_blocks_is_refused(tiny_folder: Path):
    one_block = 2 * 2 * 2 * 16 * 4 * 16  # k and v, layers, KV heads, head size, bytes, tokens
    async with AsyncEngine(tiny_folder, EngineConfig(kv_cache_bytes=3 * one_block)) as engine:
        with pytest.raises(PromptTooLong, match="kv_cache_bytes"):
            engine.stream([5] * 48)
        others = engine.stream([6] * 20, params(20))
        assert (await engine.generate([5] * 40, params(100))).finish_reason == "length"
        assert len((await others.result()).token_ids) == 20
        await settled(engine)


async def test_case_22_abort_is_idempotent_in_every_state(tiny_folder: Path):
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=8, kv_cache_bytes=4 << 20)
    async with AsyncEngine(tiny_folder, config) as engine:
        decoding = engine.stream([5, 6], LONG, request_id="decoding")
        await decoding.__anext__()
        engine.stream([5, 6], LONG, request_id="waiting")
        engine.stream("x" * 300, LONG, request_id="tokenising")
        streams = {"prefilling": engine.stream([7] * 500, params(1), request_id="prefilling", priority=1)}
        await until(lambda: engine.stats().preemptions == 1)
        streams |= {"preempted": decoding}
        done = engine.stream([5], params(1), request_id="done", priority=2)
        await done.result()
        for name in ("waiting", "tokenising", "prefilling", "decoding", "done", "unknown"):
            await engine.abort(name)
            assert await engine.abort(name) is False
        await settled(engine)
        for stream in streams.values():
            with pytest.raises(RequestAborted):
                await stream.__anext__()


async def test_case_26_an_empty_prompt_is_an_error_and_the_engine_lives(engine: AsyncEngine):
    with pytest.raises(InvalidRequest, match="empty"):
        engine.stream([])
    with pytest.raises(InvalidRequest, match="empty"):
        await engine.generate("")
    await engine.generate([5], params(1))


async def test_case_26_a_lone_surrogate_in_the_text_is_an_error(engine: AsyncEngine):
    with pytest.raises(InvalidRequest, match="surrogate"):
        await engine.generate("a\ud800b", params(1))
    await engine.generate([5], params(1))


@pytest.mark.parametrize("edge", [{"top_p": 0.0}, {"top_p": 1e-4}, {"top_k": 1}, {"min_p": 1.0}])
async def test_case_26_the_narrowest_filters_are_greedy(
    engine: AsyncEngine, tiny_model: LlamaForCausalLM, edge: dict
):
    completion = await engine.generate([5, 6, 7], params(12, temperature=1.0, **edge))
    assert list(completion.token_ids) == greedy(tiny_model, [5, 6, 7], 12)


async def test_case_26_top_k_above_the_vocabulary_keeps_all(engine: AsyncEngine):
    wide = await engine.generate([5, 6, 7], params(12, temperature=1.0, seed=1, top_k=1 << 100))
    assert wide.token_ids == (await engine.generate([5, 6, 7], params(12, temperature=1.0, seed=1))).token_ids
