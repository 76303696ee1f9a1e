"""More adapters than the device holds, on a live engine: waiting, unloading, resolving, and folders that go."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from peft import PeftModel
from transformers import LlamaForCausalLM

from motet import (
    AdapterExists,
    AdapterLoadError,
    AdapterNotFound,
    AsyncEngine,
    DeadlineExceeded,
    EngineConfig,
    RequestAborted,
    SamplingParams,
)
from tests.sdk.checks import settled, until
from tests.tiny import greedy

pytestmark = pytest.mark.anyio
PROMPT = [3 + (7 * i) % 250 for i in range(40)]
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
SLOW = SamplingParams(
    max_tokens=300, ignore_eos=True, logits_processors=[lambda ids, row: time.sleep(0.01) or row]
)
"""Three seconds at least, however fast the machine."""
SIZE = 4 * 2 * 8 * ((64 + 64) + (64 + 32))
"""Bytes of "r8": rank 8 on q and v of two layers, float32."""


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


@asynccontextmanager
async def small_engine(
    folder: Path, num_places: int = 1, host_bytes: int = 1 << 20, **more: object
) -> AsyncIterator[AsyncEngine]:
    """An engine whose device holds so many adapters of the size of "r8"."""
    config = EngineConfig(
        kv_cache_bytes=4 << 20,
        threads=1,
        adapter_bytes=num_places * SIZE,
        adapter_host_bytes=host_bytes,
        **more,
    )
    async with AsyncEngine(folder, config) as engine:
        yield engine
        await settled(engine)


def residency(engine: AsyncEngine) -> dict[str, str]:
    return {info.name: info.residency for info in engine.adapters()}


@pytest.fixture(scope="module")
def answers(tiny_folder: Path, adapters: dict[str, Path]) -> dict[str | None, list[int]]:
    """PEFT's own greedy answers to PROMPT: of the base, and of the two adapters that take SIZE at most."""
    base = LlamaForCausalLM.from_pretrained(tiny_folder).eval()
    found: dict[str | None, list[int]] = {None: greedy(base, PROMPT, 8)}
    for name in ("r1", "r8"):
        base = LlamaForCausalLM.from_pretrained(tiny_folder)
        found[name] = greedy(PeftModel.from_pretrained(base, adapters[name]).eval(), PROMPT, 8)
    assert len({tuple(answer) for answer in found.values()}) == 3
    return found


@pytest.mark.parametrize("host_bytes", [0, 2 * SIZE])
async def test_more_adapters_than_the_device_holds_all_answer_as_peft_does(
    tiny_folder: Path, adapters: dict[str, Path], answers: dict[str | None, list[int]], host_bytes: int
):
    async with small_engine(tiny_folder, 2, host_bytes) as engine:
        names = {f"{kind} {number}": kind for number in range(4) for kind in ("r8", "r1")}
        for name, kind in names.items():
            await engine.load_adapter(name, adapters[kind])
        places = list(residency(engine).values())
        assert set(places) == ({"device", "disk"} if host_bytes == 0 else {"device", "host", "disk"})
        got: dict[tuple[str | None, int], list[int]] = {}

        async def run(name: str | None, turn: int) -> None:
            got[name, turn] = list((await engine.generate(PROMPT, params(8), adapter=name)).token_ids)

        async with anyio.create_task_group() as group:
            for turn in range(2):
                for name in (*names, None):
                    group.start_soon(run, name, turn)
        for (name, _), answer in got.items():
            assert answer == answers[names[name] if name is not None else None], name
        pool = engine._running()[1].adapters
        assert pool.evictions and pool.reloads and pool.loads == 8
        tenth = await engine.generate(PROMPT, params(8), adapter="r8 0")
        assert tenth.usage.cached_tokens == 32, "a prefix outlives the adapter's stay on the device"


async def test_a_request_whose_adapter_is_away_is_blocked_and_holds_up_nobody(
    tiny_folder: Path, adapters: dict[str, Path]
):
    async with small_engine(tiny_folder) as engine:
        await engine.load_adapter("a", adapters["r8"])
        await engine.load_adapter("b", adapters["r8"])
        user = engine.stream(PROMPT, LONG, adapter="b")
        await user.__anext__()
        waiting = engine.stream(PROMPT, params(4), adapter="a")
        assert len((await engine.generate(PROMPT, params(4))).token_ids) == 4
        await until(lambda: engine.stats().blocked == 1)
        assert not user.usage, "b is in use, so a waits"
        user.cancel()
        result = await waiting.result()
        assert result.usage.timeline[0][0] == "blocked"
        assert residency(engine) == {"a": "device", "b": "host"}


@pytest.mark.parametrize("end", ["cancel", "abort", "deadline", "unload"])
async def test_case_22_a_request_may_end_while_its_adapter_is_away(
    tiny_folder: Path, adapters: dict[str, Path], end: str
):
    async with small_engine(tiny_folder) as engine:
        await engine.load_adapter("a", adapters["r8"])
        await engine.load_adapter("b", adapters["r8"])
        user = engine.stream(PROMPT, SLOW, adapter="b")
        await user.__anext__()
        waiting = engine.stream(
            PROMPT, adapter="a", request_id="it", deadline=0.2 if end == "deadline" else None
        )
        await until(lambda: engine.stats().blocked == 1)
        if end == "cancel":
            waiting.cancel()
        elif end == "abort":
            assert await engine.abort("it")
            assert not await engine.abort("it")
        elif end == "unload":
            await engine.unload_adapter("a", in_flight="abort")
        with pytest.raises(DeadlineExceeded if end == "deadline" else RequestAborted):
            await waiting.__anext__()
        await until(lambda: engine.stats().blocked == 0)
        assert all(info.in_use == (info.name == "b") for info in engine.adapters())
        await user.__anext__()
        user.cancel()


async def test_case_11_an_adapter_unloaded_or_replaced_while_a_request_waits_for_it_serves_that_request(
    tiny_folder: Path, adapters: dict[str, Path], answers: dict[str | None, list[int]]
):
    async with small_engine(tiny_folder) as engine:
        await engine.load_adapter("a", adapters["r8"])
        await engine.load_adapter("b", adapters["r8"])
        for replace in (True, False):
            user = engine.stream(PROMPT, LONG, adapter="b")
            await user.__anext__()
            waiting = engine.stream(PROMPT, params(8), adapter="a")
            await until(lambda: engine.stats().blocked == 1)
            if replace:
                info = await engine.load_adapter("a", adapters["r1"], replace=True)
                assert info.residency == "host", "a load waits for no room"
            else:
                await engine.unload_adapter("a")
                with pytest.raises(AdapterNotFound):
                    engine.stream(PROMPT, adapter="a")
            user.cancel()
            assert list((await waiting.result()).token_ids) == answers["r8" if replace else "r1"]
        await settled(engine)
        assert residency(engine) == {"b": "host"}


async def test_case_11_sixteen_answers_outlive_their_adapters_name(
    engine: AsyncEngine, adapters: dict[str, Path]
):
    await engine.load_adapter("it", adapters["r8"])
    stream = engine.stream(PROMPT, params(20).model_copy(update={"n": 16}), adapter="it")
    await stream.__anext__()
    await engine.unload_adapter("it")
    with pytest.raises(AdapterNotFound):
        engine.stream(PROMPT, adapter="it")
    outputs = (await stream.result()).outputs
    assert [len(output.token_ids) for output in outputs] == [20] * 16
    await settled(engine)
    assert engine._running()[1].adapters._tiers._arena.used_bytes == 0


async def test_case_08_a_folder_that_changed_under_a_loaded_name_is_never_served(
    tiny_folder: Path, adapters: dict[str, Path], answers: dict[str | None, list[int]], tmp_path: Path
):
    folder = shutil.copytree(adapters["r8"], tmp_path / "a")
    async with small_engine(tiny_folder, host_bytes=0) as engine:
        await engine.load_adapter("a", folder)
        assert list((await engine.generate(PROMPT, params(8), adapter="a")).token_ids) == answers["r8"]
        shutil.copytree(adapters["r1"], folder, dirs_exist_ok=True)
        await engine.load_adapter("b", adapters["r8"])
        other = engine.stream(PROMPT, params(60))
        stream = engine.stream(PROMPT, params(8), adapter="a")
        with pytest.raises(AdapterLoadError, match=r"changed. Load it again"):
            await stream.__anext__()
        await engine.load_adapter("a", folder, replace=True)
        completion = await engine.generate(PROMPT, params(8), adapter="a")
        assert completion.usage.cached_tokens == 0
        assert list(completion.token_ids) == answers["r1"]
        assert len((await other.result()).token_ids) == 60


@pytest.mark.parametrize("fault", ["truncated", "deleted"])
async def test_case_16_a_folder_that_is_damaged_later_fails_its_requests_and_no_other(
    tiny_folder: Path, adapters: dict[str, Path], tmp_path: Path, fault: str
):
    folder = shutil.copytree(adapters["r8"], tmp_path / "a")
    async with small_engine(tiny_folder, host_bytes=0) as engine:
        await engine.load_adapter("a", folder)
        await engine.load_adapter("b", adapters["r8"])
        weights = folder / "adapter_model.safetensors"
        if fault == "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        else:
            shutil.rmtree(folder)
        other = engine.stream(PROMPT, params(60), adapter="b")
        for _ in range(2):
            streams = [engine.stream(PROMPT, adapter="a") for _ in range(3)]
            for stream in streams:
                with pytest.raises(AdapterLoadError):
                    await stream.result()
        assert len((await other.result()).token_ids) == 60


async def test_case_12_fifty_loads_of_one_name_have_one_winner(
    engine: AsyncEngine, adapters: dict[str, Path]
):
    outcomes: list[object] = []

    async def load() -> None:
        try:
            outcomes.append(await engine.load_adapter("it", adapters["r8"]))
        except AdapterExists as error:
            outcomes.append(type(error))

    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(load)
    assert outcomes.count(AdapterExists) == 49
    assert engine._running()[1].adapters.loads == 1
    assert [info.generation for info in engine.adapters()] == [1]


async def test_case_12_load_racing_unload_is_one_or_the_other(engine: AsyncEngine, adapters: dict[str, Path]):
    async def load() -> None:
        await engine.load_adapter("it", adapters["r8"], replace=True)

    async def unload() -> None:
        await anyio.lowlevel.checkpoint()
        try:
            await engine.unload_adapter("it")
        except AdapterNotFound:
            return

    for _ in range(10):
        async with anyio.create_task_group() as group:
            for call in (load, unload, load, unload):
                group.start_soon(call)
        for name in residency(engine):
            await engine.generate(PROMPT, params(2), adapter=name)
    await settled(engine)


async def test_a_cancelled_load_leaves_nothing(
    engine: AsyncEngine, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    go, reading = threading.Event(), threading.Event()
    from motet.lora import loader

    def slow(folder: Path, sites: object, real: Callable = loader.read_adapter) -> object:
        reading.set()
        go.wait(20)
        return real(folder, sites)

    monkeypatch.setattr(loader, "read_adapter", slow)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.load_adapter, "it", adapters["r8"])
        await until(reading.is_set)
        group.cancel_scope.cancel()
    go.set()
    await engine.load_adapter("other", adapters["r8"])
    assert list(residency(engine)) == ["other"]


async def test_pins_stay_and_fill_the_device_with_an_error(tiny_folder: Path, adapters: dict[str, Path]):
    async with small_engine(tiny_folder, 2) as engine:
        pinned = await engine.load_adapter("p", adapters["r8"], pin=True)
        assert (pinned.pinned, pinned.residency) == (True, "device")
        for number in range(3):
            await engine.load_adapter(f"a{number}", adapters["r8"])
            await engine.generate(PROMPT, params(2), adapter=f"a{number}")
            assert residency(engine)["p"] == "device"
        stream = engine.stream(PROMPT, LONG, adapter="a2")
        await stream.__anext__()
        with anyio.move_on_after(0.1) as scope:
            await engine.load_adapter("q", adapters["r8"], pin=True)
        assert scope.cancelled_caught and "q" not in residency(engine)
        stream.cancel()
        await engine.load_adapter("q", adapters["r8"], pin=True)
        with pytest.raises(AdapterLoadError, match="pinned adapters hold"):
            await engine.load_adapter("more", adapters["r8"])
        with pytest.raises(AdapterLoadError, match="pinned adapters hold"):
            await engine.generate(PROMPT, adapter="a0")


async def test_an_unknown_name_goes_to_the_resolver_once(
    tiny_folder: Path, adapters: dict[str, Path], answers: dict[str | None, list[int]]
):
    asked: list[str] = []

    def resolver(name: str) -> Path | None:
        asked.append(name)
        if name == "broken":
            raise ConnectionError("no network")
        return adapters.get(name)

    async with small_engine(tiny_folder, 2, adapter_resolver=resolver) as engine:
        streams = [engine.stream(PROMPT, params(8), adapter="r8") for _ in range(50)]
        for stream in streams:
            assert list((await stream.result()).token_ids) == answers["r8"]
        assert asked == ["r8"]
        again = await engine.generate(PROMPT, params(8), adapter="r8")
        assert (asked, again.usage.cached_tokens) == (["r8"], 32)
        assert engine._running()[1].adapters.loads == 1

        unknown = engine.stream(PROMPT, adapter="nobody")  # does not raise here
        with pytest.raises(AdapterNotFound, match="'nobody'"):
            await unknown.__anext__()
        with pytest.raises(AdapterLoadError, match="'broken' failed: ConnectionError: no network") as caught:
            await engine.generate(PROMPT, adapter="broken")
        assert isinstance(caught.value.__cause__, ConnectionError)
        with pytest.raises(AdapterLoadError, match="adapter_bytes"):
            await engine.generate(PROMPT, adapter="r256")
        await engine.unload_adapter("r8")
        await engine.generate(PROMPT, params(2), adapter="r8")
        assert asked.count("r8") == 2


@pytest.mark.parametrize("answer", ["None", "its folder", "an error"])
async def test_a_resolver_may_load_the_adapter_itself(
    answer: str,
    tiny_folder: Path,
    adapters: dict[str, Path],
    answers: dict[str | None, list[int]],
    anyio_backend: str,
):
    def resolver(name: str) -> Path | None:
        for _ in range(2 if answer == "an error" else 1):  # AdapterExists
            anyio.run(engine.load_adapter, name, adapters[name], backend=anyio_backend)
        return adapters[name] if answer == "its folder" else None

    async with small_engine(tiny_folder, 2, adapter_resolver=resolver) as engine:
        streams = [engine.stream(PROMPT, params(8), adapter="r8") for _ in range(5)]
        for stream in streams:
            assert list((await stream.result()).token_ids) == answers["r8"]
        assert engine._running()[1].adapters.loads == 1


async def test_case_22_a_request_may_end_while_its_adapter_is_resolved(
    tiny_folder: Path, adapters: dict[str, Path]
):
    go = threading.Event()

    def resolver(name: str) -> Path:
        go.wait(20)
        return adapters["r8"]

    async with small_engine(tiny_folder, adapter_resolver=resolver) as engine:
        stream = engine.stream(PROMPT, adapter="it")
        await until(lambda: engine.stats().blocked == 1)
        stream.cancel()
        await until(lambda: engine.stats().blocked == 0)
        again = engine.stream(PROMPT, params(3), adapter="it")
        go.set()
        assert len((await again.result()).token_ids) == 3


async def test_case_17_the_root_holds_for_loads_and_for_the_resolver(
    tiny_folder: Path, adapters: dict[str, Path], tmp_path: Path
):
    root = tmp_path / "root"
    shutil.copytree(adapters["r8"], root / "in")
    (root / "link").symlink_to(adapters["r8"])
    more = {"adapter_root": str(root), "adapter_resolver": lambda name: root / name}
    async with small_engine(tiny_folder, **more) as engine:
        for source in ("../x", str(adapters["r8"]), adapters["r8"], "link", root / ".." / "x"):
            with pytest.raises(AdapterLoadError, match="adapter_root"):
                await engine.load_adapter("it", source)
        for name in ("../x", "link", str(adapters["r8"])):
            with pytest.raises(AdapterLoadError, match="adapter_root"):
                await engine.generate(PROMPT, adapter=name)
        assert engine.adapters() == []
        await engine.load_adapter("relative", "in")
        await engine.load_adapter("absolute", root / "in")
        await engine.generate(PROMPT, params(2), adapter="in")
