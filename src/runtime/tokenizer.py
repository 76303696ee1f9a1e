"""Text to token ids and back, through the `tokenizers` library.

The library lets threads share a tokenizer as long as none changes it ("Already borrowed", it says else), so a
`Tokenizer` is changed only while it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path

import tokenizers

from motet.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from motet.garbage import collections_paused
from motet.runtime.gguf_tokenizer import gguf_tokenizer


class Tokenizer:
    """A model's tokenizer. Any number of threads may use it at once."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # The file may carry the settings of a training run, which would cut or pad every prompt.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        unknown: str | None = getattr(backend.model, "unk_token", None)
        self._unknown_id = None if unknown is None else backend.token_to_id(unknown)
        self._special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.byte_token_ids: frozenset[int] = frozenset(_byte_token_ids(backend))
        """Tokens of byte fallback, `<0x00>` to `<0xFF>`. The decoder turns a whole run of them into text
        at once: characters if all of the run is valid UTF-8, else U+FFFD for every byte."""

    @classmethod
    def from_folder(cls, folder: str | PathLike[str]) -> Tokenizer:
        """From a Hugging Face folder. Raises `UnsupportedModel` if it has no `tokenizer.json`, `CorruptCheckpoint`."""
        path = Path(folder, "tokenizer.json")
        if not path.is_file():
            raise UnsupportedModel(
                f"{folder} has no tokenizer.json, the only tokenizer file that motet reads. Make one with "
                "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return cls(_from_json(path.read_text(encoding="utf-8")))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """From a GGUF file's metadata; errors as for `gguf_tokenizer`."""
        with collections_paused():  # the merges are 100,000 tuples
            return cls(gguf_tokenizer(metadata))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with those that the model wants around every prompt (BOS, say) if `add_special_tokens`.

        Special tokens written in the text become their ids. Long texts do not hold the GIL. Raises
        `InvalidRequest` for a text that is not Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the prompt has an unpaired surrogate at index {error.start}, which is no Unicode text; "
                "decode its bytes with errors='replace', or pass token ids"
            ) from None
        # `Tokenizer.encode` would hold the GIL: 0.2 s for 256k characters, and no event loop runs meanwhile.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids that spell each word inside a text: at its beginning, and behind a space.

        Raises `InvalidRequest` for a word that the vocabulary cannot spell.
        """
        return tuple({ids: None for word in words for ids in self._spellings(word)})

    def _spellings(self, word: str) -> Iterator[tuple[int, ...]]:
        bare = word.removeprefix(" ")
        found: list[tuple[int, ...]] = []
        for encoding in self._backend.encode_batch_fast([bare, " " + bare], add_special_tokens=False):
            ids = tuple(encoding.ids)
            # What ends with a shorter spelling is impossible together with it.
            if (
                ids
                and self._unknown_id not in ids
                and not any(ids[-len(known) :] == known for known in found)
            ):
                found.append(ids)
        if not found:
            raise InvalidRequest(f"bad_words: the model's vocabulary has no tokens that spell {word!r}")
        yield from found

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The ids' text; ids behind the vocabulary have none."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """False for a token that `decode` passes over."""
        if token_id in self._special_token_ids:
            return not skip_special_tokens
        return self._backend.id_to_token(token_id) is not None


def _from_json(text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise CorruptCheckpoint(
            f"the model's tokenizer.json cannot be read ({error}); download the model again"
        ) from error


def _byte_token_ids(backend: tokenizers.Tokenizer) -> Iterator[int]:
    for literal in (f"<0x{byte:02X}>" for byte in range(256)):
        token_id = backend.token_to_id(literal)
        # Without a byte-fallback decoder it is a token like any other.
        if token_id is not None and backend.decode([token_id], skip_special_tokens=False) != literal:
            yield token_id
