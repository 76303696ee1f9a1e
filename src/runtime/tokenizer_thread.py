"""TokenizerThread: turns requests' texts into token ids beside the engine thread, one after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from motet.runtime.chat_template import ChatTemplate, Prompt
from motet.runtime.request import Request
from motet.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Encoded:
    """A request's texts as token ids."""

    prompt: list[int]
    bad_words: tuple[tuple[int, ...], ...] = ()
    """As `Tokenizer.spellings` gives them."""


Take = Callable[[Request, "Encoded | BaseException"], None]

END_PATIENCE = 10.0
"""Seconds that `close` waits for the text in hand."""


class TokenizerThread:
    """A thread beside the engine's, so that a long text holds up no step.

    `take` is called on it with each request and what was encoded, or with what the tokenizer or the chat template
    raised. `chat_template` may be None if no conversation is ever submitted.
    A thread of our own because an executor's would have the interpreter's end wait for every queued text.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, take: Take) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._take = take
        self._texts: queue.SimpleQueue[tuple[Request, Prompt] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="motet-tokenizer", daemon=True)
        self._thread.start()

    def submit(self, request: Request, prompt: Prompt) -> None:
        """Takes a prompt that is no ids yet, or whose request has other texts."""
        self._texts.put((request, prompt))

    def close(self) -> None:
        """Waits for the text in hand; the queued ones of requests that have ended are passed over."""
        self._texts.put(None)
        self._thread.join(END_PATIENCE)
        del self._take  # its owner may go, and with it the weights

    def _run(self) -> None:
        while (item := self._texts.get()) is not None:
            request, prompt = item
            if request.is_finished:
                continue
            try:
                words = self._tokenizer.spellings(request.params.bad_words)
                encoded: Encoded | BaseException = Encoded(self._encode(prompt), words)
            except BaseException as exc:  # a panic in native code is no Exception
                encoded = exc
            self._take(request, encoded)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if isinstance(prompt, list):
            return prompt
        assert self._chat_template is not None, "a conversation for a model without a chat template"
        # The template writes the special tokens itself.
        return self._tokenizer.encode(self._chat_template.render(prompt), add_special_tokens=False)
