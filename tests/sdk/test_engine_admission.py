"""Bounds on what waits and on how long steps take, on a running engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from motet import AsyncEngine, EngineConfig, SamplingParams
from motet.runtime.recorded_steps import RecordedSteps
from tests.sdk.checks import settled

pytestmark = pytest.mark.anyio


async def test_prompts_take_less_of_each_step_where_a_stream_would_wait_longer_than_its_target(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RecordedSteps, "replays", lambda self, batch: False)
    config = EngineConfig(kv_cache_bytes=4 << 20, threads=1, itl_target=0.02)
    async with AsyncEngine(tiny_folder, config) as engine:
        core = engine._running()[1].core
        steps, real, sizes = core._runner._steps, core._runner._steps._forward, []

        def slow_forward(batch):
            sizes.append(len(batch.input_ids))
            time.sleep(5e-4 * sizes[-1])
            return real(batch)

        steps._forward = slow_forward
        stream = engine.stream([5], SamplingParams(max_tokens=80, ignore_eos=True))
        await stream.__anext__()
        for i in range(2):
            once = SamplingParams(max_tokens=1)
            assert len((await engine.generate([5 + i] * 400, once)).token_ids) == 1
        beside = [size for size in sizes if size > 1]
        assert beside[0] == 128 and len(beside) > 10
        assert max(beside[8:]) <= 40, "more take longer than the target"
        stream.cancel()
        del sizes[:]
        await engine.generate([7] * 400, once)
        assert max(sizes) == 128, "nobody waits for a next token"
        await settled(engine)
