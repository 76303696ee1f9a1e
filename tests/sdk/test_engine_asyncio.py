"""What only asyncio has: wait_for, futures of other threads, a loop in debug mode."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from motet import AsyncEngine, RequestAborted, SamplingParams
from tests.sdk.checks import settled
from tests.sdk.conftest import CONFIG

pytestmark = pytest.mark.asyncio
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


async def test_a_wait_for_that_runs_out_aborts_the_request(tiny_folder: Path):
    async with AsyncEngine(tiny_folder, CONFIG) as engine:
        stream = engine.stream([5] * 400, LONG)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stream.__anext__(), 0.001)
        await settled(engine)
        with pytest.raises(RequestAborted):
            await stream.__anext__()


async def test_gathered_answers_survive_the_failure_of_one(tiny_folder: Path):
    async with AsyncEngine(tiny_folder, CONFIG) as engine:
        prompts = [[5, 6], [], [7, 8]]
        outcomes = await asyncio.gather(
            *(
                asyncio.create_task(engine.generate(p, SamplingParams(max_tokens=3, ignore_eos=True)))
                for p in prompts
            ),
            return_exceptions=True,
        )
        assert [type(outcome).__name__ for outcome in outcomes] == [
            "Completion",
            "InvalidRequest",
            "Completion",
        ]
        await settled(engine)


async def test_streams_work_on_a_loop_in_debug_mode(tiny_folder: Path):
    asyncio.get_running_loop().set_debug(True)
    async with AsyncEngine(tiny_folder, CONFIG) as engine:
        assert (
            len(
                [
                    token
                    async for token in engine.stream([5, 6], SamplingParams(max_tokens=9, ignore_eos=True))
                ]
            )
            == 9
        )
        await settled(engine)
