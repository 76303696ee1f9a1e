"""motet under the workloads W1–W5.

python -m benchmarks.engine [--loads w1 w2] [--dtype bfloat16] [--quantization int8] [--adapters FOLDER]
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import (
    ADAPTERS_FOLDER,
    DTYPES,
    MiB,
    PeakMemory,
    Request,
    Timing,
    report,
    runner_arguments,
)
from benchmarks.drive import drive

from motet import AsyncEngine, EngineConfig, SamplingParams


async def timed(engine: AsyncEngine, request: Request) -> Timing:
    params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
    sent = time.perf_counter()
    stream = engine.stream(request.prompt, params, adapter=request.adapter)
    tokens = [time.perf_counter() async for _ in stream]
    assert len(tokens) == request.max_tokens
    return Timing(sent, tokens)


async def load_adapters(engine: AsyncEngine, requests: Sequence[Request], folder: Path) -> None:
    loaded = {info.name for info in engine.adapters()}
    for name in sorted({request.adapter for request in requests if request.adapter} - loaded):
        await engine.load_adapter(name, folder / name)


def config_of(arguments: Namespace) -> EngineConfig:
    """Options that were not given keep the engine's own defaults."""
    options = {
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "threads": arguments.threads,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "kv_cache_bytes": arguments.kv_cache_mib and arguments.kv_cache_mib * MiB,
    }
    return EngineConfig.model_validate({key: value for key, value in options.items() if value is not None})


async def run(arguments: Namespace) -> None:
    with PeakMemory() as memory:
        async with AsyncEngine(arguments.model, config_of(arguments)) as engine:
            await drive(
                arguments,
                lambda request: timed(engine, request),
                lambda requests: load_adapters(engine, requests, arguments.adapters),
            )
    report(arguments.name, "memory", peak_mib=memory.peak_mib)


def engine_arguments(description: str | None) -> ArgumentParser:
    """How an engine is made, for every script that makes one from the command line."""
    parser = runner_arguments(
        description, "motet", ["w1", "w2", "w3", "w3b64", "w4", "w5"], default=["w1", "w2"]
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--quantization", help="as EngineConfig has it")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--kv-cache-mib", type=int)
    return parser


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--adapters", type=Path, default=ADAPTERS_FOLDER)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
