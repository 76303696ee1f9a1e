"""OpenVINO GenAI's continuous batching: W1, W2, W4, on a GGUF file, whose quantised weights it keeps.

build/peers/openvino/bin/python -m benchmarks.peers.openvino [--loads w1 w2 w4]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from benchmarks.common import (
    Q4_1_GGUF,
    PeakMemory,
    Request,
    Timing,
    batch_figures,
    latency_figures,
    medians,
    read_workload,
    report,
    report_startup,
    runner_arguments,
    single_figures,
)

CACHE_GB = 2
MAX_SEQUENCES = 64


def new_pipeline(model: str, threads: int) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = MAX_SEQUENCES
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_NUM_THREADS": threads}
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


def generation_config(max_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def generate(pipeline: Any, requests: Sequence[Request]) -> list[Timing]:
    """All at once; the caller drives the pipeline step by step and reads every request's handle in between."""
    sent = time.perf_counter()
    handles = [
        pipeline.add_request(
            request.id, openvino.Tensor(np.array([request.prompt])), generation_config(request.max_tokens)
        )
        for request in requests
    ]
    tokens: list[list[float]] = [[] for _ in requests]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter()
        for handle, stamps in zip(handles, tokens, strict=True):
            while handle.can_read():
                stamps += [now] * sum(len(output.generated_ids) for output in handle.read().values())
    assert [len(stamps) for stamps in tokens] == [request.max_tokens for request in requests]
    return [Timing(sent, stamps) for stamps in tokens]


def main() -> None:
    arguments = runner_arguments(
        __doc__, "openvino", ["w1", "w2", "w4"], default=["w1", "w2"], model=Q4_1_GGUF
    ).parse_args()
    with PeakMemory() as memory:
        pipeline = new_pipeline(arguments.model, arguments.threads)
        warm = read_workload(arguments.workloads, "warm")
        report_startup(arguments.name, generate(pipeline, warm[:1])[0].tokens[0])
        generate(pipeline, warm)
        for load in arguments.loads:
            requests = read_workload(arguments.workloads, load)
            if load == "w1":
                figures = medians([single_figures(generate(pipeline, [request])[0]) for request in requests])
            else:
                started = time.perf_counter()
                timings = generate(pipeline, requests)
                seconds = time.perf_counter() - started
                figures = {**batch_figures(requests, seconds), **latency_figures(timings)}
            report(arguments.name, load, **figures)
    report(arguments.name, "memory", peak_mib=memory.peak_mib)


if __name__ == "__main__":
    main()
