"""Engine: AsyncEngine for code without an event loop."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from motet import (
    AdapterNotFound,
    AsyncEngine,
    Completion,
    Engine,
    EngineClosed,
    InvalidRequest,
    ModelNotFound,
    RequestAborted,
    SamplingParams,
    TenantPolicy,
    TokenStream,
)
from motet.sdk.blocking import BlockingStream
from tests.sdk.conftest import CONFIG
from tests.tiny import greedy

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=450, ignore_eos=True)
PROMPT = [5, 6, 7]


def until(condition: Callable[[], bool], within: float = 20.0) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def has_thread(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def settle(engine: Engine) -> None:
    """Waits until no request is left, then asserts that nothing leaked."""
    until(lambda: not engine.stats().per_tenant)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocked, stats.kv_blocks_used) == (0, 0, 0, 0)
    assert all(info.in_use == 0 for info in engine.adapters())


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[Engine]:
    with Engine(tiny_folder, CONFIG) as engine:
        yield engine
        settle(engine)


def public(cls: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


@pytest.mark.parametrize(("ours", "theirs"), [(Engine, AsyncEngine), (BlockingStream, TokenStream)])
def test_the_public_signatures_are_those_of_the_asynchronous_face(ours: type, theirs: type):
    internal = {"receive"}  # the engine's side of a TokenStream
    expected = {
        name.replace("aclose", "close"): s for name, s in public(theirs).items() if name not in internal
    }
    assert public(ours).keys() == expected.keys()
    for name, signature in public(ours).items():
        assert signature.parameters == expected[name].parameters, name
        assert signature.return_annotation.replace("BlockingStream", "TokenStream") == (
            expected[name].return_annotation
        )
        assert inspect.getdoc(getattr(ours, name))
    if ours is Engine:
        assert inspect.signature(Engine) == inspect.signature(AsyncEngine)


def test_tokens_and_results_are_those_of_transformers(engine: Engine, tiny_model: LlamaForCausalLM):
    expected = greedy(tiny_model, PROMPT, 12)
    tokens = list(engine.stream(PROMPT, SHORT))
    assert [token.token_id for token in tokens] == expected
    assert [token.finish_reason for token in tokens] == [None] * 11 + ["length"]
    assert list(engine.generate(PROMPT, SHORT).token_ids) == expected
    batch = engine.generate_batch([PROMPT, []], SHORT)
    assert list(batch[0].token_ids) == expected and isinstance(batch[1], InvalidRequest)


def test_a_result_holds_the_tokens_already_iterated(engine: Engine):
    stream = engine.stream(PROMPT, SHORT, request_id="mine")
    first = next(stream)
    completion = stream.result()
    assert isinstance(completion, Completion) and completion.token_ids[0] == first.token_id
    assert stream.request_id == "mine" and stream.usage == completion.usage
    assert stream.result() == completion and list(stream) == []


def test_adapters_tenants_and_insight_are_at_hand(engine: Engine, adapters: dict[str, Path]):
    assert engine.load_adapter("a", adapters["r5"]) == engine.adapters()[0]
    assert engine.generate(PROMPT, SHORT, adapter="a").token_ids != engine.generate(PROMPT, SHORT).token_ids
    engine.set_tenant("acme", TenantPolicy(max_priority=0))
    with pytest.raises(InvalidRequest, match="priority"):
        engine.stream(PROMPT, SHORT, tenant="acme", priority=1)
    engine.unload_adapter("a", in_flight="abort")
    with pytest.raises(AdapterNotFound):
        engine.generate(PROMPT, adapter="a")
    with pytest.raises(InvalidRequest, match="chat template"):
        engine.chat([{"role": "user", "content": "a"}])
    assert engine.stats().kv_blocks_total > 0 and engine.model_info() and callable(engine.metrics_app())


def test_errors_come_where_the_asynchronous_ones_do(engine: Engine):
    with pytest.raises(InvalidRequest, match="empty"):
        engine.stream([])
    stream = engine.stream("")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="empty"):
            next(stream)


def test_leaving_a_stream_in_any_way_ends_its_request(engine: Engine):
    with engine.stream(PROMPT, LONG) as stream:
        next(stream)
    settle(engine)
    with pytest.raises(RequestAborted):
        list(stream)
    for _ in engine.stream(PROMPT, LONG):
        break
    gc.collect()
    settle(engine)
    stream = engine.stream(PROMPT, LONG, request_id="a")
    assert engine.abort("a") is True and engine.abort("a") is False
    with pytest.raises(RequestAborted):
        stream.result()


def test_many_threads_use_one_engine_at_once(engine: Engine, tiny_model: LlamaForCausalLM):
    prompts = [[3 + i, 4 + i, 5] for i in range(16)]

    def run(prompt: list[int]) -> list[int]:
        return [token.token_id for token in engine.stream(prompt, SHORT)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, prompts)) == [greedy(tiny_model, prompt, 12) for prompt in prompts]


def test_it_works_where_an_event_loop_runs(engine: Engine):
    async def cell() -> int:
        return len([token async for token in _aiter(engine)])

    async def _aiter(engine: Engine):
        for token in engine.stream(PROMPT, SHORT):
            yield token

    assert asyncio.run(cell()) == 12


def test_it_starts_and_closes_again_and_says_so_between(tiny_folder: Path):
    engine = Engine(tiny_folder, CONFIG)
    for _ in range(2):
        for call in (lambda: engine.generate(PROMPT), engine.stats, lambda: engine.stream(PROMPT)):
            with pytest.raises(EngineClosed):
                call()
        engine.close()
        engine.start()
        engine.start()
        assert len(engine.generate(PROMPT, SHORT).token_ids) == 12
        engine.close(drain=5)
        engine.close()
    until(lambda: not has_thread("motet-engine") and not has_thread("motet-blocking"))


def test_closing_ends_what_other_threads_wait_for(tiny_folder: Path):
    engine = Engine(tiny_folder, CONFIG)
    engine.start()
    stream = engine.stream(PROMPT, LONG)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(list, stream), pool.submit(engine.generate, PROMPT, LONG)]
        until(lambda: engine.stats().running == 2)
        engine.close()
        for future in waiting:
            with pytest.raises(EngineClosed):
                future.result(10)


def test_an_engine_that_does_not_start_leaves_no_thread(tmp_path: Path):
    engine = Engine(tmp_path / "nothing")
    for _ in range(2):
        with pytest.raises(ModelNotFound):
            engine.start()
    until(lambda: not has_thread("motet-blocking"))


def test_an_engine_that_is_dropped_unclosed_leaves_no_thread(tiny_folder: Path):
    engine = Engine(tiny_folder, CONFIG)
    engine.start()
    engine.generate(PROMPT, SHORT)
    del engine
    gc.collect()
    until(lambda: not has_thread("motet-engine") and not has_thread("motet-blocking"))


@pytest.mark.parametrize("call", ["generate", "stream", "batch"])
def test_an_interrupt_ends_the_call_that_waits_and_its_request(engine: Engine, call: str):
    endless = [PROMPT] * 500
    calls = {
        "generate": lambda: engine.generate(PROMPT, LONG),
        "stream": lambda: list(engine.stream(PROMPT, LONG)),
        "batch": lambda: engine.generate_batch(endless, LONG),
    }

    def interrupt() -> None:
        until(lambda: engine.stats().running > 0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            calls[call]()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    settle(engine)
    assert len(engine.generate(PROMPT, SHORT).token_ids) == 12


def test_a_script_that_never_closes_ends_by_itself(tiny_folder: Path):
    script = textwrap.dedent(f"""
        from motet import Engine, SamplingParams
        engine = Engine({str(tiny_folder)!r})
        engine.start()
        stream = engine.stream([5, 6], SamplingParams(max_tokens=450, ignore_eos=True))
        print(len(engine.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids), next(stream).index)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("3 0\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_in_a_forked_process_it_is_closed_and_does_not_hang(tiny_folder: Path):
    script = textwrap.dedent(f"""
        import os
        from motet import Engine, EngineClosed, SamplingParams
        with Engine({str(tiny_folder)!r}) as engine:
            if os.fork() == 0:
                try:
                    engine.generate([5])
                except EngineClosed:
                    engine.close()
                    os._exit(7)
                os._exit(1)
            print(os.waitstatus_to_exitcode(os.wait()[1]))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "7\n"
