"""Ratios of medians: what ours must reach, what it reached, and all the figures behind it, as tables in Markdown."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

SHOWN = {
    "startup": ("seconds",),
    "w1": ("decode_tokens_per_s", "tokens_per_s", "ttft_ms", "itl_p99_ms"),
    "w2": ("tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "lag_p99_ms"),
    "w3": ("tokens_per_s",),
    "w3b64": ("tokens_per_s",),
    "w4": ("tokens_per_s", "ttft_p50_ms", "itl_p99_ms"),
    "w5": ("rate", "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "lag_p99_ms"),
    "memory": ("peak_mib",),
    "ceiling": ("read_gb_per_s", "f32_gflop_per_s", "bf16_gflop_per_s", "int8_gop_per_s"),
}
"""Figures worth a column, by test."""


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Measurements:
    """What each engine reported of each test, once per round."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)

    def add(self, line: Mapping[str, object]) -> None:
        """A line as `common.report` prints it."""
        figures = {key: value for key, value in line.items() if isinstance(value, (int, float))}
        self._figures[str(line["engine"]), str(line["test"])].append(figures)

    def engines(self, test: str) -> list[str]:
        return [engine for engine, name in self._figures if name == test]

    def median(self, engine: str, test: str, figure: str) -> float | None:
        """Over the rounds; None if it was not measured."""
        values = [figures[figure] for figures in self._figures.get((engine, test), ()) if figure in figures]
        return statistics.median(values) if values else None


class Floor(NamedTuple):
    """What one figure of ours must be, as a multiple of the best of some others'."""

    name: str
    figure: str  # the larger the better, unless it is a time in ms
    ours: tuple[str, str]  # engine, test
    others: tuple[tuple[str, str], ...]
    bound: float

    @property
    def is_time(self) -> bool:
        return self.figure.endswith("_ms")

    def verdict(self, measured: Measurements) -> str:
        """A row of the table."""
        ours = measured.median(*self.ours, self.figure)
        known = [(measured.median(*other, self.figure), other[0]) for other in self.others]
        others = [(value, engine) for value, engine in known if value is not None]
        bound = f"{'≤' if self.is_time else '≥'} {self.bound:g}"
        if ours is None or not others:
            return f"| {self.name} | | | | {bound} | not measured |"
        best, engine = min(others) if self.is_time else max(others)
        ratio = ours / best
        reached = ratio <= self.bound if self.is_time else ratio >= self.bound
        missing = [other[0] for value, other in zip(known, self.others, strict=True) if value[0] is None]
        remark = f" (without {', '.join(missing)})" if missing else ""
        return (
            f"| {self.name} | {shown(ours)} | {shown(best)} {engine} | {ratio:.2f} | {bound} | "
            f"{'yes' if reached else '**no**'}{remark} |"
        )


BF16_PEERS = ("vllm", "transformers", "llama-cpp-bf16")
PEERS = (*BF16_PEERS, "llama-cpp-q4_1", "openvino-q4_1")


def on(test: str, *engines: str) -> tuple[tuple[str, str], ...]:
    return tuple((engine, test) for engine in engines)


FLOORS = (
    Floor("W1 decode, bf16", "decode_tokens_per_s", ("motet-bf16", "w1"), on("w1", "llama-cpp-bf16"), 1.2),
    Floor("W1 decode, int8", "decode_tokens_per_s", ("motet-int8", "w1"), on("w1", "llama-cpp-bf16"), 2.2),
    Floor("W1 decode, int4", "decode_tokens_per_s", ("motet-int4", "w1"), on("w1", "llama-cpp-q4_1"), 2.8),
    Floor("W1 first token, bf16", "ttft_ms", ("motet-bf16", "w1"), on("w1", *BF16_PEERS), 0.75),
    Floor("W1 first token, int8", "ttft_ms", ("motet-int8", "w1"), on("w1", *PEERS), 0.95),
    Floor("W2, bf16", "tokens_per_s", ("motet-bf16", "w2"), on("w2", "vllm"), 1.25),
    Floor("W2, int8", "tokens_per_s", ("motet-int8", "w2"), on("w2", "vllm"), 1.9),
    Floor("W3, 8 adapters, to our W2", "tokens_per_s", ("motet-bf16", "w3"), on("w2", "motet-bf16"), 0.88),
    Floor(
        "W3, 64 adapters, to our W2", "tokens_per_s", ("motet-bf16", "w3b64"), on("w2", "motet-bf16"), 0.75
    ),
    Floor("W3, 8 adapters", "tokens_per_s", ("motet-bf16", "w3"), on("w3", "vllm-lora"), 5),
    Floor("W3, 64 adapters", "tokens_per_s", ("motet-bf16", "w3b64"), on("w3b64", "vllm-lora"), 5),
    Floor("W4, bf16", "tokens_per_s", ("motet-bf16", "w4"), on("w4", "vllm"), 1.3),
    Floor("W5 between tokens, p99", "itl_p99_ms", ("motet-bf16", "w5"), on("w5", "vllm"), 0.5),
    Floor("W5 first token, p99", "ttft_p99_ms", ("motet-bf16", "w5"), on("w5", "vllm"), 0.7),
)


def table_of_ratios(measured: Measurements) -> str:
    rows = ["| | motet | best of the others | ratio | must be | reached |", "|---|---|---|---|---|---|"]
    return "\n".join(rows + [floor.verdict(measured) for floor in FLOORS])


def table_of_figures(measured: Measurements) -> str:
    """One table for each test, a row for each engine."""
    tables = []
    for test, figures in SHOWN.items():
        engines = measured.engines(test)
        if not engines:
            continue
        rows = [f"| {test} | {' | '.join(figures)} |", "|---" * (1 + len(figures)) + "|"]
        for engine in sorted(engines):
            values = [measured.median(engine, test, figure) for figure in figures]
            cells = ["" if value is None else shown(value) for value in values]
            rows.append(f"| {engine} | {' | '.join(cells)} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables)
