"""transformers' `generate`: W1 with a streamer; W2 and W4 in left-padded batches, in the order of arrival.

python -m benchmarks.peers.transformers_static [--loads w1 w2] [--batch-size 32]
"""

from __future__ import annotations

import time
from typing import Any

import torch
from benchmarks.common import (
    DTYPES,
    PeakMemory,
    Request,
    Timing,
    batch_figures,
    medians,
    read_workload,
    report,
    report_startup,
    runner_arguments,
    single_figures,
)
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

PADDING_ID = 2


class Stamps(BaseStreamer):
    """Notes when each generated token arrives; the first call brings the prompt."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back, so nothing is left to do."""


def generate_one(model: Any, request: Request) -> Timing:
    input_ids = torch.tensor([request.prompt])
    stamps = Stamps()
    sent = time.perf_counter()
    model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=request.max_tokens,
        do_sample=False,
        streamer=stamps,
    )
    tokens = stamps.calls[1:]
    assert len(tokens) == request.max_tokens
    return Timing(sent, tokens)


def generate_batch(model: Any, requests: list[Request]) -> None:
    """Everyone waits for the longest answer of the batch: that is what a static batch costs."""
    longest_prompt = max(len(request.prompt) for request in requests)
    longest_answer = max(request.max_tokens for request in requests)
    input_ids = torch.full((len(requests), longest_prompt), PADDING_ID)
    attention_mask = torch.zeros_like(input_ids)
    for row, request in enumerate(requests):
        input_ids[row, -len(request.prompt) :] = torch.tensor(request.prompt)
        attention_mask[row, -len(request.prompt) :] = 1
    output = model.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        max_new_tokens=longest_answer,
        do_sample=False,
        pad_token_id=PADDING_ID,
    )
    assert output.shape[1] == longest_prompt + longest_answer


def main() -> None:
    parser = runner_arguments(__doc__, "transformers", ["w1", "w2", "w4"], default=["w1", "w2"])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with PeakMemory() as memory:
        dtype = getattr(torch, arguments.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
        model.eval()
        model.generation_config.eos_token_id = None
        first = generate_one(model, read_workload(arguments.workloads, "warm")[0])
        report_startup(arguments.name, first.tokens[0])
        for load in arguments.loads:
            requests = read_workload(arguments.workloads, load)
            if load == "w1":
                figures = medians([single_figures(generate_one(model, request)) for request in requests])
            else:
                started = time.perf_counter()
                for start in range(0, len(requests), arguments.batch_size):
                    generate_batch(model, requests[start : start + arguments.batch_size])
                figures = batch_figures(requests, time.perf_counter() - started)
            report(arguments.name, load, **figures)
    report(arguments.name, "memory", peak_mib=memory.peak_mib)


if __name__ == "__main__":
    main()
