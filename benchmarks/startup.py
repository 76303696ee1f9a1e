"""Seconds from the start of a fresh Python process to its first token, with the files in the disk cache.

    python -m benchmarks.startup [--model demo] [--dtype bfloat16] [--quantization int8] [--rounds 5]

The clock runs in the parent process, so starting the interpreter and all imports count. They find bytecode, as they do
wherever a package is installed: the first process writes what is not there yet.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from benchmarks.common import DTYPES, make_parser

FIRST_TOKEN = """
import asyncio, sys
from motet import AsyncEngine, EngineConfig, SamplingParams

async def main(model, dtype, quantization=None):
    async with AsyncEngine(model, EngineConfig(dtype=dtype, quantization=quantization)) as engine:
        async for token in engine.stream("The capital of France is", SamplingParams(max_tokens=1)):
            print(token.token_id, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def seconds_to_first_token(*settings: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", FIRST_TOKEN, *settings]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        seconds = time.perf_counter() - started
    if process.returncode != 0 or not first_line:
        raise SystemExit(f"the engine's process failed with exit code {process.returncode}; see above")
    return seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--quantization", help="as EngineConfig has it")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    settings = [arguments.model, arguments.dtype, *filter(None, [arguments.quantization])]
    seconds_to_first_token(*settings)  # warms the disk cache
    rounds = [seconds_to_first_token(*settings) for _ in range(arguments.rounds)]
    print(f"median {statistics.median(rounds):.2f} s of {', '.join(f'{seconds:.2f}' for seconds in rounds)}")


if __name__ == "__main__":
    main()
