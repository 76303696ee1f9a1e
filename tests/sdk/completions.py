"""Many prompts through one engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio

from motet import AsyncEngine, Completion, EngineConfig, SamplingParams
from tests.sdk.checks import settled


def complete(
    model: str | Path,
    prompts: Sequence[list[int]],
    config: EngineConfig,
    params: SamplingParams,
    *,
    rounds: int = 1,
    beside: dict[str, Path] | None = None,
) -> list[list[Completion]]:
    """All prompts at once, `rounds` times on one engine: each round's completions."""
    beside = beside or {}

    async def run() -> list[list[Completion]]:
        all_done: list[list[Completion]] = []
        async with AsyncEngine(model, config) as engine:
            for name, folder in beside.items():
                await engine.load_adapter(name, folder)
            for _ in range(rounds):
                done: dict[int, Completion] = {}

                async def one(i: int, done: dict[int, Completion] = done) -> None:
                    done[i] = await engine.generate(prompts[i], params)

                async with anyio.create_task_group() as group:
                    for i in range(len(prompts)):
                        group.start_soon(one, i)
                        for name in beside:
                            group.start_soon(
                                lambda i=i, name=name: engine.generate(prompts[i], params, adapter=name)
                            )
                await settled(engine)
                all_done.append([done[i] for i in range(len(prompts))])
        return all_done

    return anyio.run(run)


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]
