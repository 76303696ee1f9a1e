"""Whole steps of the engine against what the machine can do at most: decoding a batch, and the prefill of 512 tokens.

    python -m benchmarks.steps [--dtype bfloat16] [--quantization int8] [--batches 1 8 32]

The limit of a decode step: to read the weights once or to multiply by them, whichever takes longer, and to read the
sequences' keys and values. Prefill counts the operations of the linears and of causal attention. The ceilings are
measured in every round beside the steps (see `ceiling.py`); `share` is the median of limit / time. For SmolLM2-135M.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from argparse import Namespace
from itertools import pairwise

from benchmarks.ceiling import Ceiling
from benchmarks.common import Request, Timing, report
from benchmarks.engine import config_of, engine_arguments, timed
from benchmarks.ops import HEAD_DIM, HEADS, KV_HEADS, LINEARS, VOCAB

from motet import AsyncEngine

LAYERS = 30
CONTEXT, NEW_TOKENS = 256, 64
PREFILL = 512
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 5}
"""Of a weight; int4 with a float16 scale and minimum for 32 of them, while the head has 8 bits then."""


def weights(with_head: bool = True) -> int:
    layer = sum(columns * inner for name, (columns, inner) in LINEARS.items() if name != "head")
    head_columns, head_inner = LINEARS["head"]
    return LAYERS * layer + with_head * head_columns * head_inner


def decode_limit(arguments: Namespace, batch: int, context: float, ceiling: Ceiling) -> float:
    """Seconds of one step of sequences that have `context` tokens on average."""
    read = ceiling.read_bytes_per_s()
    bits = BITS[arguments.quantization or arguments.dtype]
    head = weights() - weights(with_head=False)
    reading = (weights(with_head=False) * bits + head * max(bits, BITS["int8"])) / 8 / read
    kind = ceiling.kind_of_linears(arguments.dtype, arguments.quantization)
    computing = 2 * weights() * batch / ceiling.operations_per_s(kind)
    token_bytes = LAYERS * 2 * KV_HEADS * HEAD_DIM * BITS[arguments.dtype] / 8
    return max(reading, computing) + batch * context * token_bytes / read


def prefill_limit(arguments: Namespace, ceiling: Ceiling) -> float:
    """Seconds to the first token. Only the last row meets the head."""
    linear = 2 * (weights(with_head=False) * PREFILL + LINEARS["head"][0] * LINEARS["head"][1])
    attention = LAYERS * 4 * HEADS * HEAD_DIM * PREFILL * (PREFILL + 1) / 2
    kind = ceiling.kind_of_linears(arguments.dtype, arguments.quantization)
    return linear / ceiling.operations_per_s(kind) + attention / ceiling.operations_per_s("f32")


def request(prompt_tokens: int, max_tokens: int) -> Request:
    return Request(0, [random.randrange(17, VOCAB) for _ in range(prompt_tokens)], max_tokens)


async def decode_step(engine: AsyncEngine, batch: int) -> tuple[float, float]:
    """Seconds between two tokens of one stream while all of the batch decode, and their mean context halfway."""
    prefill_steps = batch * (1 + CONTEXT // 128)  # about; the first streams decode through them
    requests = [request(CONTEXT, prefill_steps + NEW_TOKENS) for _ in range(batch)]
    timings: list[Timing] = await asyncio.gather(*[timed(engine, each) for each in requests])
    begin = max(timing.tokens[0] for timing in timings)
    end = min(timing.tokens[-1] for timing in timings)
    together = [stamp for stamp in timings[0].tokens if begin <= stamp <= end]
    halfway = together[len(together) // 2]
    generated = [sum(stamp <= halfway for stamp in timing.tokens) for timing in timings]
    seconds = statistics.median(b - a for a, b in pairwise(together))
    return seconds, CONTEXT + statistics.mean(generated)


async def prefill(engine: AsyncEngine) -> float:
    timing = await timed(engine, request(PREFILL, 1))
    return timing.tokens[0] - timing.sent


async def run(arguments: Namespace) -> None:
    ceiling = Ceiling(arguments.threads)
    config = config_of(arguments).model_copy(update={"enable_prefix_caching": False})
    async with AsyncEngine(arguments.model, config) as engine:
        await decode_step(engine, 2)
        for batch in arguments.batches:
            limits, seconds = [], []
            for _ in range(arguments.rounds):
                step, context = await decode_step(engine, batch)
                limits.append(decode_limit(arguments, batch, context, ceiling))
                seconds.append(step)
            report(arguments.name, f"decode {batch}", **figures(limits, seconds))
        limits, seconds = [], []
        for _ in range(arguments.rounds):
            limits.append(prefill_limit(arguments, ceiling))
            seconds.append(await prefill(engine))
        report(arguments.name, f"prefill {PREFILL}", **figures(limits, seconds))


def figures(limits: list[float], seconds: list[float]) -> dict[str, float]:
    shares = [limit / took for limit, took in zip(limits, seconds, strict=True)]
    return {
        "share": statistics.median(shares),
        "ms": 1e3 * statistics.median(seconds),
        "limit_ms": 1e3 * statistics.median(limits),
    }


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
