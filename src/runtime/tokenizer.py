"""Text to token ids and back, through the `tokenizers` library.

A `TokenizerSource` is read once with the model; each thread builds a `Tokenizer` of its own from it, because
the library refuses to share one between threads ("Already borrowed").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from motet.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel

# How each `tokenizer.ggml.pre` cuts text before BPE: the regexes apply one after the other, and both what
# one matches and what lies between its matches are pieces.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_TIKTOKEN % r"\p{N}{1,3}",),
    "qwen2": (_TIKTOKEN % r"\p{N}",),
    "smollm": (r"\p{N}", _GPT2),
}

# Values of `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4


class Tokenizer:
    """One thread's tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder()
        self._special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.byte_token_ids: frozenset[int] = frozenset(_byte_token_ids(backend))
        """Tokens of byte fallback, `<0x00>` to `<0xFF>`. The decoder turns a whole run of them into text
        at once: characters if all of the run is valid UTF-8, else U+FFFD for every byte."""

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

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The ids' text; ids behind the vocabulary have none."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """False for a token that `decode` passes over."""
        if token_id in self._special_token_ids:
            return not skip_special_tokens
        return self._backend.id_to_token(token_id) is not None


class TokenizerSource:
    """A tokenizer as the text of a `tokenizer.json`. Immutable: any thread may build from it."""

    def __init__(self, tokenizer_json: str) -> None:
        self._json = tokenizer_json

    @classmethod
    def from_folder(cls, folder: str | PathLike[str]) -> TokenizerSource:
        """From a Hugging Face folder. Raises `UnsupportedModel` if it has no `tokenizer.json`."""
        path = Path(folder, "tokenizer.json")
        if not path.is_file():
            raise UnsupportedModel(
                f"{folder} has no tokenizer.json, the only tokenizer file that motet reads. Make one with "
                "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return cls(path.read_text(encoding="utf-8"))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> TokenizerSource:
        """From a GGUF file's metadata, which must describe a byte-level BPE tokenizer.

        Raises `UnsupportedModel` for any other kind, `CorruptCheckpoint` for metadata at odds with itself.
        """
        return cls(_byte_level_bpe(metadata).to_str())

    def build(self) -> Tokenizer:
        """A fresh tokenizer for the calling thread (0.1 s for 49k tokens). Raises `CorruptCheckpoint`."""
        try:
            backend = tokenizers.Tokenizer.from_str(self._json)
        except Exception as error:  # the library raises nothing more specific
            raise CorruptCheckpoint(
                f"the model's tokenizer.json cannot be read ({error}); download the model again"
            ) from error
        # The file may carry the settings of a training run, which would cut or pad every prompt.
        backend.no_truncation()
        backend.no_padding()
        return Tokenizer(backend)


def _byte_token_ids(backend: tokenizers.Tokenizer) -> Iterator[int]:
    for literal in (f"<0x{byte:02X}>" for byte in range(256)):
        token_id = backend.token_to_id(literal)
        # Without a byte-fallback decoder it is a token like any other.
        if token_id is not None and backend.decode([token_id], skip_special_tokens=False) != literal:
            yield token_id


def _byte_level_bpe(metadata: Mapping[str, object]) -> tokenizers.Tokenizer:
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    model, pre = get("model"), get("pre", "default")
    if model != "gpt2" or pre not in _SPLITS:
        raise UnsupportedModel(
            f"the GGUF file has a tokenizer of model {model!r} and pre {pre!r}; motet builds model 'gpt2' "
            f"(byte-level BPE) with pre {', '.join(map(repr, _SPLITS))}. "
            "Load the model from its Hugging Face folder instead, which holds a tokenizer.json"
        )
    if get("add_space_prefix", False):
        raise UnsupportedModel(
            "the GGUF file's tokenizer sets add_space_prefix, which motet does not build. "
            "Load the model from its Hugging Face folder instead, which holds a tokenizer.json"
        )

    tokens, types, merges = get("tokens", []), get("token_type", []), get("merges", [])
    vocab = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(vocab) != len(tokens) or len(types) != len(tokens):
        raise CorruptCheckpoint(
            f"the GGUF file's tokenizer has {len(tokens)} tokens, {len(vocab)} of them different, and "
            f"{len(types)} token types; the three must be one number above 0. Convert the model again"
        )
    try:
        bpe = models.BPE(
            vocab=vocab,
            merges=[tuple(merge.split(" ")) for merge in merges],
            # As in Llama 3's own tokenizer.json: a piece that is a token needs no merges.
            ignore_merges=pre == "llama-bpe",
        )
    except Exception as error:  # the library raises nothing more specific
        raise CorruptCheckpoint(
            f"the GGUF file's merges do not fit its tokens ({error}); download or convert the model again"
        ) from error

    tokenizer = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )

    def around(which: str, by_default: bool) -> list[tuple[str, int]]:
        """The BOS or EOS token, if it is to be added."""
        if not get(f"add_{which}_token", by_default):
            return []
        token_id = get(f"{which}_token_id")
        if token_id is None or not 0 <= token_id < len(tokens):
            raise CorruptCheckpoint(
                f"the GGUF file asks for a {which.upper()} token but its {which}_token_id is {token_id}; "
                f"expected one of its {len(tokens)} tokens. Download or convert the model again"
            )
        return [(tokens[token_id], token_id)]

    # llama.cpp adds Llama 3's BOS to files that do not say.
    bos, eos = around("bos", pre == "llama-bpe"), around("eos", False)
    if bos or eos:
        template = [*(token for token, _ in bos), "$A", *(token for token, _ in eos)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[*bos, *eos])
    return tokenizer
