"""TokenizerThread: turns prompts into token ids beside the engine thread, one after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from motet.runtime.chat_template import Chat, ChatTemplate
from motet.runtime.request import Request
from motet.runtime.tokenizer import Tokenizer

Take = Callable[[Request, "list[int] | BaseException"], None]

END_PATIENCE = 10.0
"""Seconds that `close` waits for the text in hand."""


class TokenizerThread:
    """A thread with a tokenizer of its own (one cannot be shared between threads).

    `take` is called on it with each request and its token ids, or with what the tokenizer or the chat template
    raised. `chat_template` may be None if no conversation is ever submitted.
    A thread of our own because an executor's would have the interpreter's end wait for every queued text.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, take: Take) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._take = take
        self._texts: queue.SimpleQueue[tuple[Request, str | Chat] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="motet-tokenizer", daemon=True)
        self._thread.start()

    def submit(self, request: Request, prompt: str | Chat) -> None:
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
                token_ids: list[int] | BaseException = self._encode(prompt)
            except BaseException as exc:  # a panic in native code is no Exception
                token_ids = exc
            self._take(request, token_ids)

    def _encode(self, prompt: str | Chat) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        assert self._chat_template is not None, "a conversation for a model without a chat template"
        # The template writes the special tokens itself.
        return self._tokenizer.encode(self._chat_template.render(prompt), add_special_tokens=False)
