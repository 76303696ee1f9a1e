"""Generated token ids to text, one id at a time, and the search for stop strings in it. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

from motet.params import SamplingParams
from motet.runtime.tokenizer import Tokenizer

_CONTEXT = 3
"""Tokens before a place that must be known to decode what follows it as within the whole text: an
unfinished character has at most three bytes of UTF-8, and a token at least one."""

_REPLACEMENT = "\ufffd"


class TextDelta(NamedTuple):
    """What one token adds to the text that may be shown."""

    text: str
    stop: str | None
    """The stop string that is complete with this token. The text has ended; push nothing more."""


class Detokenizer:
    """The text of one generated answer.

    The deltas joined are what all ids add to the decoded prompt, cut before the first complete stop string
    (or right after it with `include_stop`). Held back are only bytes of an unfinished character and an end of
    the text that could begin a stop string.

    With several stop strings the one that is complete first wins, the longest of those that end together:
    how the tokens cut the text makes no difference. A stop string that is complete with one of the first
    `min_tokens` tokens is plain text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._params = params
        self._stops = [_StopString(text) for text in params.stop]
        self._num_tokens = 0
        self._held = ""  # decoded, and could begin a stop string

    def fork(self) -> Detokenizer:
        """Another that goes on from here by itself."""
        fork = copy(self)
        fork._decoder = self._decoder.fork()
        fork._stops = [copy(stop) for stop in self._stops]
        return fork

    def push(self, token_id: int, *, is_stop_token: bool = False, last: bool = False) -> TextDelta:
        """The next generated token; with the `last` one everything held back comes out.

        The text of the end token or stop id that ends the answer counts only with `include_stop`.
        """
        text = ""
        if self._params.include_stop or not is_stop_token:
            text = self._decoder.push(token_id)
        if last:
            text += self._decoder.flush()
        return self._emit(text, last)

    def _emit(self, text: str, last: bool) -> TextDelta:
        self._num_tokens += 1
        may_stop = self._num_tokens > self._params.min_tokens
        for end, char in enumerate(text, 1):
            complete = [stop.text for stop in self._stops if stop.advance(char)]
            if complete and may_stop:
                stop = max(complete, key=len)
                shown = self._held + text[:end]
                return TextDelta(shown if self._params.include_stop else shown.removesuffix(stop), stop)
        shown = self._held + text
        num_held = 0 if last else max((stop.num_matched for stop in self._stops), default=0)
        end = len(shown) - num_held
        self._held = shown[end:]
        return TextDelta(shown[:end], None)


class IncrementalDecoder:
    """Decodes a growing list of ids at a cost per id that does not depend on its length.

    It decodes only a window of the latest ids and takes what is new at its end. U+FFFD at the end may be a
    character that is not finished, so it waits for the next id or for `flush`. A run of byte-fallback tokens
    waits for its end, because its last byte still decides over the text of the first.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(self._context(prompt_token_ids))[::-1]
        self._seen = self._decode()  # the window's text that is the prompt's, or returned already

    def fork(self) -> IncrementalDecoder:
        """Another that goes on from here by itself."""
        fork = copy(self)
        fork._window = list(self._window)
        return fork

    def push(self, token_id: int) -> str:
        """The text that became certain with this id."""
        if not self._tokenizer.has_text(token_id, self._skip_special_tokens):
            return ""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_token_ids:
            return ""
        text, waiting = self._advance(_REPLACEMENT)
        if len(self._window) > 2 * _CONTEXT:
            del self._window[:-_CONTEXT]
            shorter = self._decode()
            self._seen = shorter[: len(shorter) - waiting]
        return text

    def flush(self) -> str:
        """What still waits, as it stands."""
        return self._advance("")[0]

    def _advance(self, held: str) -> tuple[str, int]:
        """The new text, but for `held` at its end; and how many characters still wait."""
        text = self._decode()
        # Shorter than what was seen where an id finishes a character that the prompt left open as U+FFFD.
        start = _common_prefix_length(self._seen, text)
        end = max(start, len(text.removesuffix(held)))
        self._seen = text[:end]
        return text[start:end], len(text) - end

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)

    def _context(self, prompt_token_ids: Sequence[int]) -> Iterator[int]:
        """The prompt's latest ids, backwards: `_CONTEXT` at least, and no run of byte-fallback tokens cut."""
        found = 0
        for token_id in reversed(prompt_token_ids):
            if self._tokenizer.has_text(token_id, self._skip_special_tokens):
                yield token_id
                found += 1
                if found >= _CONTEXT and token_id not in self._tokenizer.byte_token_ids:
                    return


def _common_prefix_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class _StopString:
    """One stop string, searched for character by character (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0  # length of the longest end of the text so far that begins the stop string
        self._shorter = [0]  # [i]: the next longest such end, where the first i + 1 characters are one
        for char in text[1:]:
            self._match(char)
            self._shorter.append(self.num_matched)
        self.num_matched = 0

    def advance(self, char: str) -> bool:
        """Whether the stop string is complete with this character."""
        self._match(char)
        complete = self.num_matched == len(self.text)
        if complete:
            self.num_matched = self._shorter[-1]
        return complete

    def _match(self, char: str) -> None:
        while self.num_matched and self.text[self.num_matched] != char:
            self.num_matched = self._shorter[self.num_matched - 1]
        self.num_matched += self.text[self.num_matched] == char
