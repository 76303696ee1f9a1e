"""motet under the workloads W1–W4.

python -m benchmarks.engine [--loads w1 w2] [--adapters FOLDER]
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from pathlib import Path

from benchmarks.common import (
    ADAPTERS_FOLDER,
    PeakMemory,
    Request,
    Timing,
    batch_figures,
    latency_figures,
    medians,
    read_workload,
    report,
    runner_arguments,
    single_figures,
)

from motet import AsyncEngine, EngineConfig, SamplingParams

NAME = "motet"


async def timed(engine: AsyncEngine, request: Request) -> Timing:
    params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
    sent = time.perf_counter()
    stream = engine.stream(request.prompt, params, adapter=request.adapter)
    tokens = [time.perf_counter() async for _ in stream]
    assert len(tokens) == request.max_tokens
    return Timing(sent, tokens)


async def load_adapters(engine: AsyncEngine, requests: list[Request], folder: Path) -> None:
    loaded = {info.name for info in engine.adapters()}
    for name in sorted({request.adapter for request in requests if request.adapter} - loaded):
        await engine.load_adapter(name, folder / name)


async def run(arguments: Namespace) -> None:
    config = EngineConfig(
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )
    with PeakMemory() as memory:
        async with AsyncEngine(arguments.model, config) as engine:
            warm = read_workload(arguments.workloads, "warm")
            await asyncio.gather(*[timed(engine, request) for request in warm])
            for load in arguments.loads:
                requests = read_workload(arguments.workloads, load)
                await load_adapters(engine, requests, arguments.adapters)
                if load == "w1":
                    figures = medians([single_figures(await timed(engine, request)) for request in requests])
                else:
                    started = time.perf_counter()
                    timings = await asyncio.gather(*[timed(engine, request) for request in requests])
                    seconds = time.perf_counter() - started
                    figures = {**batch_figures(requests, seconds), **latency_figures(timings)}
                report(NAME, load, **figures)
    report(NAME, "memory", peak_mib=memory.peak_mib)


def main() -> None:
    parser = runner_arguments(__doc__, ["w1", "w2", "w3", "w3b64", "w4"], default=["w1", "w2"])
    parser.add_argument("--adapters", type=Path, default=ADAPTERS_FOLDER)
    parser.add_argument("--max-num-batched-tokens", type=int)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
