"""What must hold of an engine at rest."""

from __future__ import annotations

import anyio

from motet import AsyncEngine


async def settled(engine: AsyncEngine, *, within: float = 20.0) -> None:
    """Waits until no request is left, then asserts that nothing leaked."""
    session, runtime = engine._running()
    await until(lambda: not session.delivery.ids and not engine.stats().per_tenant, within=within)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocked, stats.kv_blocks_used) == (0, 0, 0, 0)
    assert not stats.per_adapter
    assert all(info.in_use == 0 for info in engine.adapters())
    runtime.core.scheduler.check_integrity()
    runtime.adapters.check_integrity()
    runtime.admission.check_integrity()
    assert runtime.admission._all.live == 0 and not runtime.admission._to_begin


async def until(condition, *, within: float = 20.0) -> None:
    with anyio.fail_after(within):
        while not condition():
            await anyio.sleep(0.005)
