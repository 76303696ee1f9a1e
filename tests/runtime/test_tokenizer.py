from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from motet.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from motet.runtime.tokenizer import Tokenizer
from tests.runtime.small_tokenizers import byte_fallback, byte_level
from tests.tiny import tiny_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "don't we'll I'M THEY'RE it's 'S",
    "tabs\tand\r\nlines\n\n\n  indented\n\tdef f(x: int) -> str:\n        return f'{x!r}'  # ok",
    "1234567890 3.14159 0xFF 1,000,000",
    "x=1;y=22;z=333;w=4444",
    "naïve café Ünïcödé Straße ŒUVRE İstanbul",
    "e\u0301 decomposed and \u1e9b\u0323 both",
    "👋 👋🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ 1️⃣",
    "สวัสดีชาวโลก 你好，世界。 こんにちは 안녕하세요 مرحبا שלום नमस्ते",
    "zero\u200bwidth no\u00a0break \u2028 line \ufeff bom \u0000 nul \ufffd",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "in<|endoftext|>side <|im_start| > not <|IM_END|> <repo_name>",
    "!!!???...—“quotes”…$€+<=>^~|`",
    "a" * 300,
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff",
]
UNUSUAL_DIGITS = ["½ ² Ⅷ ٣٤٥ १२३", "a  1", "a   12\n\n3", "\t\t7 up", "  42"]


@pytest.fixture(scope="module")
def small_metadata() -> dict[str, object]:
    """A byte-level BPE tokenizer whose merges know no bounds, so that only the pre-tokenizer keeps words apart."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = ["<|endoftext|>", "<|end|>"]  # the class in transformers always adds the first
    tokenizer.train_from_iterator(
        [text for text in [*TEXTS, *UNUSUAL_DIGITS] for _ in range(3)],
        trainers.BpeTrainer(
            vocab_size=1500,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def write_gguf(path: Path, metadata: dict[str, object]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    for name, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            assert isinstance(value, list)
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_demo_ids_equal_those_of_transformers(demo_tokenizer: Tokenizer, demo_gguf: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
    assert [demo_tokenizer.has_text(len(oracle) + i, False) for i in (-1, 0)] == [True, False]
    for text in TEXTS:
        ids = demo_tokenizer.encode(text)
        assert ids == oracle(text).input_ids, text
        for skip in (True, False):
            decoded = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert demo_tokenizer.decode(ids, skip) == decoded


def test_smollm_cuts_digits_as_its_own_tokenizer_json_does(
    demo_tokenizer: Tokenizer, demo_tokenizer_metadata: dict[str, object]
) -> None:
    # transformers ignores `pre: smollm` and so differs from SmolLM2's tokenizer.json where a run of spaces
    # meets a digit, and at digits that are not ASCII; that file's pre-tokenizer is Digits, then ByteLevel.
    tokens = demo_tokenizer_metadata["tokenizer.ggml.tokens"]
    merges = demo_tokenizer_metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    oracle = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges])
    )
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, *UNUSUAL_DIGITS]:
        if "<|" not in text:
            assert demo_tokenizer.encode(text) == oracle.encode(text).ids, text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "dbrx", "smaug-bpe", "tekken", "gpt-4o"])
@pytest.mark.parametrize("bos", [True, False])
def test_pre_tokenizers_equal_those_of_transformers(
    small_metadata: dict[str, object], tmp_path: Path, pre: str, bos: bool
) -> None:
    metadata = {**small_metadata, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": bos}
    write_gguf(tmp_path / "m.gguf", metadata)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in [*TEXTS, *UNUSUAL_DIGITS, "a<|endoftext|>b <|end|>"]:
        ids = oracle(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text) == [0] * bos + ids, text


def test_qwen2_equals_the_tokenizer_class_of_transformers(small_metadata: dict[str, object]) -> None:
    tokens, merges = (small_metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    oracle = Qwen2Tokenizer(
        vocab={t: i for i, t in enumerate(tokens)},
        merges=[tuple(m.split(" ")) for m in merges],
        unk_token=None,
        eos_token=None,
        pad_token=None,
    )
    tokenizer = Tokenizer.from_gguf({**small_metadata, "tokenizer.ggml.pre": "qwen2"})
    for text in [*TEXTS, *UNUSUAL_DIGITS]:
        if "<|" not in text:
            assert tokenizer.encode(text) == oracle(text).input_ids, text


def test_default_cuts_punctuation_apart_and_digits_in_threes(small_metadata: dict[str, object]) -> None:
    tokenizer = Tokenizer.from_gguf(small_metadata)  # no `pre` means "default"
    pieces = ["a", " ", "!!!???...", " ", " ", "123", "456", "789", "0", " ", "3", ".", "141", "59", " end"]
    whole = tokenizer.encode("".join(pieces))
    assert whole == [i for piece in pieces for i in tokenizer.encode(piece)]
    as_gpt2 = Tokenizer.from_gguf({**small_metadata, "tokenizer.ggml.pre": "gpt-2"})
    assert whole != as_gpt2.encode("".join(pieces))


@pytest.mark.parametrize(
    ("pre", "flags", "around"),
    [
        ("gpt-2", {}, ([], [])),
        ("llama-bpe", {}, ([0], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
        ("gpt-2", {"add_eos_token": True}, ([], [1])),
    ],
)
def test_bos_and_eos_are_added_as_the_metadata_says(
    small_metadata: dict[str, object], pre: str, flags: dict[str, bool], around: tuple[list[int], list[int]]
) -> None:
    metadata = {**small_metadata, "tokenizer.ggml.pre": pre}
    plain = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.add_bos_token": False})
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("Hello") == [*around[0], *plain.encode("Hello"), *around[1]]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", [3]), ("gpt-2", [0, 1, 2])])
def test_llama_3_takes_a_piece_that_is_a_token_without_merges(pre: str, expected: list[int]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "b", "c", "abc"],
        "tokenizer.ggml.token_type": [1] * 4,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_bos_token": False,
    }
    assert Tokenizer.from_gguf(metadata).encode("abc") == expected


def test_user_defined_tokens_are_kept_whole_and_shown(small_metadata: dict[str, object]) -> None:
    tokens, types = small_metadata["tokenizer.ggml.tokens"], small_metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    tool = len(tokens)
    metadata = {
        **small_metadata,
        "tokenizer.ggml.tokens": [*tokens, "<tool call>"],
        "tokenizer.ggml.token_type": [*types, 4],
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("<tool call><|end|>") == [tool, 1]
    assert tokenizer.decode([tool, 1], skip_special_tokens=True) == "<tool call>"
    assert tokenizer.decode([tool, 1], skip_special_tokens=False) == "<tool call><|end|>"
    assert [tokenizer.has_text(i, True) for i in (tool, 1, tool + 1)] == [True, False, False]
    assert [tokenizer.has_text(i, False) for i in (tool, 1, tool + 1)] == [True, True, False]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "bert"}, UnsupportedModel, ["'bert'", "'llama'", "'gpt2'", "'smollm'", "tokenizer.json"]),
        ({"pre": "falcon"}, UnsupportedModel, ["'falcon'", "'qwen2'"]),
        ({"model": "llama"}, CorruptCheckpoint, ["0 scores"]),
        ({"model": "llama", "scores": 7}, CorruptCheckpoint, ["7 scores"]),
        ({"model": None}, UnsupportedModel, ["None"]),
        ({"add_space_prefix": True}, UnsupportedModel, ["add_space_prefix"]),
        (
            {"tokens": ["a", "a"], "token_type": [1, 1]},
            CorruptCheckpoint,
            ["2 tokens", "1 of them different"],
        ),
        ({"token_type": [1]}, CorruptCheckpoint, ["1 token types"]),
        ({"tokens": []}, CorruptCheckpoint, ["0 tokens"]),
        ({"tokens": "abc"}, CorruptCheckpoint, ["no list of texts"]),
        ({"tokens": [1, 2]}, CorruptCheckpoint, ["no list of texts"]),
        ({"merges": ["zz qq"]}, CorruptCheckpoint, ["merges"]),
        ({"merges": ["a b c"]}, CorruptCheckpoint, ["merges"]),
        ({"add_bos_token": True, "bos_token_id": None}, CorruptCheckpoint, ["BOS", "None"]),
        ({"add_eos_token": True, "eos_token_id": 10**6}, CorruptCheckpoint, ["EOS", "1000000"]),
    ],
)
def test_unusable_metadata_is_a_typed_error(
    small_metadata: dict[str, object], change: dict[str, object], error: type[Exception], words: list[str]
) -> None:
    metadata = small_metadata | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(error) as raised:
        Tokenizer.from_gguf(metadata)
    for word in words:
        assert word in str(raised.value)


def test_folder_tokenizer_adds_what_its_post_processor_says_and_ignores_truncation(
    demo_tokenizer_metadata: dict[str, object], small_metadata: dict[str, object], tmp_path: Path
) -> None:
    tokens = small_metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    backend.no_truncation()
    backend.no_padding()
    text = "Hello, world! 👋"
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert len(tokenizer.encode(text)) > 8
    assert tokenizer.encode(text)[0] == 0


def test_folder_without_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_damaged_tokenizer_json_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_case_24_text_that_is_no_unicode_is_an_invalid_request(demo_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="index 2"):
        demo_tokenizer.encode("ab\ud800c")
    assert demo_tokenizer.encode("abc")


def test_case_25_encoding_256k_characters_lets_other_threads_run(demo_tokenizer: Tokenizer) -> None:
    text = ("The quick brown fox 123 jumps, naïve 👋🏽 " * 7000)[:256_000]
    worker = threading.Thread(target=demo_tokenizer.encode, args=(text,))
    lags = []
    worker.start()
    started = last = time.perf_counter()
    while worker.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        lags.append(now - last)
        last = now
    # With the GIL held, this thread would sleep through all of it. A neighbour's load may cost a turn or two.
    assert max(lags) < 0.5 * (last - started)


def test_threads_share_a_tokenizer(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode(TEXTS[5])
    text = demo_tokenizer.decode(ids, skip_special_tokens=False)
    results: list[bool] = []

    def encode() -> None:
        results.extend(
            demo_tokenizer.encode(TEXTS[5] * 100)[: len(ids) // 2] == ids[: len(ids) // 2] for _ in range(50)
        )

    def decode() -> None:
        results.extend(demo_tokenizer.decode(ids, skip_special_tokens=False) == text for _ in range(500))

    threads = [threading.Thread(target=work) for work in (encode, decode, encode, decode)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 1100


def test_a_process_that_forks_after_encoding_is_not_warned(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    script = (
        "import os, sys; from motet.runtime.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.from_folder(sys.argv[1]); tokenizer.encode('a')\n"
        "if os.fork() == 0:\n    tokenizer.encode('a'); os._exit(0)\n"
        "assert os.wait()[1] == 0\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""


def test_the_demo_tokenizer_is_light(demo_tokenizer_metadata: dict[str, object]) -> None:
    started = time.thread_time()
    Tokenizer.from_gguf(demo_tokenizer_metadata)
    assert time.thread_time() - started < 1.0  # 0.2 s on an idle machine


# -- spellings of words ----------------------------------------------------------------------------------------


def test_a_word_is_spelt_with_and_without_a_space_before_it(demo_tokenizer: Tokenizer) -> None:
    words = ["fox", " dog", "incomprehensibility"]
    spelt = [
        tuple(demo_tokenizer.encode(text)) for word in words for text in (word.strip(), " " + word.strip())
    ]
    assert demo_tokenizer.spellings(words) == tuple(spelt)
    assert len(spelt[0]) == len(spelt[1]) == 1 and len(spelt[4]) > 1
    assert demo_tokenizer.spellings(()) == ()


def test_a_spelling_that_ends_with_a_shorter_one_is_left_out() -> None:
    letters = byte_level()
    assert letters.spellings(["bc"]) == (tuple(letters.encode("bc")),)
    assert letters.spellings(["a"]) == (tuple(letters.encode("a")), tuple(letters.encode(" a")))
    assert letters.spellings([" "]) == (tuple(letters.encode(" ")),)
    llama_2 = byte_fallback()
    assert llama_2.spellings(["ab"]) == (tuple(llama_2.encode("ab")),)


def test_a_word_is_spelt_without_the_tokens_around_a_prompt_and_special_tokens_are_words() -> None:
    backend = tiny_tokenizer()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.spellings(["a", "</s>"]) == ((tokenizer.encode("a")[1],), (1,))


def test_case_27_a_word_that_the_vocabulary_cannot_spell_is_an_invalid_request() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "fox": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Tokenizer(backend).spellings(["fox"]) == ((1,),)
    with pytest.raises(InvalidRequest, match=r"bad_words: .*no tokens that spell 'dog'"):
        Tokenizer(backend).spellings(["fox", "dog"])
