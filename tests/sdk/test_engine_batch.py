"""Batches: many prompts, each with its result in its place."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint
from transformers import LlamaForCausalLM

from motet import (
    AdapterNotFound,
    AsyncEngine,
    Completion,
    DeadlineExceeded,
    EngineClosed,
    EngineConfig,
    InvalidRequest,
    QueueFull,
    SamplingParams,
)
from tests.sdk.checks import settled, until
from tests.tiny import greedy

pytestmark = pytest.mark.anyio


def params(num_tokens: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)


async def test_results_are_those_of_transformers_in_the_order_of_the_prompts(
    engine: AsyncEngine, tiny_model: LlamaForCausalLM
):
    prompts = [[3 + (i * j) % 250 for j in range(1, 2 + i)] for i in range(1, 12)]
    lengths = [30 - 2 * i for i in range(len(prompts))]  # the last is done first
    results = await engine.generate_batch(prompts, [params(length) for length in lengths])
    assert [list(r.token_ids) for r in results] == [
        greedy(tiny_model, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)
    ]
    assert [list(r.prompt_token_ids) for r in results] == prompts


async def test_an_adapter_may_stand_for_all_or_for_one_each(engine: AsyncEngine, adapters: dict[str, Path]):
    await engine.load_adapter("a", adapters["r5"])
    await engine.load_adapter("b", adapters["r64"])
    solo = [(await engine.generate([5, 6], params(9), adapter=name)).token_ids for name in ("a", None, "b")]
    assert len(set(solo)) == 3
    each = await engine.generate_batch([[5, 6]] * 3, params(9), adapter=["a", None, "b"])
    assert [r.token_ids for r in each] == solo
    assert [r.token_ids for r in await engine.generate_batch([[5, 6]] * 2, params(9), adapter="a")] == [
        solo[0]
    ] * 2
    assert [r.token_ids for r in await engine.generate_batch([[5, 6]], params(9))] == [solo[1]]


async def test_what_fails_is_an_error_in_its_place(engine: AsyncEngine):
    results = await engine.generate_batch(
        [[5], [], "", 5, [10**6], "a\ud800", [7]],
        [params(3)] * 6 + [None],
        adapter=[None, None, None, None, None, None, "nobody"],
    )
    kinds = [type(result) for result in results]
    assert kinds == [Completion, *[InvalidRequest] * 5, AdapterNotFound]
    assert "vocabulary" in str(results[4])
    assert await engine.generate_batch([]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": "hello"}, "must be a list of prompts, not str"),
        ({"prompts": 5}, "must be a list of prompts, not int"),
        ({"params": [SamplingParams()]}, "params has 1 entries for 2 prompts"),
        ({"params": {"max_tokens": 5}}, "params must be a SamplingParams or one per prompt, not dict"),
        ({"adapter": ["a", "b", "c"]}, "adapter has 3 entries for 2 prompts"),
        ({"adapter": 5}, "adapter must be a str or one per prompt"),
        ({"tenant": ""}, "tenant"),
        ({"deadline": -1}, "deadline"),
        ({"request_id": ""}, "request_id"),
    ],
)
async def test_arguments_that_fit_no_prompt_are_refused_at_once(
    engine: AsyncEngine, arguments: dict, message: str
):
    with pytest.raises(InvalidRequest, match=message):
        await engine.generate_batch(**({"prompts": [[5], [6]]} | arguments))


async def test_more_prompts_than_may_be_live_all_get_their_turn(tiny_folder: Path):
    config = EngineConfig(max_num_seqs=4, max_waiting=4, kv_cache_bytes=4 << 20, threads=1)
    most = 0
    async with AsyncEngine(tiny_folder, config) as engine:
        session, _ = engine._running()

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(session.delivery.ids))
                await checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            results = await engine.generate_batch([[3 + i % 200] for i in range(100)], params(2))
            group.cancel_scope.cancel()
        assert [list(r.prompt_token_ids) for r in results] == [[3 + i % 200] for i in range(100)]
        assert 4 <= most <= 6, "half of the queue is for others"
        await settled(engine)


async def test_a_queue_that_others_fill_is_waited_for(tiny_folder: Path):
    config = EngineConfig(max_num_seqs=1, max_waiting=0, kv_cache_bytes=4 << 20, threads=1)
    async with AsyncEngine(tiny_folder, config) as engine:
        other = engine.stream([5], params(400))
        with pytest.raises(QueueFull):
            engine.stream([5])
        results = await engine.generate_batch([[6], [7]], params(3))
        assert [len(r.token_ids) for r in results] == [3, 3]
        assert len((await other.result()).token_ids) == 400
        await settled(engine)


async def test_cancelling_a_batch_aborts_all_of_it(engine: AsyncEngine):
    with anyio.move_on_after(0.05) as scope:
        await engine.generate_batch([[5]] * 500, params(400))
    assert scope.cancelled_caught
    await settled(engine)


async def test_a_deadline_is_for_the_whole_batch(engine: AsyncEngine):
    results = await engine.generate_batch([[5]] * 300, [params(1), *[params(400)] * 299], deadline=1.0)
    assert isinstance(results[0], Completion)
    assert {type(result) for result in results[1:]} <= {Completion, DeadlineExceeded}
    assert isinstance(results[-1], DeadlineExceeded) and "before this request began" in str(results[-1])


async def test_one_request_of_a_batch_can_be_aborted_by_name(engine: AsyncEngine):
    async with anyio.create_task_group() as group:
        results: list = []

        async def run() -> None:
            results.extend(await engine.generate_batch([[5]] * 3, params(400), request_id="job"))

        group.start_soon(run)
        await until(lambda: engine.stats().running == 3)
        assert await engine.abort("job-1") is True
    assert [type(r).__name__ for r in results] == ["Completion", "RequestAborted", "Completion"]


async def test_closing_the_engine_ends_a_batch_with_errors_in_their_places(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, EngineConfig(kv_cache_bytes=4 << 20, threads=1))
    with pytest.raises(EngineClosed):
        await engine.generate_batch([[5]])
    await engine.start()
    results: list = []

    async def run() -> None:
        results.extend(await engine.generate_batch([[5]] * 200, params(400)))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await until(lambda: engine.stats().running > 0)
        await engine.aclose()
    assert len(results) == 200 and {type(result) for result in results} == {EngineClosed}


async def test_progress_is_shown_on_stderr_and_leaves_stdout_alone(
    engine: AsyncEngine, capsys: pytest.CaptureFixture[str]
):
    results = await engine.generate_batch([[5], [6], []], params(3), progress=True)
    out, err = capsys.readouterr()
    assert len(results) == 3 and out == ""
    assert "3/3" in err and "6 tokens, 1 failed" in err
    await engine.generate_batch([[5]], params(1))
    assert capsys.readouterr() == ("", "")


async def test_without_rich_progress_says_what_to_install(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(InvalidRequest, match="pip install"):
        await engine.generate_batch([[5]], params(3), progress=True)
