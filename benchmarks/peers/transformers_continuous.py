"""transformers' continuous batching (`ContinuousBatchingManager`): W1, W2, W4, W5.

python -m benchmarks.peers.transformers_continuous [--loads w2]
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import torch
from benchmarks.common import DTYPES, PeakMemory, Request, Timing, report, runner_arguments
from benchmarks.drive import drive
from transformers import AutoModelForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

NO_TOKEN = -1


async def timed(manager: Any, request: Request) -> Timing:
    """Sends one request; its tokens are stamped where the manager delivers them, on the event loop."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tokens: list[float] = []

    def on_result(output: Any) -> None:
        new = len(output.generated_tokens) - len(tokens)
        tokens.extend([time.perf_counter()] * new)
        if output.error:
            ended.set_exception(RuntimeError(output.error))
        elif output.is_finished():
            ended.set_result(None)

    request_id = uuid.uuid4().hex
    manager.register_result_handler(request_id, on_result)
    sent = time.perf_counter()
    manager.add_request(
        request.prompt,
        request_id=request_id,
        max_new_tokens=request.max_tokens,
        streaming=True,
        eos_token_id=NO_TOKEN,
    )
    await ended
    assert len(tokens) == request.max_tokens
    return Timing(sent, tokens)


def main() -> None:
    parser = runner_arguments(__doc__, "transformers-continuous", ["w1", "w2", "w4", "w5"], default=["w2"])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--max-batch-tokens", type=int, help="default: what transformers chooses")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with PeakMemory() as memory:
        dtype = getattr(torch, arguments.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=dtype, attn_implementation="sdpa"
        )
        model.eval()
        model.generation_config.eos_token_id = NO_TOKEN
        manager = model.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=arguments.num_blocks, max_batch_tokens=arguments.max_batch_tokens
            )
        )
        manager.start()
        try:
            asyncio.run(drive(arguments, lambda request: timed(manager, request)))
        finally:
            manager.stop(block=True)
    report(arguments.name, "memory", peak_mib=memory.peak_mib)


if __name__ == "__main__":
    main()
