"""SentencePiece tokenizers from GGUF metadata, beside SentencePiece itself and transformers on the same file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from transformers import AutoTokenizer

from motet.errors import CorruptCheckpoint
from motet.runtime.tokenizer import Tokenizer

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    " one space",
    "a     b\t\tc\n\n\n  indented\n\tdef f(x: int) -> str:",
    "1234567890 3.14159 0xFF",
    "naïve café Ünïcödé Straße",
    "👋 👋🏽 👩‍👩‍👧‍👦 unseen",
    "สวัสดีชาวโลก 你好，世界。 こんにちは مرحبا",
    "zero\u200bwidth no\u00a0break \ufeff bom \ufffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "the quick brown fox and the lazy dog, the end of the other thing",
    "<tool> user's own <tool>",
]
CORPUS = [
    *TEXTS[:6],
    "the quick brown fox jumps over the lazy dog and then the other dog",
    "this is the end of the thing that there was to say of those other things",
    "hello hello world world, and the world says hello again",
]


def train(*, prefix: bool) -> Any:
    """A SentencePiece BPE model with byte fallback, as Llama 2 and Mistral have it; without prefix: as Gemma."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(model: Any, **changes: object) -> dict[str, object]:
    """As llama.cpp's converter writes a SentencePiece model."""

    def type_of(i: int) -> int:
        kinds = {2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
        found = [kind for kind, holds in kinds.items() if holds(i)]
        return 4 if model.id_to_piece(i) == "<tool>" else found[0] if found else 1

    size = range(model.vocab_size())
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": [model.id_to_piece(i) for i in size],
        "scores": [model.get_score(i) for i in size],
        "token_type": [type_of(i) for i in size],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items()}


def build(metadata: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def with_prefix() -> Any:
    return train(prefix=True)


@pytest.fixture(scope="module")
def without_prefix() -> Any:
    return train(prefix=False)


def test_ids_and_texts_are_those_of_sentencepiece(with_prefix: Any, without_prefix: Any) -> None:
    for model, prefix in ((with_prefix, True), (without_prefix, False)):
        tokenizer = build(metadata_of(model, add_space_prefix=prefix))
        for text in TEXTS:
            if prefix and "<tool>" in text:
                continue  # llama.cpp adds the space behind such a token, too; SentencePiece at the beginning alone
            ids = tokenizer.encode(text)
            assert ids == model.encode(text), text
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert with_prefix.encode(TEXTS[0]) != without_prefix.encode(TEXTS[0])


def test_a_space_is_put_before_every_text_unless_the_file_says_otherwise(with_prefix: Any) -> None:
    assert build(metadata_of(with_prefix)).encode("hello") == with_prefix.encode("hello")
    unprefixed = build(metadata_of(with_prefix, add_space_prefix=False))
    assert unprefixed.encode(" hello") == with_prefix.encode("hello") != unprefixed.encode("hello")


@pytest.mark.parametrize(
    ("flags", "around"),
    [
        ({"add_bos_token": None}, ([1], [])),
        ({"add_bos_token": True}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
    ],
)
def test_bos_is_added_unless_the_file_says_otherwise(
    with_prefix: Any, flags: dict[str, object], around: tuple[list[int], list[int]]
) -> None:
    metadata = metadata_of(with_prefix, **flags)
    given = {key: value for key, value in metadata.items() if value is not None}
    assert build(given).encode("hello") == [*around[0], *with_prefix.encode("hello"), *around[1]]


def test_control_and_user_defined_tokens_are_taken_whole_and_bytes_are_known_as_such(
    without_prefix: Any,
) -> None:
    tokenizer = build(metadata_of(without_prefix, add_space_prefix=False))
    tool = without_prefix.piece_to_id("<tool>")
    assert tokenizer.encode("<s><tool></s>") == [1, tool, 2]
    assert tokenizer.decode([1, tool, 2], skip_special_tokens=True) == "<tool>"
    assert tokenizer.byte_token_ids == {without_prefix.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)}


def test_a_run_of_spaces_defined_by_users_is_one_token_as_in_gemma() -> None:
    tokens = ["<unk>", "▁", "a", "▁a", "  ", "   "]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, -3.0, -2.0, -1.0, -9.0, -9.0],
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 4, 4],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = build(metadata)
    assert tokenizer.encode("a a   a     a") == [2, 3, 5, 2, 5, 4, 2]
    assert tokenizer.decode([2, 3, 5, 2, 5, 4, 2], skip_special_tokens=True) == "a a   a     a"


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3"])
def test_ids_are_those_of_transformers_from_the_same_file(
    architecture: str, with_prefix: Any, without_prefix: Any, tmp_path: Path
) -> None:
    gemma = architecture == "gemma3"
    metadata = metadata_of(
        without_prefix if gemma else with_prefix, add_bos_token=True, add_space_prefix=not gemma
    )
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_uint32(f"{architecture}.block_count", 1)
    for name, value in metadata.items():
        add: Any = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        add[type(value)](name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    tokenizer = build(metadata)
    for text in TEXTS:
        if architecture == "llama" and text[0] in " <":
            continue  # transformers adds no space there, against SentencePiece and llama.cpp
        assert tokenizer.encode(text) == oracle(text).input_ids, text


def test_an_unknown_token_outside_the_vocabulary_is_an_error(with_prefix: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="UNKNOWN token but its unknown_token_id is 5000"):
        Tokenizer.from_gguf(metadata_of(with_prefix, unknown_token_id=5000))
