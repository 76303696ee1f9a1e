"""Each op of the CPU backend against what the machine can do at most, for the shapes of SmolLM2-135M.

    python -m benchmarks.ops [--only linear attention] [--dtype bfloat16] [--quantization int8]

An op's limit is the longer of two times: reading what it must from memory at the read ceiling, and computing at the
ceiling of its operations (see `ceiling.py`), both measured right before it in every round. `share` is the median of
limit / time. Linears and attention work on as many copies as no cache holds, since a model's layers are as
cold; the small ops find their rows in the cache, and may pass the limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from benchmarks.ceiling import Ceiling, seconds_of
from benchmarks.common import DTYPES, PHYSICAL_CORES, MiB, make_parser, report
from torch import Tensor

from motet.kernels.ops import LoRASlices, Ops, SamplingRows, select_ops

HIDDEN, INTERMEDIATE, VOCAB = 576, 1536, 49152
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
LINEARS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "head": (VOCAB, HIDDEN),
}
ROWS = (1, 8, 32, 128)
COLD = 256 * MiB
"""Copies are made up to this size: more than the caches."""


class Case(NamedTuple):
    """One op, or a row of the same on different memory."""

    test: str
    run: Callable[[], object]
    count: int  # ops in a run
    read_bytes: float  # of one op
    operations: float = 0.0  # of one op
    kind: str = "f32"  # whose ceiling its operations have


def measure(case: Case, ceiling: Ceiling, rounds: int) -> dict[str, float]:
    case.run()
    seconds, shares = [], []
    for _ in range(rounds):
        reading = case.read_bytes / ceiling.read_bytes_per_s()
        computing = case.operations / ceiling.operations_per_s(case.kind)
        seconds.append(seconds_of(case.run) / case.count)
        shares.append(max(reading, computing) / seconds[-1])
    median = statistics.median(seconds)
    return {
        "us": 1e6 * median,
        "share": statistics.median(shares),
        "gb_per_s": case.read_bytes / median / 1e9,
        "gop_per_s": case.operations / median / 1e9,
    }


def recorded(ops: Ops, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """The step as an engine runs it: replayed with one call, where the backend can."""
    replay = ops.record(step, inputs)
    return lambda: step() if replay is None else replay(inputs)  # `step` also keeps the weights alive


def linears(ops: Ops, kind: str) -> Iterator[Case]:
    for name, (columns, inner) in LINEARS.items():
        weight = torch.randn(columns, inner).to(ops.dtype)
        packed: list[Any] = [ops.pack_linear(weight.clone())]
        read_bytes = packed[0].data.nbytes
        packed += [ops.pack_linear(weight.clone()) for _ in range(COLD // read_bytes)]
        for rows in ROWS:
            yield linear(ops, f"linear {name} {rows}", packed, rows, inner, read_bytes, kind)


def linear(
    ops: Ops, test: str, packed: Sequence[Any], rows: int, inner: int, read_bytes: int, kind: str
) -> Case:
    x = torch.randn(rows, inner)

    def step() -> Tensor:
        return [ops.linear(x, weight) for weight in packed][-1]

    operations = 2 * rows * inner * packed[0].columns
    return Case(test, recorded(ops, step, [x]), len(packed), read_bytes, operations, kind)


def attention(ops: Ops, kind: str) -> Iterator[Case]:
    for sequences, context in ((1, 256), (1, 2048), (8, 512), (32, 512)):
        yield attend(ops, f"attention decode {sequences}x{context}", sequences, context, new=1)
    for new in (128, 512):
        yield attend(ops, f"attention prefill {new}", 1, new, new)


def attend(ops: Ops, test: str, sequences: int, context: int, new: int) -> Case:
    """`new` tokens of each sequence, the last of `context`, in a row of layers' caches."""
    tokens = sequences * context
    read_bytes = tokens * 2 * KV_HEADS * HEAD_DIM * ops.dtype.itemsize
    caches = [
        ops.new_kv_cache(tokens // BLOCK, BLOCK, KV_HEADS, HEAD_DIM) for _ in range(1 + COLD // read_bytes)
    ]
    angle = torch.rand(tokens, HEAD_DIM)
    slots = torch.arange(tokens)
    for cache in caches:
        qkv = torch.randn(tokens, LINEARS["qkv"][0])
        ops.rope_and_store_kv(qkv, angle.cos(), angle.sin(), cache, slots, HEADS, KV_HEADS)
    plan = ops.plan_attention(
        torch.arange(sequences + 1) * new,
        torch.full((sequences,), context),
        torch.arange(tokens // BLOCK).view(sequences, -1),
        BLOCK,
    )
    q = torch.randn(sequences * new, HEADS, HEAD_DIM)

    def step() -> Tensor:
        return [ops.paged_attention(q, cache, plan, HEAD_DIM**-0.5) for cache in caches][-1]

    seen = sequences * sum(range(context - new + 1, context + 1))  # tokens, over all rows
    operations = 4 * HEADS * HEAD_DIM * seen
    return Case(test, recorded(ops, step, [q]), len(caches), read_bytes, operations)


def adapters(ops: Ops, kind: str) -> Iterator[Case]:
    for rows, slots in ((8, 8), (32, 8), (32, 32)):
        for rank in (8, 64):
            yield sgmv(ops, f"sgmv gate_up {rows} rows, {slots} adapters of rank {rank}", rows, slots, rank)


def sgmv(ops: Ops, test: str, rows: int, slots: int, rank: int) -> Case:
    """Rows in as many runs as adapters, through the gate and up projections of a row of layers."""
    a_size, b_size = rank * HIDDEN, rank * INTERMEDIATE
    sizes = torch.tensor([a_size, b_size] * 2)
    read_bytes = int(slots * sizes.sum()) * ops.dtype.itemsize
    layers = 1 + COLD // read_bytes
    starts = (sizes.repeat(slots * layers).cumsum(0) - sizes.repeat(slots * layers)).view(slots, -1, 2)
    arena = torch.randn(int(starts[-1, -1, 1]) + b_size).to(ops.dtype)
    table = torch.full((slots, 2 * layers, 5), -1)
    table[..., :2], table[..., 2] = starts, rank
    edges = torch.arange(slots + 1) * rows // slots
    segments = torch.stack((torch.arange(slots), edges[:-1], edges[1:]), dim=1)
    plan = ops.plan_lora(arena, table, torch.ones(layers, dtype=torch.bool), segments)
    bounds = torch.tensor([0, INTERMEDIATE, 2 * INTERMEDIATE])
    sites = [LoRASlices(layer, 2 * layer, HIDDEN, bounds) for layer in range(layers)]
    x, out = torch.randn(rows, HIDDEN), torch.zeros(rows, 2 * INTERMEDIATE)

    def run() -> None:
        for site in sites:
            ops.add_lora(x, site, plan, out)

    return Case(test, run, layers, read_bytes, 2 * rows * 2 * (a_size + b_size))


def small(ops: Ops, kind: str) -> Iterator[Case]:
    weight = torch.ones(HIDDEN)
    for rows in ROWS:
        x, residual = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
        gate_up = torch.randn(rows, 2 * INTERMEDIATE)
        yield repeated(ops, f"add_rms_norm {rows}", ops.add_rms_norm, x, residual, weight, 1e-5)
        yield repeated(ops, f"silu_and_mul {rows}", ops.silu_and_mul, gate_up)


def repeated(ops: Ops, test: str, op: Callable[..., Tensor], x: Tensor, *rest: Any) -> Case:
    count = 100

    def step() -> Tensor:
        return [op(x, *rest) for _ in range(count)][-1]

    read_bytes = sum(each.nbytes for each in (x, *rest) if isinstance(each, Tensor))
    return Case(test, recorded(ops, step, [x]), count, read_bytes)


def sampling(ops: Ops, kind: str) -> Iterator[Case]:
    for rows in (1, 32):
        logits = [torch.randn(rows, VOCAB) * 4 for _ in range(8)]
        for name, temperature, top_p in (
            ("greedy", 0.0, 1.0),
            ("temperature", 1.0, 1.0),
            ("top_p", 1.0, 0.9),
        ):
            how = SamplingRows(
                temperature=torch.full((rows,), temperature, dtype=torch.float64),
                top_k=torch.zeros(rows, dtype=torch.int64),
                top_p=torch.full((rows,), top_p),
                min_p=torch.zeros(rows),
                uniform=torch.full((rows,), 0.5, dtype=torch.float64),
            )

            def run(logits: list[Tensor] = logits, how: SamplingRows = how) -> None:
                for each in logits:
                    ops.sample(each, how)

            yield Case(f"sample {name} {rows}", run, len(logits), logits[0].nbytes)


FAMILIES = {
    "linear": linears,
    "attention": attention,
    "lora": adapters,
    "small": small,
    "sampling": sampling,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, default=PHYSICAL_CORES)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ceiling = Ceiling(arguments.threads)
    ops = select_ops("cpu", arguments.dtype, arguments.threads, arguments.quantization)
    name = f"{ops.name} {arguments.dtype}"
    kind = ceiling.kind_of_linears(arguments.dtype, arguments.quantization)
    for family in arguments.only:
        for case in FAMILIES[family](ops, kind):
            report(name, case.test, **measure(case, ceiling, arguments.rounds))


if __name__ == "__main__":
    main()
