"""W2 through `generate_batch` against the same requests streamed: interleaved pairs in one engine, one process.

    python -m benchmarks.batch [--pairs 5] [--dtype bfloat16] [--quantization int8]

Both must give the same tokens. Prints the seconds of each pair and the median ratio: streaming over batch.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from argparse import Namespace

from benchmarks.common import DTYPES, Request, read_workload, report, runner_arguments

from motet import AsyncEngine, Completion, EngineConfig, SamplingParams


def params_of(request: Request) -> SamplingParams:
    return SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)


async def streamed(engine: AsyncEngine, requests: list[Request]) -> list[tuple[int, ...]]:
    async def one(request: Request) -> tuple[int, ...]:
        return tuple([token.token_id async for token in engine.stream(request.prompt, params_of(request))])

    return list(await asyncio.gather(*[one(request) for request in requests]))


async def batched(engine: AsyncEngine, requests: list[Request]) -> list[tuple[int, ...]]:
    results = await engine.generate_batch(
        [request.prompt for request in requests], [params_of(request) for request in requests]
    )
    assert all(isinstance(result, Completion) for result in results)
    return [result.token_ids for result in results if isinstance(result, Completion)]


async def run(arguments: Namespace) -> None:
    # Without the prefix cache: the second of a pair must not profit from the first.
    config = EngineConfig(
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        threads=arguments.threads,
        enable_prefix_caching=False,
    )
    ratios = []
    async with AsyncEngine(arguments.model, config) as engine:
        await streamed(engine, read_workload(arguments.workloads, "warm"))
        requests = read_workload(arguments.workloads, "w2")[: arguments.requests]
        for pair in range(arguments.pairs):
            seconds, tokens = {}, {}
            order = (streamed, batched) if pair % 2 == 0 else (batched, streamed)
            for way in order:
                begin = time.perf_counter()
                tokens[way] = await way(engine, requests)
                seconds[way] = time.perf_counter() - begin
            assert tokens[streamed] == tokens[batched], "the two ways gave different tokens"
            ratios.append(seconds[streamed] / seconds[batched])
            report(
                "motet",
                f"pair {pair}",
                streamed_s=seconds[streamed],
                batched_s=seconds[batched],
                ratio=ratios[-1],
            )
    report("motet", "batch", median_ratio=statistics.median(ratios))


def main() -> None:
    parser = runner_arguments(__doc__, "motet", ["w2"], default=["w2"])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--quantization", help="as EngineConfig has it")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, help="only so many of W2's")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
