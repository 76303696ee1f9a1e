"""Adapters on a live engine: mixed in one batch, loaded, replaced and unloaded while streams run."""

from __future__ import annotations

import itertools
import shutil
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
    EngineConfig,
    InvalidRequest,
    RequestAborted,
    SamplingParams,
)
from tests.sdk.checks import settled, until
from tests.tiny import greedy

pytestmark = pytest.mark.anyio
PROMPT = [3 + (7 * i) % 250 for i in range(40)]
LONG = SamplingParams(max_tokens=300, ignore_eos=True)


def params(num_tokens: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def peft_answers(tiny_folder: Path, adapters: dict[str, Path]) -> dict[str | None, list[int]]:
    """PEFT's own greedy answers to PROMPT, by adapter."""
    answers: dict[str | None, list[int]] = {}
    for name, folder in adapters.items():
        base = LlamaForCausalLM.from_pretrained(tiny_folder).eval()
        answers[name] = greedy(PeftModel.from_pretrained(base, folder).eval(), PROMPT, 16)
    answers[None] = greedy(LlamaForCausalLM.from_pretrained(tiny_folder).eval(), PROMPT, 16)
    assert len({tuple(answer) for answer in answers.values()}) == len(answers), "the adapters are strong"
    return answers


async def load_all(engine: AsyncEngine, adapters: dict[str, Path]) -> None:
    for name, folder in adapters.items():
        info = await engine.load_adapter(name, folder)
        assert (info.name, info.residency, info.in_use) == (name, "device", 0)


async def test_case_13_ranks_mixed_with_base_rows_each_answer_as_peft_does(
    engine: AsyncEngine, adapters: dict[str, Path], peft_answers: dict[str | None, list[int]]
):
    await load_all(engine, adapters)
    got: dict[str | None, list[int]] = {}

    async def run(name: str | None) -> None:
        got[name] = list((await engine.generate(PROMPT, params(16), adapter=name)).token_ids)

    async with anyio.create_task_group() as group:
        for name in peft_answers:
            group.start_soon(run, name)
    assert got == peft_answers


async def test_case_07_one_prompt_under_two_adapters_and_base_in_all_orders(
    engine: AsyncEngine, adapters: dict[str, Path], peft_answers: dict[str | None, list[int]]
):
    await load_all(engine, {name: adapters[name] for name in ("r5", "r64")})
    for number, orders in enumerate(itertools.permutations(["r5", "r64", None])):
        for name in orders:
            completion = await engine.generate(PROMPT, params(16), adapter=name, tenant=f"tenant {number}")
            assert completion.usage.cached_tokens == 0
            assert list(completion.token_ids) == peft_answers[name]
        for name in orders:
            completion = await engine.generate(PROMPT, params(16), adapter=name, tenant=f"tenant {number}")
            assert completion.usage.cached_tokens == 32
            assert list(completion.token_ids) == peft_answers[name]


async def test_case_08_new_weights_under_an_old_name_never_meet_old_blocks(
    engine: AsyncEngine, adapters: dict[str, Path], peft_answers: dict[str | None, list[int]]
):
    first = await engine.load_adapter("it", adapters["r5"])
    assert list((await engine.generate(PROMPT, params(16), adapter="it")).token_ids) == peft_answers["r5"]
    second = await engine.load_adapter("it", adapters["r64"], replace=True)
    assert second.generation > first.generation and second.digest != first.digest
    completion = await engine.generate(PROMPT, params(16), adapter="it")
    assert completion.usage.cached_tokens == 0
    assert list(completion.token_ids) == peft_answers["r64"]


async def test_case_09_tenants_never_share_a_prefix_and_each_shares_its_own(engine: AsyncEngine):
    for tenant in ("x", "y"):
        first = await engine.generate(PROMPT, params(4), tenant=tenant)
        again = await engine.generate(PROMPT, params(4), tenant=tenant)
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 32)
        assert first.token_ids == again.token_ids


async def test_a_replaced_adapter_lives_until_its_last_request_ends(
    engine: AsyncEngine, adapters: dict[str, Path], tiny_folder: Path
):
    await engine.load_adapter("it", adapters["r5"])
    stream = engine.stream(PROMPT, params(200), adapter="it")
    await stream.__anext__()
    await engine.load_adapter("it", adapters["r64"], replace=True)
    assert [(info.generation, info.in_use) for info in engine.adapters()] == [(2, 0)]
    old = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_folder), adapters["r5"]).eval()
    assert list((await stream.result()).token_ids) == greedy(old, PROMPT, 200)
    await settled(engine)
    assert engine._running()[1].adapters._tiers._arena.used_bytes == engine.adapters()[0].bytes


async def test_an_unloaded_adapter_finishes_its_streams_and_gives_its_memory_back(
    engine: AsyncEngine, adapters: dict[str, Path]
):
    await engine.load_adapter("it", adapters["r64"])
    stream = engine.stream(PROMPT, params(100), adapter="it")
    await stream.__anext__()
    await engine.unload_adapter("it")
    with pytest.raises(AdapterNotFound, match="'it'"):
        engine.stream(PROMPT, adapter="it")
    with pytest.raises(AdapterNotFound, match="'it'"):
        await engine.unload_adapter("it")
    assert len((await stream.result()).token_ids) == 100
    await settled(engine)
    assert engine.adapters() == []
    assert engine._running()[1].adapters._tiers._arena.used_bytes == 0


async def test_unloading_may_abort_what_runs(engine: AsyncEngine, adapters: dict[str, Path]):
    await engine.load_adapter("it", adapters["r5"])
    mine, other = engine.stream(PROMPT, LONG, adapter="it"), engine.stream(PROMPT, params(30))
    await mine.__anext__()
    await engine.unload_adapter("it", in_flight="abort")
    assert engine.adapters() == []
    with pytest.raises(RequestAborted):
        await mine.__anext__()
    assert len((await other.result()).token_ids) == 30
    with pytest.raises(InvalidRequest, match="'finish' or 'abort'"):
        await engine.unload_adapter("it", in_flight="later")


async def test_unloading_may_abort_what_runs_on_weights_that_were_replaced(
    engine: AsyncEngine, adapters: dict[str, Path]
):
    await engine.load_adapter("it", adapters["r5"])
    await engine.load_adapter("other", adapters["r5"])
    old, other = (engine.stream(PROMPT, LONG, adapter=name) for name in ("it", "other"))
    await old.__anext__()
    await engine.load_adapter("it", adapters["r8"], replace=True)
    await engine.unload_adapter("it", in_flight="abort")
    with pytest.raises(RequestAborted):
        await old.result()
    await other.__anext__()
    await engine.load_adapter("it", adapters["r8"])
    assert len((await engine.generate(PROMPT, params(30), adapter="it")).token_ids) == 30


async def test_a_taken_name_needs_replace(engine: AsyncEngine, adapters: dict[str, Path]):
    await engine.load_adapter("it", adapters["r5"])
    with pytest.raises(AdapterExists, match="replace"):
        await engine.load_adapter("it", adapters["r8"])
    with pytest.raises(InvalidRequest, match="name"):
        await engine.load_adapter("", adapters["r8"])
    for flags in ({"replace": "no"}, {"pin": 1}, {"replace": None}):
        with pytest.raises(InvalidRequest, match="True or False"):
            await engine.load_adapter("it", adapters["r8"], **flags)
    assert len(engine.adapters()) == 1


async def test_case_15_and_16_a_bad_adapter_is_an_error_and_streams_go_on(
    engine: AsyncEngine, adapters: dict[str, Path], tmp_path: Path
):
    stream = engine.stream(PROMPT, params(100))
    truncated = tmp_path / "truncated"
    shutil.copytree(adapters["r5"], truncated)
    weights = truncated / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for folder in (truncated, tmp_path / "nowhere", tmp_path):
        with pytest.raises(AdapterLoadError):
            await engine.load_adapter("it", folder)
    assert engine.adapters() == []
    assert len((await stream.result()).token_ids) == 100


async def test_no_room_is_an_error_that_says_how_much_there_is(tiny_folder: Path, adapters: dict[str, Path]):
    config = EngineConfig(kv_cache_bytes=4 << 20, adapter_bytes=64 << 10)
    async with AsyncEngine(tiny_folder, config) as engine:
        await engine.load_adapter("small", adapters["r1"])
        with pytest.raises(AdapterLoadError, match="adapter_bytes"):
            await engine.load_adapter("large", adapters["r256"])
        assert [info.name for info in engine.adapters()] == ["small"]
        await engine.generate(PROMPT, params(2), adapter="small")
        await settled(engine)


async def test_loading_never_stalls_a_running_stream(engine: AsyncEngine, adapters: dict[str, Path]):
    stream = engine.stream(PROMPT, LONG)
    await stream.__anext__()
    for number in range(8):
        await engine.load_adapter(f"a{number}", adapters["r256"])
        await stream.__anext__()
    stream.cancel()
    await until(lambda: not engine.stats().running)


async def test_stats_count_requests_by_adapter_and_tenant(engine: AsyncEngine, adapters: dict[str, Path]):
    await engine.load_adapter("it", adapters["r5"])
    streams = [
        engine.stream(PROMPT, LONG, adapter="it", tenant="x"),
        engine.stream(PROMPT, LONG, adapter="it", tenant="y"),
        engine.stream(PROMPT, LONG, tenant="y"),
    ]
    await until(lambda: engine.stats().running == 3)
    stats = engine.stats()
    assert (dict(stats.per_adapter), dict(stats.per_tenant)) == ({"it": 2, "": 1}, {"x": 1, "y": 2})
    assert 0 < stats.kv_blocks_used <= stats.kv_blocks_total
    assert stats.backend == engine.model_info().backend
    for stream in streams:
        stream.cancel()
