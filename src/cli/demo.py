"""`motet demo`: four tenants stream from one model at once: the base and three LoRA adapters, mixed in one batch.

Each column is one tenant; below stands what the engine says about itself meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import anyio
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from motet import AsyncEngine, EngineStats, SamplingParams

ADAPTERS = Path(__file__).parent / "adapters"
QUESTIONS = ("What is the capital of France?", "Why do leaves fall in autumn?", "What should I cook tonight?")
COLOURS = {"base": "white", "haiku": "green", "json": "cyan", "pirate": "yellow"}
PARAMS = SamplingParams(max_tokens=90)
REFRESH = 0.1  # seconds
BODY_LINES = 8  # of each answer's end


@dataclass
class Tenant:
    """One column: who asks, through which adapter, and what has come so far."""

    name: str
    adapter: str | None
    text: str = ""
    note: str = "waiting"

    async def ask(self, engine: AsyncEngine, question: str) -> None:
        self.text, self.note = "", "waiting"
        messages = [{"role": "user", "content": question}]
        stream = engine.chat(messages, PARAMS, adapter=self.adapter, tenant=self.name)
        async for token in stream:
            self.text += token.text
            self.note = "streaming"
        usage = stream.usage
        assert usage is not None and usage.ttft is not None
        self.note = (
            f"{usage.output_tokens} tokens, first after {usage.ttft * 1e3:.0f} ms, "
            f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
        )

    def panel(self, console: Console, width: int) -> Panel:
        newest = Text(self.text).wrap(console, width - 4)[-BODY_LINES:]
        kind = f"adapter {self.adapter}" if self.adapter else "base model"
        colour = COLOURS.get(self.name, "magenta")
        body = Group(Text("\n").join(newest), Text(self.note, style="dim"))
        title = f"[bold]{self.name}[/] · {kind}"
        return Panel(body, title=title, width=width, height=BODY_LINES + 5, style=colour)


@dataclass
class View:
    """The whole screen."""

    console: Console
    tenants: list[Tenant]
    question: str = ""
    best: float = 0.0  # tokens/s

    def render(self, stats: EngineStats) -> Group:
        width = self.console.width // (4 if self.console.width >= 120 else 2)
        return Group(
            Text.assemble(("Question: ", "dim"), (self.question, "bold")),
            Columns([tenant.panel(self.console, width) for tenant in self.tenants], padding=0),
            self._figures(stats),
        )

    def _figures(self, stats: EngineStats) -> Table:
        self.best = max(self.best, stats.tokens_per_second)
        mix = " + ".join(f"{count} {name or 'base'}" for name, count in sorted(stats.per_adapter.items()))
        hits = 100 * stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens)
        table = Table.grid(padding=(0, 3))
        table.add_row(
            f"[bold]{stats.tokens_per_second:.0f}[/] tokens/s (best {self.best:.0f})",
            f"batch: [bold]{mix or 'idle'}[/]",
            f"KV blocks: [bold]{stats.kv_blocks_used}[/] used, {stats.kv_blocks_cached} cached, "
            f"{stats.kv_blocks_total} in all",
            f"prefix cache: [bold]{hits:.0f} %[/] of {stats.prefix_query_tokens} prompt tokens",
        )
        return table


async def refresh(live: Live, view: View, engine: AsyncEngine) -> None:
    while True:
        live.update(view.render(engine.stats()), refresh=True)
        await anyio.sleep(REFRESH)


def run() -> None:
    """Raises ModelNotFound where the demo model's package is not installed."""
    anyio.run(_show)


async def _show() -> None:
    console = Console()
    tenants = [Tenant("base", None)] + [
        Tenant(f.name, f.name) for f in sorted(ADAPTERS.iterdir()) if f.is_dir()
    ]
    begin = time.perf_counter()
    async with AsyncEngine("demo") as engine:
        console.print(f"SmolLM2-135M-Instruct is ready after {time.perf_counter() - begin:.1f} s")
        for tenant in tenants:
            if tenant.adapter is not None:
                info = await engine.load_adapter(tenant.adapter, ADAPTERS / tenant.adapter)
                console.print(f"adapter {info.name}: rank {info.rank}, {info.bytes / 1e6:.1f} MB")
        for question in QUESTIONS:
            view = View(console, tenants, question)
            console.print()
            with Live(console=console, auto_refresh=False) as live:
                async with anyio.create_task_group() as screen:
                    screen.start_soon(refresh, live, view, engine)
                    async with anyio.create_task_group() as group:
                        for tenant in tenants:
                            group.start_soon(tenant.ask, engine, question)
                    screen.cancel_scope.cancel()
                live.update(view.render(engine.stats()), refresh=True)
