"""What the commands share: options that become an EngineConfig or adapters, and errors that end a command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from motet import EngineConfig, MotetError

MODELS = "A Hugging Face folder, a .gguf file, a hub id, or 'demo'."
Model = Annotated[str, typer.Argument(help=MODELS)]
Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="A field of EngineConfig, such as max_num_seqs=16."),
]
Adapters = Annotated[
    list[str],
    typer.Option(
        "--adapter", metavar="NAME=PATH", help="A PEFT folder to load under a name; may be repeated."
    ),
]


def as_config(settings: Sequence[str]) -> EngineConfig:
    """`KEY=VALUE` each; a value is JSON, or else the text itself."""
    values: dict[str, Any] = {}
    for key, value in _split(settings, "KEY=VALUE").items():
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    try:
        return EngineConfig(**values)
    except ValidationError as error:
        raise typer.BadParameter(f"--set {first_mistake(error)}") from error


def as_adapters(adapters: Sequence[str]) -> dict[str, Path]:
    """`NAME=PATH` each."""
    return {name: Path(path) for name, path in _split(adapters, "NAME=PATH").items()}


def first_mistake(error: ValidationError) -> str:
    """In one line."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


@contextmanager
def shown_errors() -> Iterator[None]:
    """Ends the command with what the engine or the system says; others are faults of ours and keep their traceback."""
    try:
        yield
    except BrokenPipeError:  # typer ends quietly
        raise
    except (MotetError, OSError) as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", style="red", markup=False)
        raise typer.Exit(1) from error


def _split(pairs: Sequence[str], form: str) -> dict[str, str]:
    split: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not (key and separator and value):
            raise typer.BadParameter(f"{pair!r} is not of the form {form}")
        if key in split:
            raise typer.BadParameter(f"{key!r} is given twice")
        split[key] = value
    return split
