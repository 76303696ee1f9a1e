"""Request hooks: told of every request once, whatever its end, and unable to hurt any."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from motet import (
    AdmittedRequest,
    AsyncEngine,
    DeadlineExceeded,
    Engine,
    EngineClosed,
    EngineDead,
    FinishedRequest,
    InvalidRequest,
    MotetError,
    PromptTooLong,
    QueueFull,
    RequestAborted,
    RequestFailed,
    SamplingParams,
    Usage,
)
from motet.sdk.hooks import Listeners, RequestReport
from motet.sdk.stream import StreamEnd
from tests.sdk.checks import settled, until
from tests.sdk.conftest import CONFIG

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


@dataclass
class Book:
    """What an application that meters would keep."""

    admitted: list[AdmittedRequest] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def on_admit(self, request: AdmittedRequest) -> None:
        assert request.request_id not in self.ends, "taken in before it ends"
        self.threads.add(threading.current_thread().name)
        self.admitted.append(request)

    def on_finish(self, request: FinishedRequest) -> None:
        self.finished.append(request)

    @property
    def ends(self) -> dict[str, tuple[str, type[MotetError] | None]]:
        return {
            end.request_id: (end.finish_reason, type(end.error) if end.error else None)
            for end in self.finished
        }


def engine_of(folder: Path, book: Book, **changes: object) -> AsyncEngine:
    config = CONFIG.model_copy(update={"name": "a", **changes})
    return AsyncEngine(folder, config, on_admit=book.on_admit, on_finish=book.on_finish)


@pytest.mark.anyio
async def test_every_request_is_told_once_whatever_its_end(tiny_folder: Path, adapters: dict[str, Path]):
    book = Book()
    async with engine_of(tiny_folder, book) as engine:
        await engine.load_adapter("r5", adapters["r5"])
        stop = SamplingParams(max_tokens=400, stop_token_ids=tuple(range(3, 200)))
        done = await engine.generate([5, 6], SHORT, adapter="r5", tenant="x", request_id="length")
        await engine.generate("text", stop, request_id="stop")
        await engine.generate([5], SamplingParams(max_tokens=0), request_id="nothing")
        with pytest.raises(PromptTooLong):
            await engine.generate("text" * 200, SHORT, request_id="too long")
        with pytest.raises(DeadlineExceeded):
            await engine.generate([5, 6], LONG, deadline=0.01, request_id="late")
        for name in ("aborted", "cancelled", "left", "dropped"):
            stream = engine.stream([5, 6], LONG, request_id=name)
            await stream.__anext__()
            if name == "aborted":
                assert await engine.abort(name)
            elif name == "cancelled":
                stream.cancel()
                stream.cancel()
            elif name == "left":
                async with stream:
                    pass
            del stream
            gc.collect()
        real = engine._running()[0].serving._texts._tokenizer.encode

        def fail(text: str) -> list[int]:
            raise KeyError(text)

        engine._running()[0].serving._texts._tokenizer.encode = fail
        with pytest.raises(RequestFailed):
            await engine.generate("text", SHORT, request_id="failed")
        engine._running()[0].serving._texts._tokenizer.encode = real
        await settled(engine)
        kept = [
            engine.stream([5, 6], LONG, request_id="closed"),
            engine.stream("text", LONG, request_id="closed too"),
        ]
        await kept[0].__anext__()
    aborted = ("abort", RequestAborted)
    assert book.ends == {
        "length": ("length", None),
        "stop": ("stop", None),
        "nothing": ("length", None),
        "too long": ("error", PromptTooLong),
        "late": ("timeout", DeadlineExceeded),
        "aborted": aborted,
        "cancelled": aborted,
        "left": aborted,
        "dropped": aborted,
        "failed": ("error", RequestFailed),
        "closed": ("abort", EngineClosed),
        "closed too": ("abort", EngineClosed),
    }
    names = list(book.ends)
    assert [end.request_id for end in book.finished] == names, "once"
    assert sorted(request.request_id for request in book.admitted) == sorted(names)
    assert book.admitted[0] == AdmittedRequest("a", "length", "x", "r5", 2)
    assert book.admitted[1] == AdmittedRequest("a", "stop", "default", None, None)
    assert book.finished[0] == FinishedRequest("a", "length", "x", "r5", done.usage, "length", None)
    assert book.threads == {"motet-hooks"}


@pytest.mark.anyio
async def test_what_is_refused_was_never_taken_in(tiny_folder: Path):
    book = Book()
    engine = engine_of(tiny_folder, book, max_num_seqs=1, max_waiting=0)
    with pytest.raises(EngineClosed):
        engine.stream([5])
    async with engine:
        stream = engine.stream([5, 6], LONG, request_id="only")
        with pytest.raises(QueueFull):
            engine.stream([5])
        stream.cancel()
        await settled(engine)
        with pytest.raises(InvalidRequest):
            engine.stream([10**6])
    with pytest.raises(EngineClosed):
        engine.stream([5])
    assert [request.request_id for request in book.admitted] == ["only"]
    assert list(book.ends) == ["only"]


@pytest.mark.anyio
async def test_an_engines_death_is_told_to_every_request_once(tiny_folder: Path):
    book = Book()
    engine = engine_of(tiny_folder, book)
    await engine.start()
    streams = [engine.stream([5, 6], LONG) for _ in range(5)] + [engine.stream("text", LONG)]
    await streams[0].__anext__()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("step k")

    engine._running()[1].core._runner._steps = fail
    for stream in streams:
        with pytest.raises(EngineDead):
            await stream.result()
    await engine.aclose()
    assert list(book.ends.values()) == [("error", EngineDead)] * 6
    assert len(book.finished) == len(book.admitted) == 6
    async with engine:  # a new life has its own
        await engine.generate([5], SHORT)
    assert len(book.finished) == 7


@pytest.mark.anyio
async def test_a_hook_that_blocks_holds_up_no_stream_and_misses_nothing(tiny_folder: Path):
    gate = threading.Event()
    told: list[str] = []

    def block(request: FinishedRequest) -> None:
        gate.wait(30)
        told.append(request.request_id)

    async with AsyncEngine(tiny_folder, CONFIG, on_finish=block) as engine:
        for i in range(5):
            assert len((await engine.generate([5, 6], SHORT, request_id=f"{i}")).token_ids) == 8
        await settled(engine)
        assert told == []
        threading.Timer(0.2, gate.set).start()  # while the engine closes
    assert told == list("01234"), "all are told when the engine is closed"


def test_a_request_that_ends_before_its_caller_could_announce_it_is_announced_first():
    calls: list[Callable[[], object]] = []
    told: list[str] = []
    listeners = Listeners(lambda request: told.append("admit"), lambda request: told.append("finish"))
    report = RequestReport(AdmittedRequest("a", "id", "x", None, None), listeners, calls.append, None)
    usage = Usage(1, 0, 0, 0, None, None, 0.0, ())
    end = StreamEnd(
        usage, (5,), None, reasons=(("abort", None),), finish_reason="abort", error=RequestAborted("gone")
    )
    report.finish(end)
    report.admit()
    for call in calls:
        call()
    assert told == ["admit", "finish"]


@pytest.mark.anyio
@pytest.mark.parametrize("failure", [ValueError("no such customer"), SystemExit(3)])
async def test_a_hook_that_raises_is_logged_and_touches_nothing(
    tiny_folder: Path, failure: BaseException, caplog: pytest.LogCaptureFixture
):
    finished: list[str] = []

    def fail(request: AdmittedRequest) -> None:
        raise failure

    def on_finish(request: FinishedRequest) -> None:
        finished.append(request.request_id)
        raise failure

    async with AsyncEngine(tiny_folder, CONFIG, on_admit=fail, on_finish=on_finish) as engine:

        def errors() -> list[logging.LogRecord]:
            return [record for record in caplog.records if record.levelno == logging.ERROR]

        with caplog.at_level(logging.ERROR, "motet"):
            for i in range(3):
                assert len((await engine.generate([5, 6], SHORT, request_id=f"{i}")).token_ids) == 8
            await until(lambda: len(errors()) == 6)
    assert finished == list("012"), "an on_admit that fails keeps no on_finish away"
    assert all(record.name == "motet" and "hook" in record.message for record in errors())
    assert str(failure) in caplog.text


@pytest.mark.anyio
async def test_what_is_no_plain_function_is_refused(tiny_folder: Path):
    async def on_finish(request: FinishedRequest) -> None:
        pass

    with pytest.raises(InvalidRequest, match="on_finish must be a plain function, not an async one"):
        AsyncEngine(tiny_folder, on_finish=on_finish)
    with pytest.raises(InvalidRequest, match="on_admit must be a function"):
        AsyncEngine(tiny_folder, on_admit="print")


@pytest.mark.anyio
async def test_an_engine_without_hooks_has_no_thread_for_them(tiny_folder: Path):
    def hook_threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "motet-hooks"]

    async with AsyncEngine(tiny_folder, CONFIG) as engine:
        await engine.generate([5], SHORT)
        assert hook_threads() == []
        async with AsyncEngine(tiny_folder, CONFIG, on_finish=lambda request: None):
            assert hook_threads() == ["motet-hooks"]
    await until(lambda: hook_threads() == [])


@pytest.mark.anyio
async def test_a_hook_may_speak_to_the_event_loop_that_closes_the_engine(
    tiny_folder: Path, anyio_backend: str
):
    heard: list[str] = []

    async with AsyncEngine(
        tiny_folder, CONFIG, on_finish=lambda r: post(heard.append, r.request_id)
    ) as engine:
        if anyio_backend == "trio":
            import trio

            post = trio.lowlevel.current_trio_token().run_sync_soon
        else:
            import asyncio

            post = asyncio.get_running_loop().call_soon_threadsafe
        for i in range(3):
            await engine.generate([5], SHORT, request_id=f"{i}")
    await until(lambda: len(heard) == 3)
    assert heard == list("012")


def test_a_hook_may_close_its_blocking_engine(tiny_folder: Path):
    told: list[str] = []
    closed, told_both = threading.Event(), threading.Event()

    def close(request: FinishedRequest) -> None:
        told.append(request.finish_reason)
        if len(told) == 1:
            engine.close()
            closed.set()
        else:
            told_both.set()

    engine = Engine(tiny_folder, CONFIG, on_finish=close)
    engine.start()
    long = engine.stream([5], LONG)
    engine.generate([6], SHORT)
    assert closed.wait(20), "it waits for itself"
    with pytest.raises(EngineClosed):
        long.result()
    with pytest.raises(EngineClosed):
        engine.stats()
    assert told_both.wait(20) and told == ["length", "abort"]


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["a loop of its own", "the application's loop", "a task on that loop"])
async def test_a_hook_may_close_its_engine(where: str, tiny_folder: Path, anyio_backend: str):
    """By any way from a thread to an event loop; the hooks are told of what that close ends, too."""
    told: list[str] = []
    closed = threading.Event()
    token = anyio.lowlevel.current_token()

    async def close() -> None:
        await engine.aclose()
        closed.set()

    def on_finish(request: FinishedRequest) -> None:
        told.append(request.finish_reason)
        if len(told) == 1:
            if where == "a loop of its own":
                anyio.run(close, backend=anyio_backend)
            elif where == "the application's loop":
                anyio.from_thread.run(close, token=token)
            else:
                anyio.from_thread.run_sync(group.start_soon, close, token=token)

    engine = AsyncEngine(tiny_folder, CONFIG, on_finish=on_finish)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            await engine.start()
            long = engine.stream([5], LONG)
            await engine.generate([6], SHORT)
            with pytest.raises(EngineClosed):
                await long.result()
            await until(closed.is_set)
        with pytest.raises(EngineClosed):
            engine.stats()
        await until(lambda: told == ["length", "abort"])


@pytest.mark.anyio
async def test_a_close_that_a_hook_began_waits_for_hooks_once_that_has_returned(tiny_folder: Path):
    told: list[str] = []
    token = anyio.lowlevel.current_token()
    go = anyio.Event()

    async def close_later() -> None:
        await go.wait()
        await engine.aclose()
        assert told == ["length", "abort"]

    def on_finish(request: FinishedRequest) -> None:
        if not told:
            anyio.from_thread.run_sync(group.start_soon, close_later, token=token)
        else:
            time.sleep(0.2)
        told.append(request.finish_reason)

    engine = AsyncEngine(tiny_folder, CONFIG, on_finish=on_finish)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            await engine.start()
            long = engine.stream([5], LONG)
            await engine.generate([6], SHORT)
            await until(lambda: told == ["length"])
            go.set()
            with pytest.raises(EngineClosed):
                await long.result()


def test_an_interpreter_that_ends_with_the_engine_open_still_tells_the_ends(tiny_folder: Path):
    script = textwrap.dedent(f"""
        import asyncio
        from motet import AsyncEngine, SamplingParams
        def on_finish(request):
            print(request.request_id, request.finish_reason, flush=True)
        engine = AsyncEngine({str(tiny_folder)!r}, on_finish=on_finish)
        async def main():
            global stream
            await engine.start()
            stream = engine.stream([5, 6], SamplingParams(max_tokens=400, ignore_eos=True), request_id="a")
            await stream.__anext__()
        asyncio.run(main())
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("a abort\n", "", 0)


@pytest.mark.anyio
async def test_many_requests_on_many_tasks_are_each_told_once(tiny_folder: Path):
    book = Book()
    async with engine_of(tiny_folder, book) as engine:

        async def use(i: int) -> None:
            with anyio.move_on_after(0.001 * (i % 7) if i % 3 else 30):
                await engine.generate([5, i % 200], SHORT, request_id=f"{i}")

        async with anyio.create_task_group() as group:
            for i in range(100):
                group.start_soon(use, i)
    told = [request.request_id for request in book.admitted]
    assert len(told) == len(set(told)) == 100
    assert sorted(told) == sorted(end.request_id for end in book.finished)
