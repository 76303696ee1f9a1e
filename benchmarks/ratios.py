"""What ours must reach, what it reached, and all the figures behind it, as tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.record import Measurements

BATCH = ("tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "lag_p99_ms")
STEP = ("share", "ms", "limit_ms")
SHOWN = {
    "startup": ("seconds",),
    "w1": ("decode_tokens_per_s", "tokens_per_s", "ttft_ms", "itl_p99_ms"),
    "w2": BATCH,
    "w3": BATCH,
    "w3b64": BATCH,
    "w4": BATCH,
    "w5": ("rate", "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "lag_p99_ms"),
    "decode 1": STEP,
    "decode 8": STEP,
    "decode 32": STEP,
    "prefill 512": STEP,
    "memory": ("peak_mib",),
    "ceiling": ("read_gb_per_s", "f32_gflop_per_s", "bf16_gflop_per_s", "int8_gop_per_s"),
}
"""Figures worth a column, by test."""


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Floor(NamedTuple):
    """What one figure of ours must be: as a multiple of each of some others', or by itself if there are none."""

    name: str
    figure: str  # the larger the better, unless it is a time or a size
    ours: tuple[str, str]  # engine, test
    others: tuple[tuple[str, str], ...]
    bound: float

    @property
    def smaller_is_better(self) -> bool:
        return self.figure.endswith(("_ms", "_mib"))

    def verdict(self, measured: Measurements) -> str:
        """A line of the table. Of the others, the one that is hardest to reach is shown and counts."""
        bound = f"{'≤' if self.smaller_is_better else '≥'} {shown(self.bound)}"
        ours = measured.median(*self.ours, self.figure)
        known = [(measured.ratio(self.ours, other, self.figure), other) for other in self.others]
        ratios = [(ratio, other) for ratio, other in known if ratio is not None]
        if ours is None or (self.others and not ratios):
            return f"| {self.name} | | | | {bound} | not measured |"
        if not self.others:
            return f"| {self.name} | {shown(ours)} | | | {bound} | {self._reached(ours)} |"
        ratio, hardest = max(ratios) if self.smaller_is_better else min(ratios)
        theirs = measured.median(*hardest, self.figure)
        assert theirs is not None
        missing = [other[0] for ratio_or_none, other in known if ratio_or_none is None]
        remark = f" (without {', '.join(missing)})" if missing else ""
        return (
            f"| {self.name} | {shown(ours)} | {shown(theirs)} {hardest[0]} | {ratio:.2f} | {bound} | "
            f"{self._reached(ratio)}{remark} |"
        )

    def _reached(self, value: float) -> str:
        return "yes" if (value <= self.bound if self.smaller_is_better else value >= self.bound) else "**no**"


def table_of_ratios(rows: Mapping[str, Measurements], floors: Mapping[str, tuple[Floor, ...]]) -> str:
    """`floors` by row. Figures are medians of the rounds, and so are ratios: of each round's own."""
    lines = ["| | motet | the hardest other | ratio | must be | reached |", "|---|---|---|---|---|---|"]
    for row, its_floors in floors.items():
        lines += [floor.verdict(rows.get(row, Measurements())) for floor in its_floors]
    return "\n".join(lines)


def table_of_figures(measured: Measurements) -> str:
    """One table for each test, a line for each engine."""
    tables = []
    for test, figures in SHOWN.items():
        engines = measured.engines(test)
        if not engines:
            continue
        lines = [f"| {test} | {' | '.join(figures)} | rounds |", "|---" * (2 + len(figures)) + "|"]
        for engine in sorted(engines):
            values = [measured.median(engine, test, figure) for figure in figures]
            cells = ["" if value is None else shown(value) for value in values]
            rounds = max(len(measured.values(engine, test, figure)) for figure in figures)
            lines.append(f"| {engine} | {' | '.join(cells)} | {rounds} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)
