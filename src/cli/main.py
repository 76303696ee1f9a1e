"""`motet demo | chat | batch | info`: what can be asked of the command line; each command has its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motet.cli.options import MODELS, Adapters, Model, Settings, as_adapters, as_config, shown_errors

app = typer.Typer(
    name="motet",
    help="One language model in this process, many LoRA adapters mixed in one batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def demo() -> None:
    """Streams the answers of four tenants side by side: a small base model and three adapters."""
    from motet.cli.demo import run

    with shown_errors():
        run()


@app.command()
def chat(
    model: Model,
    adapter: Annotated[
        str | None, typer.Option(metavar="PATH", help="A PEFT folder to answer through.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the system message says.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: greedy. Default: the model's.")] = None,
    settings: Settings = [],  # noqa: B006  typer copies it
) -> None:
    """Talks with a model in the terminal. Ctrl-C stops an answer, Ctrl-D ends; /new forgets what was said."""
    from motet.cli.chat import run

    with shown_errors():
        run(model, as_config(settings), adapter, system, max_tokens, temperature)


@app.command()
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", exists=True, dir_okay=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", dir_okay=False)],
    model: Annotated[str, typer.Option(help=MODELS)],
    adapters: Adapters = [],  # noqa: B006
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Also asks again what an earlier run has failed at.")
    ] = False,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Answers every line of a file; started again after a crash, it goes on where it was.

    A line in is a JSON object: `id` and `prompt` (text or token ids) or `messages`; optional `adapter`, `tenant`,
    `tools` and any field of SamplingParams. A line out: `id`, `text`, `token_ids`, `finish_reason`, `usage` (with
    n > 1: `outputs`; log-probabilities where asked for), or `error`. Lines come in the order in which they are
    done. A bad line is reported by number and stops nothing; its error is its result, also when the command is run
    again, unless with --retry-failed. Exits with 1 if some lines have failed.
    """
    from motet.cli.batch import run

    with shown_errors():
        all_well = run(
            source, target, model, as_adapters(adapters), as_config(settings), retry_failed=retry_failed
        )
    raise typer.Exit(0 if all_well else 1)


@app.command()
def info(
    model: Annotated[str | None, typer.Argument(help="A model to describe, too.")] = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Describes this machine as motet sees it, and a model."""
    from motet.cli.info import run

    with shown_errors():
        run(model, as_config(settings))
