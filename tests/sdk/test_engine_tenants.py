"""Tenants on a running engine: whose cache is whose, and who may use what."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from motet import (
    AdapterNotAllowed,
    AsyncEngine,
    EngineClosed,
    EngineConfig,
    InvalidRequest,
    SamplingParams,
    TenantPolicy,
)

pytestmark = pytest.mark.anyio
PROMPT = list(range(3, 43))  # two full blocks and a half
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


async def cached(engine: AsyncEngine, tenant: str, **more) -> int:
    return (await engine.generate(PROMPT, SHORT, tenant=tenant, **more)).usage.cached_tokens


async def test_case_09_tenants_share_no_prompt_but_each_its_own(engine: AsyncEngine):
    assert await cached(engine, "x") == 0
    assert await cached(engine, "y") == 0
    assert await cached(engine, "x") == await cached(engine, "y") == 32


async def test_case_09_tenants_of_one_group_share_prompts_and_no_other_does(engine: AsyncEngine):
    for name in ("x", "y"):
        engine.set_tenant(name, TenantPolicy(prefix_group="friends"))
    engine.set_tenant("stranger", TenantPolicy(prefix_group="others"))
    first = await engine.generate(PROMPT, SHORT, tenant="x")
    shared = await engine.generate(PROMPT, SHORT, tenant="y")
    assert (first.usage.cached_tokens, shared.usage.cached_tokens) == (0, 32)
    assert first.token_ids == shared.token_ids
    for name in ("stranger", "friends", "group:friends", "default"):
        assert await cached(engine, name) == 0


async def test_case_09_leaving_a_group_ends_the_sharing(engine: AsyncEngine):
    for name in ("x", "y"):
        engine.set_tenant(name, TenantPolicy(prefix_group="friends"))
    await cached(engine, "x")
    engine.set_tenant("y", TenantPolicy())
    assert await cached(engine, "y") == 0
    assert await cached(engine, "y") == await cached(engine, "x") == 32
    engine.set_tenant("y", TenantPolicy(prefix_group="friends"))
    assert await cached(engine, "y") == 32


async def test_a_policy_holds_for_later_requests_alone_even_beside_one_that_waits_for_its_adapter(
    tiny_folder: Path, adapters: dict[str, Path]
):
    go = threading.Event()

    def resolver(name: str) -> Path:
        assert go.wait(20)
        return adapters["r8"]

    config = EngineConfig(kv_cache_bytes=4 << 20, threads=1, adapter_resolver=resolver)
    async with AsyncEngine(tiny_folder, config) as engine:
        engine.set_tenant("x", TenantPolicy(prefix_group="friends"))
        waiting = engine.stream(PROMPT, SHORT, tenant="y", adapter="a")
        engine.set_tenant("y", TenantPolicy(prefix_group="friends"))
        go.set()
        await waiting.result()
        assert (
            await cached(engine, "x", adapter="a") == 0
        )  # what y computed before it was a friend is its own
        assert await cached(engine, "y", adapter="a") == 32


async def test_case_09_even_in_a_group_nobody_hits_another_adapters_blocks(
    engine: AsyncEngine, adapters: dict[str, Path]
):
    await engine.load_adapter("a", adapters["r8"])
    for name in ("x", "y"):
        engine.set_tenant(name, TenantPolicy(prefix_group="friends"))
    await cached(engine, "x", adapter="a")
    assert await cached(engine, "y") == 0
    assert await cached(engine, "y", adapter="a") == 32


async def test_a_tenant_uses_only_the_adapters_it_may(engine: AsyncEngine, adapters: dict[str, Path]):
    await engine.load_adapter("acme-sql", adapters["r5"])
    await engine.load_adapter("other", adapters["r8"])
    engine.set_tenant("acme", TenantPolicy(adapters=["acme-*"]))
    await engine.generate([5], SHORT, tenant="acme", adapter="acme-sql")
    await engine.generate([5], SHORT, tenant="acme")
    for name in ("other", "not-even-loaded"):
        with pytest.raises(AdapterNotAllowed, match="acme"):
            engine.stream([5], SHORT, tenant="acme", adapter=name)
    await engine.generate([5], SHORT, tenant="someone", adapter="other")
    results = await engine.generate_batch([[5]] * 2, SHORT, tenant="acme", adapter=["acme-sql", "other"])
    assert isinstance(results[1], AdapterNotAllowed) and len(results[0].token_ids) == 4


async def test_a_tenants_priority_has_a_limit(engine: AsyncEngine):
    engine.set_tenant("acme", TenantPolicy(max_priority=3))
    await engine.generate([5], SHORT, tenant="acme", priority=3)
    with pytest.raises(InvalidRequest, match="above 3"):
        engine.stream([5], SHORT, tenant="acme", priority=4)


async def test_what_is_no_policy_is_refused(engine: AsyncEngine):
    with pytest.raises(InvalidRequest, match="must be a TenantPolicy, not dict"):
        engine.set_tenant("x", {"weight": 2.0})
    with pytest.raises(InvalidRequest, match="tenant's name"):
        engine.set_tenant("", TenantPolicy())


async def test_policies_end_with_the_engine(tiny_folder: Path):
    engine = AsyncEngine(tiny_folder, EngineConfig(kv_cache_bytes=4 << 20, threads=1))
    with pytest.raises(EngineClosed):
        engine.set_tenant("x", TenantPolicy(max_priority=0))
    async with engine:
        engine.set_tenant("x", TenantPolicy(max_priority=0))
    async with engine:
        await engine.generate([5], SHORT, tenant="x", priority=1)
