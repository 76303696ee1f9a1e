"""llama.cpp through llama-cpp-python: W1. One `Llama` has one sequence.

build/peers/llama_cpp/bin/python -m benchmarks.peers.llama_cpp [--model build/benchmarks/model-q4_1.gguf]
"""

from __future__ import annotations

import os
import time
from itertools import islice
from typing import Any

from benchmarks.common import (
    BF16_GGUF,
    PEERS_FOLDER,
    PeakMemory,
    Request,
    Timing,
    medians,
    read_workload,
    report,
    report_startup,
    runner_arguments,
    single_figures,
)

CONTEXT = 2048


def generate_one(model: Any, request: Request) -> Timing:
    model.reset()  # or it keeps the prefix that two prompts share
    sent = time.perf_counter()
    stream = model.generate(request.prompt, temp=0.0, repeat_penalty=1.0)
    tokens = [time.perf_counter() for _ in islice(stream, request.max_tokens)]
    return Timing(sent, tokens)


def main() -> None:
    arguments = runner_arguments(__doc__, "llama-cpp", ["w1"], default=["w1"], model=BF16_GGUF).parse_args()
    os.environ["LLAMA_CPP_LIB_PATH"] = str((PEERS_FOLDER / "llama_cpp/cmake/bin").absolute())
    from llama_cpp import Llama

    with PeakMemory() as memory:
        model = Llama(
            arguments.model,
            n_ctx=CONTEXT,
            n_threads=arguments.threads,
            n_threads_batch=arguments.threads,
            flash_attn=True,
            verbose=False,
        )
        first = generate_one(model, read_workload(arguments.workloads, "warm")[0])
        report_startup(arguments.name, first.tokens[0])
        for load in arguments.loads:
            requests = read_workload(arguments.workloads, load)
            figures = medians([single_figures(generate_one(model, request)) for request in requests])
            report(arguments.name, load, **figures)
    report(arguments.name, "memory", peak_mib=memory.peak_mib)


if __name__ == "__main__":
    main()
