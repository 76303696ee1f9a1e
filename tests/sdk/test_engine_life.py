"""An engine's life: start, close, death, many loops, many engines."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import anyio
import psutil
import pytest
import trio

from motet import (
    AsyncEngine,
    EngineClosed,
    EngineConfig,
    EngineDead,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    RequestFailed,
    SamplingParams,
)
from tests.sdk.checks import settled, until
from tests.sdk.conftest import CONFIG

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


def no_thread_is_left() -> bool:
    return not any(thread.name.startswith("motet") for thread in threading.enumerate())


@pytest.mark.anyio
async def test_start_and_close_are_idempotent_and_follow_each_other(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    with pytest.raises(EngineClosed, match="start"):
        engine.stream([5])
    await engine.aclose()
    for _ in range(2):
        await engine.start()
        await engine.start()
        await engine.generate([5], SHORT)
        await engine.aclose()
        await engine.aclose()
        for call in (lambda: engine.stream([5]), engine.stats, engine.adapters):
            with pytest.raises(EngineClosed):
                call()


@pytest.mark.anyio
async def test_many_may_start_at_once(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(engine.start)
    assert sum(thread.name == "motet-engine" for thread in threading.enumerate()) == 1
    await engine.aclose()


@pytest.mark.anyio
async def test_a_failed_start_says_why_and_may_be_tried_again(tmp_path: Path, tiny_folder: Path):
    folder = tmp_path / "later"
    engine = AsyncEngine(folder, CONFIG)
    with pytest.raises(ModelNotFound, match="later"):
        await engine.start()
    with pytest.raises(EngineClosed):
        engine.stream([5])
    folder.symlink_to(tiny_folder)
    async with engine:
        await engine.generate([5], SHORT)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(max_model_len=100_000),
        EngineConfig(kv_cache_bytes=10),
        EngineConfig(kv_cache_bytes=1 << 60),
        EngineConfig(adapter_bytes=1 << 60),
    ],
)
async def test_a_configuration_that_the_model_cannot_have_is_an_error(
    tiny_folder: Path, config: EngineConfig
):
    with pytest.raises(ModelError, match="EngineConfig"):
        await AsyncEngine(tiny_folder, config).start()


@pytest.mark.anyio
async def test_a_cancelled_start_leaves_the_engine_closed(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await engine.start()
    assert scope.cancelled_caught
    await engine.aclose()
    await until(no_thread_is_left)
    async with engine:
        await engine.generate([5], SHORT)


@pytest.mark.anyio
async def test_closing_an_engine_that_starts_fails_its_start(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)

    async def start() -> None:
        with pytest.raises(EngineClosed, match="while it started"):
            await engine.start()

    async with anyio.create_task_group() as group:
        group.start_soon(start)
        await until(lambda: engine._life.session is not None)
        await engine.aclose()
    with pytest.raises(EngineClosed):
        engine.stream([5])


@pytest.mark.anyio
@pytest.mark.parametrize("drain", [-1, float("nan"), float("inf"), "long", True])
async def test_a_drain_that_is_no_time_is_an_error(tiny_folder: Path, drain: object):
    async with AsyncEngine(tiny_folder, CONFIG) as engine:
        with pytest.raises(InvalidRequest, match="drain"):
            await engine.aclose(drain=drain)
        await engine.generate([5], SHORT)


@pytest.mark.anyio
async def test_the_largest_times_are_no_fault(tiny_folder: Path):
    async with AsyncEngine(tiny_folder, CONFIG) as engine:
        await engine.generate("text", SHORT, deadline=1e300)
        async with engine.stream("text" * 50, SHORT, deadline=1e12) as stream:
            await engine.aclose(drain=1e12)
            assert len((await stream.result()).token_ids) == 8


@pytest.mark.anyio
async def test_loading_torch_does_not_hold_up_the_event_loop(tiny_folder: Path):
    script = textwrap.dedent(f"""
        import anyio, sys, threading
        from motet import AsyncEngine
        class Witness:
            def find_spec(name, path=None, target=None):
                if name in ("torch", "tokenizers"):
                    print(name, threading.current_thread() is threading.main_thread())
        async def main():
            async with AsyncEngine({str(tiny_folder)!r}):
                pass
        sys.meta_path.insert(0, Witness)
        anyio.run(main)
    """)
    done = await anyio.run_process([sys.executable, "-c", script])
    assert sorted(done.stdout.decode().splitlines()) == ["tokenizers False", "torch False"]


@pytest.mark.anyio
async def test_draining_lets_live_requests_end_and_refuses_new_ones(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    await engine.start()
    stream = engine.stream([5, 6], SamplingParams(max_tokens=100, ignore_eos=True))
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: engine.aclose(drain=None))
        await anyio.sleep(0.01)
        with pytest.raises(EngineClosed, match="closing"):
            engine.stream([5])
    assert len((await stream.result()).token_ids) == 100


@pytest.mark.anyio
async def test_a_drain_ends_when_its_time_is_over(tiny_folder: Path):
    async with AsyncEngine(tiny_folder, CONFIG) as engine:
        stream = engine.stream([5, 6], LONG)
        await stream.__anext__()
        await engine.aclose(drain=0.05)
        with pytest.raises(EngineClosed):
            async for _ in stream:
                pass


@pytest.mark.anyio
async def test_case_30_closing_in_mid_stream_ends_every_stream(tiny_folder: Path):
    async with AsyncEngine(tiny_folder, EngineConfig(max_num_seqs=2, kv_cache_bytes=4 << 20)) as engine:
        streams = [engine.stream([5, 6], LONG) for _ in range(4)] + [engine.stream("text", LONG)]
        await streams[0].__anext__()
    for stream in streams:
        with pytest.raises(EngineClosed):
            async for _ in stream:
                pass
        assert stream.usage is not None


@pytest.mark.anyio
async def test_case_30_three_lives_leave_no_memory_behind(tiny_folder: Path, adapters: dict[str, Path]):
    kept = AsyncEngine(tiny_folder, CONFIG)

    async def life() -> int:
        async with kept as engine:
            await engine.load_adapter("a", adapters["r256"])
            async with anyio.create_task_group() as group:
                for i in range(8):
                    group.start_soon(lambda i=i: engine.generate([5 + i] * 50, SHORT, adapter="a"))
            await settled(engine)
        gc.collect()
        return psutil.Process().memory_info().rss

    await life()  # what is imported and cached once
    sizes = [await life() for _ in range(3)]
    assert sizes[-1] <= 1.05 * sizes[0]
    await until(no_thread_is_left)


@pytest.mark.anyio
@pytest.mark.parametrize("dies", [False, True])
async def test_a_closed_engine_lets_its_weights_go_at_once(tiny_folder: Path, dies: bool):
    engine = AsyncEngine(tiny_folder, CONFIG)
    await engine.start()
    stream = engine.stream("text", LONG)
    await stream.__anext__()
    runner = engine._running()[1].core._runner
    weights = weakref.ref(runner._steps._model._embedding.table)
    if dies:
        runner._steps = None
        with pytest.raises(EngineDead) as caught:
            await stream.result()
        assert caught.value.cause
    del runner
    gc.disable()  # no cycle may hold them
    try:
        await engine.aclose()
        await until(lambda: weights() is None, within=2.0)
    finally:
        gc.enable()
    assert stream.usage is not None  # the stream itself is kept


@pytest.mark.anyio
async def test_case_24_a_step_that_fails_for_all_ends_all_and_the_engine_can_start_again(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    await engine.start()
    streams = [engine.stream([5, 6], LONG) for _ in range(3)] + [engine.stream("text", LONG)]
    await streams[0].__anext__()
    _, runtime = engine._running()
    runner = runtime.core._runner

    def fail(*_):
        raise ZeroDivisionError("step k")

    runner.submit = fail
    start = time.monotonic()
    for stream in streams:
        with pytest.raises(EngineDead, match="step k") as caught:
            async for _ in stream:
                pass
        assert isinstance(caught.value.cause, ZeroDivisionError)
    with pytest.raises(EngineDead, match="step k"):
        engine.stream([5])
    with pytest.raises(EngineDead):
        await engine.load_adapter("a", "nowhere")
    assert time.monotonic() - start < 1
    await engine.start()
    await engine.generate([5], SHORT)
    await engine.aclose()


@pytest.mark.anyio
async def test_case_24_a_fault_in_one_requests_text_ends_that_stream_alone(engine: AsyncEngine):
    other = engine.stream([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
    mine = engine.stream([5, 7], LONG, request_id="mine")
    await mine.__anext__()
    session, runtime = engine._running()
    (request,) = [r for r in runtime.core.scheduler.requests if r.request_id == session.delivery.ids["mine"]]

    def fail(*_, **__):
        raise KeyError("no such piece")

    request.detokenizer.push = fail
    with pytest.raises(RequestFailed, match="no such piece"):
        async for _ in mine:
            pass
    assert len((await other.result()).token_ids) == 50


@pytest.mark.anyio
async def test_case_24_logits_that_are_not_finite_end_that_stream_alone(
    engine: AsyncEngine, adapters: dict[str, Path]
):
    await engine.load_adapter("sick", adapters["r5"])
    _, runtime = engine._running()
    runtime.adapters._tiers._arena.data[: 1 << 10] = float("inf")
    other = engine.stream([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
    with pytest.raises(RequestFailed, match="not finite"):
        await engine.generate([5, 6], SHORT, adapter="sick")
    assert len((await other.result()).token_ids) == 50


@pytest.mark.anyio
async def test_what_a_fault_has_touched_is_never_found_in_the_prefix_cache(engine: AsyncEngine):
    steps = engine._running()[1].core._runner._steps
    prompt, real = [5] * 40, steps._forward
    expected = (await engine.generate(prompt, SHORT, tenant="other")).token_ids
    steps._forward = lambda batch: real(batch) * float("nan")
    with pytest.raises(RequestFailed, match="not finite"):
        await engine.generate(prompt, SHORT)
    steps._forward = real
    completion = await engine.generate(prompt, SHORT)
    assert (completion.token_ids, completion.usage.cached_tokens) == (expected, 0)


@pytest.mark.anyio
@pytest.mark.parametrize("failure", [KeyError("odd"), BaseException("a panic")])
async def test_a_tokenizer_that_fails_ends_its_request_alone(engine: AsyncEngine, failure: BaseException):
    loop = engine._running()[0].serving
    other = engine.stream([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))

    def fail(text: str) -> list[int]:
        raise failure

    loop._texts._tokenizer.encode = fail
    with pytest.raises(RequestFailed, match="tokenizer"):
        await engine.generate("text", SHORT)
    assert len((await other.result()).token_ids) == 50


@pytest.mark.anyio
async def test_two_engines_live_side_by_side(tiny_folder: Path):
    async with AsyncEngine(tiny_folder, CONFIG) as one, AsyncEngine(tiny_folder, CONFIG) as two:
        streams = [one.stream([5, 6], SHORT), two.stream([5, 6], SHORT)]
        first, second = [await stream.result() for stream in streams]
        await one.aclose()
        assert (await two.generate([5, 6], SHORT)).token_ids == first.token_ids == second.token_ids


def test_one_engine_serves_several_event_loops_in_turn_and_at_once(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    asyncio.run(engine.start())

    async def use() -> tuple[int, ...]:
        return (await engine.generate([5, 6, 7], SHORT)).token_ids

    expected = asyncio.run(use())
    assert trio.run(use) == asyncio.run(use()) == expected
    outcomes: list[tuple[int, ...]] = []
    threads = [
        threading.Thread(target=lambda run=run: outcomes.append(run()))
        for run in [lambda: asyncio.run(use()), lambda: trio.run(use)] * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == [expected] * 6
    trio.run(engine.aclose)


def test_the_streams_of_a_dead_event_loop_are_aborted(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    kept = []

    async def leave() -> None:
        await engine.start()
        kept.append(engine.stream([5, 6], LONG))
        await kept[0].__anext__()

    asyncio.run(leave())
    trio.run(settled, engine)
    asyncio.run(engine.aclose())


def test_a_stream_belongs_to_its_event_loop(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)

    async def here() -> None:
        await engine.start()
        stream = engine.stream([5] * 300, LONG)

        async def there() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                async for _ in stream:
                    pass

        await asyncio.to_thread(trio.run, there)
        stream.cancel()
        await engine.aclose()

    asyncio.run(here())


def test_streaming_outside_of_an_event_loop_is_an_error_that_leaks_nothing(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    asyncio.run(engine.start())
    with pytest.raises(RuntimeError, match="running event loop"):
        engine.stream([5], request_id="a")
    asyncio.run(settled(engine))
    asyncio.run(engine.aclose())


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "del engine, stream; import gc; gc.collect()"])
def test_a_forgotten_engine_does_not_hold_up_or_crash_the_interpreters_end(tiny_folder: Path, ending: str):
    script = textwrap.dedent(f"""
        import asyncio, sys
        from motet import AsyncEngine, SamplingParams
        engine = AsyncEngine({str(tiny_folder)!r})
        async def main():
            global stream
            await engine.start()
            stream = engine.stream([5, 6], SamplingParams(max_tokens=400, ignore_eos=True))
            await stream.__anext__()
        asyncio.run(main())
        print("done")
    """)
    done = subprocess.run(
        [sys.executable, "-c", script + ending], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 3 if "SystemExit" in ending else 0)


def test_an_exit_does_not_wait_for_queued_texts_and_says_nothing(tiny_folder: Path):
    script = textwrap.dedent(f"""
        import asyncio
        from motet import AsyncEngine
        engine = AsyncEngine({str(tiny_folder)!r})
        async def main():
            await engine.start()
            return [engine.stream("hello " * 20_000) for _ in range(200)]
        streams = asyncio.run(main())
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_forked_child_is_told_that_the_engine_is_not_there(tiny_folder: Path):
    script = textwrap.dedent(f"""
        import asyncio, os
        from motet import AsyncEngine, EngineClosed
        engine = AsyncEngine({str(tiny_folder)!r})
        asyncio.run(engine.start())
        child = os.fork()
        if child == 0:
            async def use():
                try:
                    await engine.generate([5])
                except EngineClosed as error:
                    await engine.aclose()
                    os._exit(7 if "forked" in str(error) else 1)
            asyncio.run(use())
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        asyncio.run(engine.aclose())
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr


@pytest.mark.anyio
async def test_a_cancelled_start_leaves_an_engine_that_serves_others_alone(engine: AsyncEngine):
    stream = engine.stream([5, 6], SamplingParams(max_tokens=60, ignore_eos=True))
    for delay in (0.0, 0.0003, 0.001):
        with anyio.move_on_after(delay):
            await engine.start()
    assert len((await stream.result()).token_ids) == 60


@pytest.mark.anyio
async def test_a_cancelled_start_leaves_another_that_waits_beside_it_alone(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:

            async def other() -> None:
                await until(
                    lambda: engine._life.session is not None and engine._life.session.num_starters == 1
                )
                group.start_soon(engine.start)
                await until(lambda: engine._life.session.num_starters == 2 or engine._life.session.is_serving)
                scope.cancel()

            group.start_soon(other)
            await engine.start()
    await engine.generate([5], SHORT)
    await engine.aclose()


@pytest.mark.anyio
async def test_commands_that_fail_while_the_engine_ends_leave_no_stream_waiting(tiny_folder: Path):
    async with AsyncEngine(tiny_folder, CONFIG) as engine:
        loop = engine._running()[0].serving
        live = engine.stream([5, 6], LONG)
        await live.__anext__()

        def fail(*_: object) -> None:
            raise OSError("no more threads")

        loop._texts.submit = fail
        streams = [live] + [engine.stream(f"text {i}", LONG) for i in range(3)]
        for stream in streams:
            with pytest.raises(EngineDead, match="no more threads"):
                async for _ in stream:
                    pass


@pytest.mark.anyio
async def test_an_engine_that_is_dropped_stops(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, CONFIG)
    await engine.start()
    del engine
    gc.collect()
    await until(no_thread_is_left)
