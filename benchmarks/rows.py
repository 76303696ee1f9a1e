"""The rows of the comparison: who is measured side by side under which workloads, and what ours must reach."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.ratios import Floor


class Row(NamedTuple):
    runners: Mapping[str, tuple[str, ...]]
    """The loads of each runner, by its name in `RUNNERS`."""

    floors: tuple[Floor, ...] = ()
    rate_of: str | None = None
    """Whose saturation sets the rate of w5: it goes first in every round, and itself runs w2 before w5."""

    def rounds_of(self, runner: str, rounds: int) -> int:
        """Whom no floor names is there to be seen, in the first round alone: the slow ones take minutes."""
        named = {engine for floor in self.floors for engine, _ in (floor.ours, *floor.others)}
        return rounds if runner in named or runner == self.rate_of else min(1, rounds)

    def order(self, number: int) -> list[str]:
        """It turns from round to round, so that a drift of the machine's speed touches all alike."""
        names = list(self.runners)
        first = [self.rate_of] if self.rate_of else []
        others = [name for name in names if name not in first]
        turn = number % len(others) if others else 0
        return first + others[turn:] + others[:turn]


def on(test: str, *engines: str) -> tuple[tuple[str, str], ...]:
    return tuple((engine, test) for engine in engines)


def each(load: str, *runners: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(runners, (load,))


OURS, INT8, INT4 = "motet-bf16", "motet-int8", "motet-int4"
LLAMA_BF16 = ("llama-cpp-bf16", "llama-server-bf16")
LLAMA_Q4_1 = ("llama-cpp-q4_1", "llama-server-q4_1")
BF16_PEERS = (*LLAMA_BF16, "vllm", "transformers")
PEERS = (*BF16_PEERS, *LLAMA_Q4_1, "openvino-q4_1")
MEMORY_MIB = 1049  # 1.1 GB


def many_adapters(load: str, to_w2: float) -> Row:
    count = {"w3": 8, "w3b64": 64}[load]
    return Row(
        {OURS: ("w2", load), INT8: (load,), **each(load, "vllm-lora", "llama-server-lora")},
        (
            Floor(f"W3, {count} adapters, to our W2", "tokens_per_s", (OURS, load), on("w2", OURS), to_w2),
            Floor(f"W3, {count} adapters", "tokens_per_s", (OURS, load), on(load, "vllm-lora"), 5),
        ),
    )


ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "w1": Row(
            each("w1", OURS, INT8, INT4, *PEERS),
            (
                Floor("W1 decode, bf16", "decode_tokens_per_s", (OURS, "w1"), on("w1", *LLAMA_BF16), 1.2),
                Floor("W1 decode, int8", "decode_tokens_per_s", (INT8, "w1"), on("w1", *LLAMA_BF16), 2.2),
                Floor("W1 decode, int4", "decode_tokens_per_s", (INT4, "w1"), on("w1", *LLAMA_Q4_1), 2.8),
                Floor("W1 first token, bf16", "ttft_ms", (OURS, "w1"), on("w1", *BF16_PEERS), 0.75),
                Floor("W1 first token, int8", "ttft_ms", (INT8, "w1"), on("w1", *PEERS), 0.95),
            ),
        ),
        "w2": Row(
            each(
                "w2",
                *(OURS, INT8, "vllm", "openvino-q4_1", "llama-server-bf16"),
                *("transformers", "transformers-continuous"),
            ),
            (
                Floor("W2, bf16", "tokens_per_s", (OURS, "w2"), on("w2", "vllm"), 1.25),
                Floor("W2, int8", "tokens_per_s", (INT8, "w2"), on("w2", "vllm"), 1.9),
            ),
        ),
        "w3": many_adapters("w3", 0.88),
        "w3b64": many_adapters("w3b64", 0.75),
        "w4": Row(
            each("w4", OURS, INT8, "vllm", "openvino-q4_1", "llama-server-bf16"),
            (Floor("W4, bf16", "tokens_per_s", (OURS, "w4"), on("w4", "vllm"), 1.3),),
        ),
        "w5": Row(
            {"vllm": ("w2", "w5"), **each("w5", OURS, INT8)},
            (
                Floor("W5 between tokens, p99", "itl_p99_ms", (OURS, "w5"), on("w5", "vllm"), 0.5),
                Floor("W5 first token, p99", "ttft_p99_ms", (OURS, "w5"), on("w5", "vllm"), 0.7),
            ),
            rate_of="vllm",
        ),
        "steps": Row(
            {"steps-bf16": (), "steps-int8": ()},
            (
                Floor("decode step, bf16, batch 8", "share", ("steps-bf16", "decode 8"), (), 0.72),
                Floor("decode step, bf16, batch 32", "share", ("steps-bf16", "decode 32"), (), 0.72),
                Floor("decode step, int8, batch 1", "share", ("steps-int8", "decode 1"), (), 0.65),
                Floor("prefill of 512, bf16", "share", ("steps-bf16", "prefill 512"), (), 0.6),
            ),
        ),
        "memory": Row(
            {"motet-bf16-kv256": ("w1", "w2")},
            (Floor("peak memory, MiB", "peak_mib", ("motet-bf16-kv256", "memory"), (), MEMORY_MIB),),
        ),
    }
)
