from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet import AsyncEngine, EngineConfig
from tests.sdk.checks import settled

CONFIG = EngineConfig(kv_cache_bytes=4 << 20, threads=1)


@pytest.fixture
async def engine(tiny_folder: Path, anyio_backend: str) -> AsyncIterator[AsyncEngine]:
    """A running engine on the tiny model, which must have given everything back when the test ends."""
    async with AsyncEngine(tiny_folder, CONFIG) as engine:
        yield engine
        await settled(engine)
