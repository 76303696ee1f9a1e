"""Two small tokenizers that cut characters into bytes, one of each kind that language models use."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from motet.runtime.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that GPT-2 spells as the characters of the same number; it spells the others as chr(256) and onward."""
SPELLING = {b: chr(b) for b in PRINTABLE}
SPELLING |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in SPELLING)}
BYTE_ID = {b: ALPHABET.index(char) for b, char in SPELLING.items()}


def byte_level() -> Tokenizer:
    """Every byte, a few tokens that end or begin inside a character, and two special tokens."""
    merges = [("ð", "Ł"), ("Ł", "ĳ"), ("ĭ", "ð"), ("a", "Ã"), ("Ģ", "â"), ("Ġ", "a"), ("¿", "½")]
    vocab = {token: i for i, token in enumerate([*ALPHABET, *("".join(m) for m in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend)


FALLBACK_TOKENS = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdefgh,é你\ufffd", "▁a", "▁▁", "ab"]


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: "▁" for spaces, unknown characters in bytes, one leading space stripped."""
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(FALLBACK_TOKENS)},
            merges=[("▁", "a"), ("▁", "▁"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend)
