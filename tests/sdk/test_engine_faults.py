"""Faults of the engine's own bookkeeping, wherever they strike: nobody waits for ever, and the engine starts again."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from motet import AdapterNotFound, AsyncEngine, EngineConfig, EngineDead, FinishedRequest, SamplingParams
from motet.lora.pool import AdapterPool
from motet.runtime.engine_loop import EngineLoop
from motet.runtime.meter import Meter
from motet.runtime.scheduler import Scheduler
from motet.sdk.delivery import Delivery
from tests.sdk.checks import until

pytestmark = pytest.mark.anyio
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, n=2)

FAULTS = [  # what raises, and at which of its calls
    (Scheduler, "_release", 1),  # a request has ended, and its stream is not told yet
    (Scheduler, "_end", 3),
    (Scheduler, "abandon", 1),
    (Meter, "count", 2),
    (Meter, "_count_end", 1),
    (Delivery, "detach", 1),
    (AdapterPool, "next_job", 1),
    (AdapterPool, "_next_bring", 1),
    (AdapterPool, "not_resolved", 1),
    (EngineLoop, "live_requests", 1),
]


@pytest.mark.parametrize(("owner", "method", "call"), FAULTS)
async def test_case_24_a_fault_in_the_bookkeeping_ends_every_stream_and_call(
    owner: type, method: str, call: int, tiny_folder: Path, adapters: dict[str, Path], monkeypatch
):
    struck: list[bool] = []
    ended: list[FinishedRequest] = []
    calls = 0
    original = getattr(owner, method)

    def strike(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            struck.append(True)
            raise MemoryError("struck")
        return original(*args, **more)

    async def wait_for(what: Any) -> None:
        with suppress(AdapterNotFound):  # of the unknown one, where the fault strikes later
            try:
                await what
            except EngineDead as error:
                dead.append(error)

    config = EngineConfig(
        kv_cache_bytes=4 << 20, threads=1, max_num_seqs=3, adapter_resolver=lambda name: None
    )
    engine = AsyncEngine(tiny_folder, config, on_finish=ended.append)
    dead: list[EngineDead] = []
    await engine.start()
    await engine.load_adapter("loaded", adapters["r5"])
    monkeypatch.setattr(owner, method, strike)
    if method == "abandon":
        engine._running()[1].core._runner._steps = lambda *_: 1 / 0
    streams = []
    for name in (None, "loaded", None, "unknown"):
        with suppress(EngineDead):  # the fault may strike before all have begun
            streams.append(engine.stream([5, 6], SHORT, adapter=name))
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for stream in streams:
                group.start_soon(wait_for, stream.result())
            if owner is AdapterPool:
                group.start_soon(wait_for, engine.load_adapter("other", adapters["r8"]))
            if owner is EngineLoop:
                group.start_soon(wait_for, engine.unload_adapter("loaded", in_flight="abort"))
        assert struck
        with pytest.raises(EngineDead):
            engine.stream([5])
        assert dead and len({id(error) for error in dead}) == len(dead)
        monkeypatch.undo()
        await engine.start()
        await engine.generate([5], SHORT)
        await engine.aclose()
    assert len(ended) == len(streams) + 1
    await until(lambda: not any(thread.name.startswith("motet") for thread in threading.enumerate()))
