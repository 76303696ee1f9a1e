"""gguf_tokenizer: a tokenizer from the metadata of a GGUF file, which holds tokens but no tokenizer.json.

llama.cpp knows two kinds: byte-level BPE ("gpt2"), whose cut of text into words has a name of its own (`pre`), and
SentencePiece's BPE ("llama"), which merges by scores and spells unknown characters in bytes (arXiv 1808.06226).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from motet.errors import CorruptCheckpoint, UnsupportedModel

# How each `tokenizer.ggml.pre` cuts text before BPE: the regexes apply one after the other, and both what
# one matches and what lies between its matches are pieces.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (_TIKTOKEN % r"\p{N}{1,3}",)
_BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _LLAMA3,  # OLMo 2, Phi-4
    "smaug-bpe": _LLAMA3,  # SmolLM3
    "qwen2": (_TIKTOKEN % r"\p{N}",),
    "deepseek-r1-qwen": (_TIKTOKEN % r"\p{N}",),
    "tekken": (_BY_CASE % ("", "", r"\p{N}"),),  # Mistral NeMo
    "gpt-4o": (_BY_CASE % (_ENDING, _ENDING, r"\p{N}{1,3}"),),  # Phi-4-mini
    "smollm": (r"\p{N}", _GPT2),
}
_WHOLE_WORDS_AND_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Where a word that is a token needs no merges, and BOS is added unless the file says otherwise."""

_NFC = ("qwen2", "deepseek-r1-qwen")

_SPACE = "▁"  # SentencePiece's


class _Type(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Vocabulary:
    """`tokenizer.ggml.*`, checked."""

    metadata: Mapping[str, object]
    tokens: list[str]
    types: list[int]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def token(self, which: str, default: int | None = None) -> tuple[str, int]:
        """The BOS, EOS or unknown token, and its id."""
        token_id = self.get(f"{which}_token_id", default)
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise CorruptCheckpoint(
                f"the GGUF file asks for a {which.upper()} token but its {which}_token_id is {token_id}; "
                f"expected one of its {len(self.tokens)} tokens. Download or convert the model again"
            )
        return self.tokens[token_id], token_id


def gguf_tokenizer(metadata: Mapping[str, object]) -> tokenizers.Tokenizer:
    """The tokenizer that GGUF metadata describes, with the BOS and EOS that it wants around every text.

    Raises `UnsupportedModel` for another kind than the two, `CorruptCheckpoint` for metadata at odds with itself.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "default"))
    if model not in ("gpt2", "llama") or (model == "gpt2" and pre not in _SPLITS):
        raise UnsupportedModel(
            f"the GGUF file has a tokenizer of model {model!r} and pre {pre!r}; motet builds model 'llama' "
            f"(SentencePiece's BPE), and model 'gpt2' (byte-level BPE) with pre {', '.join(map(repr, _SPLITS))}. "
            "Load the model from its Hugging Face folder instead, which holds a tokenizer.json"
        )
    vocabulary = _read_vocabulary(metadata)
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(vocabulary, pre), pre in _WHOLE_WORDS_AND_BOS
    else:
        tokenizer, adds_bos = _sentencepiece(vocabulary), True
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _Type.CONTROL, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in (_Type.CONTROL, _Type.USER_DEFINED)
        ]
    )
    # llama.cpp adds a BOS to files that do not say.
    bos = [vocabulary.token("bos")] if vocabulary.get("add_bos_token", adds_bos) else []
    eos = [vocabulary.token("eos")] if vocabulary.get("add_eos_token", False) else []
    if bos or eos:
        template = [*(token for token, _ in bos), "$A", *(token for token, _ in eos)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[*bos, *eos])
    return tokenizer


def _read_vocabulary(metadata: Mapping[str, object]) -> _Vocabulary:
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "token_type"))
    if (
        not isinstance(tokens, list)
        or not isinstance(types, list)
        or not all(isinstance(t, str) for t in tokens)
    ):
        raise CorruptCheckpoint(
            "the GGUF file's tokens are no list of texts with a list of types; convert the model again"
        )
    different = len(set(tokens))
    if not tokens or different != len(tokens) or len(types) != len(tokens):
        raise CorruptCheckpoint(
            f"the GGUF file's tokenizer has {len(tokens)} tokens, {different} of them different, and "
            f"{len(types)} token types; the three must be one number above 0. Convert the model again"
        )
    return _Vocabulary(metadata, tokens, types)


def _bpe(vocabulary: _Vocabulary, merges: Iterable[Any], **options: Any) -> models.BPE:
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        return models.BPE(vocab=vocab, merges=list(merges), **options)
    except Exception as error:  # the library raises nothing more specific
        raise CorruptCheckpoint(
            f"the GGUF file's merges do not fit its tokens ({error}); download or convert the model again"
        ) from error


def _byte_level(vocabulary: _Vocabulary, pre: str) -> tokenizers.Tokenizer:
    if vocabulary.get("add_space_prefix", False):
        raise UnsupportedModel(
            "the GGUF file's tokenizer sets add_space_prefix, which motet does not build for byte-level BPE. "
            "Load the model from its Hugging Face folder instead, which holds a tokenizer.json"
        )
    merges = (tuple(merge.split(" ")) for merge in vocabulary.get("merges", []))
    tokenizer = tokenizers.Tokenizer(_bpe(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_AND_BOS))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """As SentencePiece itself encodes: no cut into words, and a space before every text if it is to be added."""
    scores = vocabulary.get("scores", [])
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        found = len(scores) if isinstance(scores, list) else scores
        raise CorruptCheckpoint(
            f"the GGUF file's tokenizer has {len(vocabulary.tokens)} tokens but {found} scores; there must be one "
            "for each. Convert the model again"
        )
    unknown, _ = vocabulary.token("unknown", default=0)
    tokenizer = tokenizers.Tokenizer(
        _bpe(
            vocabulary,
            _merges_by_score(vocabulary, scores),
            unk_token=unknown,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    with_prefix = bool(vocabulary.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    prefix = [normalizers.Prepend(_SPACE)] if with_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if with_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Each pair of tokens that makes a third, those that make the one of the best score first.

    SentencePiece merges whatever neighbours make the token of the best score. It takes tokens defined by users, and
    control tokens, out of the text before.
    """
    mergeable = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
        if kind in (_Type.NORMAL, _Type.UNUSED)
    }
    ranked = sorted(mergeable, key=mergeable.__getitem__, reverse=True)
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
