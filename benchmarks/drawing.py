"""The comparison as a picture: a bar for each engine, a panel for each figure that a user feels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.ratios import shown
from benchmarks.record import Measurements
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PANELS = (
    ("w1", "decode_tokens_per_s", "one stream: tokens/s"),
    ("w1", "ttft_ms", "one stream: ms to the first token"),
    ("w2", "tokens_per_s", "64 requests: tokens/s"),
    ("w3", "tokens_per_s", "64 requests, 8 adapters: tokens/s"),
    ("w3b64", "tokens_per_s", "64 requests, 64 adapters: tokens/s"),
    ("w4", "tokens_per_s", "32 requests, one prefix: tokens/s"),
    ("w5", "itl_p99_ms", "arrivals: ms between tokens, p99"),
    ("w5", "ttft_p99_ms", "arrivals: ms to the first token, p99"),
)
"""The row of the comparison, which is also the test in it; the figure; a title."""
COLUMNS = 3
OURS, THEIRS = "#c2410c", "#94a3b8"


def draw(rows: Mapping[str, Measurements], out: Path) -> None:
    """Writes a PNG. A panel that nobody was measured for stays away."""
    panels = [panel for panel in PANELS if panel[0] in rows and rows[panel[0]].engines(panel[0])]
    if not panels:
        return
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 2.9 * lines), layout="constrained", dpi=150)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        draw_panel(axes, rows[panel[0]], *panel)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    figure.savefig(out)


def draw_panel(axes: Axes, measured: Measurements, test: str, figure: str, title: str) -> None:
    """The best on top."""
    medians = [(measured.median(engine, test, figure), engine) for engine in measured.engines(test)]
    bars = sorted((value, engine) for value, engine in medians if value is not None)
    if figure.endswith("_ms"):
        bars.reverse()
    values, engines = [value for value, _ in bars], [engine for _, engine in bars]
    colors = [OURS if engine.startswith("motet") else THEIRS for engine in engines]
    drawn = axes.barh(engines, values, color=colors)
    axes.bar_label(drawn, [f" {shown(value)}" for value in values], fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    axes.margins(x=0.15)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
