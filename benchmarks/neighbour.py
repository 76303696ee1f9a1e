"""What a busy neighbour costs: decoding alone, and beside processes that spin at the same priority.

    python -m benchmarks.neighbour [--quantization int8] [--neighbours 0 1 2] [--batches 1 8]

With n neighbours and t threads of ours on c cores, a scheduler that is fair to threads leaves us
min(t, c, c · t / (t + n)) cores of the min(t, c) that we have alone: `fair`. `share` is the speed beside them over the
speed alone, both of one round (medians of all); an engine whose threads wait for each other well has share >= fair.
`cores` is the CPU time that the engine took while it decoded, and `theirs` what all neighbours took.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import cpu_count

import psutil
from benchmarks.common import report
from benchmarks.engine import config_of, engine_arguments
from benchmarks.steps import decode_step

from motet import AsyncEngine

SPIN = "while True: pass"


@contextmanager
def neighbours(count: int) -> Iterator[list[psutil.Process]]:
    """They keep a core busy each, as far as they get one."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(count)]
    try:
        yield [psutil.Process(process.pid) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


async def measured(engine: AsyncEngine, batch: int, count: int) -> dict[str, float]:
    with neighbours(count) as theirs:
        await asyncio.sleep(0.2)  # until they spin
        ours = [psutil.Process()]
        begin, our_begin, their_begin = time.perf_counter(), cpu_seconds(ours), cpu_seconds(theirs)
        step, _ = await decode_step(engine, batch)
        took = time.perf_counter() - begin
        cores, their_cores = cpu_seconds(ours) - our_begin, cpu_seconds(theirs) - their_begin
    return {"ms": 1e3 * step, "cores": cores / took, "theirs": their_cores / took}


async def run(arguments: Namespace) -> None:
    cores = cpu_count() or 1
    threads = arguments.threads
    async with AsyncEngine(arguments.model, config_of(arguments)) as engine:
        await decode_step(engine, 2)
        for batch in arguments.batches:
            rounds = [
                {count: await measured(engine, batch, count) for count in arguments.neighbours}
                for _ in range(arguments.rounds)
            ]
            for count in arguments.neighbours:
                fair = min(threads, cores, cores * threads / (threads + count)) / min(threads, cores)
                share = statistics.median(each[0]["ms"] / each[count]["ms"] for each in rounds)
                figures = {
                    key: statistics.median(each[count][key] for each in rounds) for key in rounds[0][count]
                }
                report(
                    arguments.name, f"batch {batch}, neighbours {count}", fair=fair, share=share, **figures
                )


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
