"""`motet chat`: one conversation in the terminal."""

from __future__ import annotations

import sys

from pydantic import ValidationError
from rich.console import Console

from motet import Engine, EngineConfig, InvalidRequest, MotetError, SamplingParams
from motet.cli.options import first_mistake

ADAPTER = "chat"
FORGET = "/new"


def run(
    model: str,
    config: EngineConfig,
    adapter: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float | None,
) -> None:
    """Reads lines until the end of the input. Raises InvalidRequest, and what the engine raises at its start."""
    if sys.stdin is None:  # closed by whoever started this
        raise InvalidRequest("the standard input is closed: there is nobody to chat with")
    console = Console(highlight=False)
    try:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    except ValidationError as error:
        raise InvalidRequest(first_mistake(error)) from error
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    with Engine(model, config) as engine:
        if adapter is not None:
            engine.load_adapter(ADAPTER, adapter)
        while (said := _ask(console)) is not None:
            if said.strip() == FORGET:
                messages = list(beginning)
            elif said.strip():
                question = {"role": "user", "content": said}
                answer = _answer(console, engine, [*messages, question], params, adapter and ADAPTER)
                if answer is not None:
                    messages += [question, {"role": "assistant", "content": answer}]


def _ask(console: Console) -> str | None:
    """None at the end of the input. Only a person at a terminal is prompted."""
    at_terminal = sys.stdin.isatty()
    try:
        return console.input("[bold]> [/]" if at_terminal else "")
    except (EOFError, KeyboardInterrupt):
        if at_terminal:
            console.print()
        return None


def _answer(
    console: Console,
    engine: Engine,
    messages: list[dict[str, str]],
    params: SamplingParams,
    adapter: str | None,
) -> str | None:
    """Streams an answer; what was said of it where Ctrl-C stopped it; None if it failed."""
    texts = []
    try:
        with engine.chat(messages, params, adapter=adapter) as stream:
            for token in stream:
                texts.append(token.text)
                console.out(token.text, end="")
    except KeyboardInterrupt:
        console.print(" …", style="dim", end="")
    except MotetError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return None
    console.print()
    return "".join(texts)
