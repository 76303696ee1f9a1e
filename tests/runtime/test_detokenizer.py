from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count, product
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from motet.params import SamplingParams
from motet.runtime.detokenizer import Detokenizer, IncrementalDecoder
from motet.runtime.tokenizer import Tokenizer
from tests.runtime.small_tokenizers import BYTE_ID, FALLBACK_TOKENS, byte_fallback, byte_level

HARD_TEXTS = [
    "naïve café",
    "👋 and 👋🏽",
    "family: 👩‍👩‍👧‍👦!",
    "สวัสดีชาวโลก",
    "你好，世界",
    "𝔘𝔫𝔦 \U0010ffff",
]


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


def added_text(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip_special_tokens: bool = True
) -> str:
    """What `ids` add to the decoded prompt, by decoding everything twice."""
    before = tokenizer.decode(prompt, skip_special_tokens)
    after = tokenizer.decode([*prompt, *ids], skip_special_tokens)
    common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    return after[common:]


def deltas(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], **params: Any
) -> tuple[list[str], str | None]:
    """All deltas of an answer whose last token is `ids[-1]`, up to a stop string."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(**params))
    texts = []
    for i, token_id in enumerate(ids, 1):
        text, stop = detokenizer.push(token_id, last=i == len(ids))
        texts.append(text)
        if stop is not None:
            return texts, stop
    return texts, None


def check_against_full_decode(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> None:
    texts, stop = deltas(tokenizer, prompt, ids, skip_special_tokens=skip)
    assert "".join(texts) == added_text(tokenizer, prompt, ids, skip)
    assert stop is None
    assert len(texts) == len(ids)


def id_lists(tokenizer: Tokenizer, max_size: int = 30) -> st.SearchStrategy[list[int]]:
    """Any ids, many of them bytes of characters, some special, some behind the vocabulary."""
    size = next(i for i in count() if not tokenizer.has_text(i, skip_special_tokens=False))
    parts = [i for i in range(size) if "\ufffd" in tokenizer.decode([i], skip_special_tokens=False)]
    special = [i for i in range(size) if not tokenizer.has_text(i, skip_special_tokens=True)]
    common = st.integers(0, size - 1) | st.sampled_from(parts) | st.sampled_from(parts)
    return st.lists(common | common | st.sampled_from([*special, size, size + 7]), max_size=max_size)


@given(st.data(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_byte_level_deltas_joined_are_what_the_ids_add_to_the_prompt(data: st.DataObject, skip: bool) -> None:
    ids = id_lists(BYTE_LEVEL)
    check_against_full_decode(BYTE_LEVEL, data.draw(ids), data.draw(ids), skip)


@given(st.data(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_byte_fallback_deltas_joined_are_what_the_ids_add_to_the_prompt(
    data: st.DataObject, skip: bool
) -> None:
    ids = id_lists(BYTE_FALLBACK)
    check_against_full_decode(BYTE_FALLBACK, data.draw(ids), data.draw(ids), skip)


@pytest.fixture(scope="session")
def demo_ids(demo_tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return id_lists(demo_tokenizer)


@given(st.data(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_demo_deltas_joined_are_what_the_ids_add_to_the_prompt(
    demo_tokenizer: Tokenizer, demo_ids: st.SearchStrategy[list[int]], data: st.DataObject, skip: bool
) -> None:
    check_against_full_decode(demo_tokenizer, data.draw(demo_ids), data.draw(demo_ids), skip)


@pytest.mark.slow
@given(st.data(), st.booleans())
@settings(max_examples=5000, deadline=None)
def test_deltas_joined_are_what_the_ids_add_to_the_prompt_in_thousands(
    demo_tokenizer: Tokenizer, demo_ids: st.SearchStrategy[list[int]], data: st.DataObject, skip: bool
) -> None:
    check_against_full_decode(demo_tokenizer, data.draw(demo_ids), data.draw(demo_ids), skip)
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = id_lists(tokenizer, max_size=80)
        check_against_full_decode(tokenizer, data.draw(ids), data.draw(ids), skip)


@given(st.text(max_size=40), st.text(max_size=10))
@settings(max_examples=200, deadline=None)
def test_text_is_shown_as_soon_as_its_characters_are_complete(text: str, prompt_text: str) -> None:
    prompt, ids = BYTE_LEVEL.encode(prompt_text), BYTE_LEVEL.encode(text)
    detokenizer = Detokenizer(BYTE_LEVEL, prompt, SamplingParams())
    shown = ""
    for i, token_id in enumerate(ids, 1):
        shown += detokenizer.push(token_id, last=i == len(ids)).text
        complete = BYTE_LEVEL.decode(ids[:i], True)
        assert shown == (complete if i == len(ids) else complete.removesuffix("\ufffd"))
    assert shown == text


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("which", ["demo", "byte-level", "byte-fallback"])
def test_case_1_no_delta_holds_part_of_a_character(demo_tokenizer: Tokenizer, which: str, text: str) -> None:
    tokenizer = {"demo": demo_tokenizer, "byte-level": BYTE_LEVEL, "byte-fallback": BYTE_FALLBACK}[which]
    ids = tokenizer.encode(text)
    assert which == "demo" or any("\ufffd" in tokenizer.decode([i], True) for i in ids), "no character is cut"
    for cut in range(len(ids)):  # the prompt, too, may end anywhere
        texts, _ = deltas(tokenizer, ids[:cut], ids[cut:])
        assert not any("\ufffd" in delta for delta in texts)
        assert "".join(texts) == added_text(tokenizer, ids[:cut], ids[cut:])
    assert "".join(deltas(tokenizer, [], ids)[0]) == text


def test_case_1_a_character_of_four_byte_tokens_comes_whole_with_the_fourth() -> None:
    ids = [BYTE_ID[b] for b in "a👋b".encode()]
    assert deltas(BYTE_LEVEL, [], ids)[0] == ["a", "", "", "", "👋", "b"]


@pytest.mark.parametrize("end", ["length", "stop token"])
@pytest.mark.parametrize("prompt", [[], [260, 262]])
def test_case_2_bytes_of_a_character_that_never_ends_are_flushed_once(end: str, prompt: list[int]) -> None:
    eos = BYTE_FALLBACK.encode("</s>")[-1]
    waves = [1 + byte for byte in "👋".encode()[:3]]
    detokenizer = Detokenizer(BYTE_FALLBACK, prompt, SamplingParams())
    if end == "length":
        texts = [detokenizer.push(i, last=n == 3).text for n, i in enumerate(waves, 1)]
    else:
        texts = [detokenizer.push(i).text for i in waves]
        texts.append(detokenizer.push(eos, is_stop_token=True, last=True).text)
    assert texts == [""] * (len(texts) - 1) + ["\ufffd" * 3]


def test_case_2_byte_level_too() -> None:
    eos = BYTE_LEVEL.encode("</s>")[-1]
    detokenizer = Detokenizer(BYTE_LEVEL, [], SamplingParams())
    texts = [detokenizer.push(BYTE_ID[b]).text for b in "é👋".encode()[:5]]
    assert texts == ["", "é", "", "", ""]
    assert detokenizer.push(eos, is_stop_token=True, last=True) == ("\ufffd", None)


def test_a_character_that_the_prompt_began_belongs_to_the_answer_only_if_it_is_finished_there() -> None:
    wave, a = [BYTE_ID[b] for b in "👋".encode()], BYTE_ID[ord("a")]
    for cut in (1, 2, 3):
        assert deltas(BYTE_LEVEL, [a, *wave[:cut]], [*wave[cut:], a])[0] == [""] * (3 - cut) + ["👋", "a"]
        for reached in range(cut, 4):
            texts, _ = deltas(BYTE_LEVEL, [a, *wave[:cut]], [*wave[cut:reached], a])
            assert texts == [""] * (reached - cut) + ["a"]


class TextTokens(Tokenizer):
    """Tokens that are any given strings, to cut a text wherever a test wants."""

    def __init__(self, pieces: Sequence[str]) -> None:
        backend = tokenizers.Tokenizer(
            models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token=pieces[0])
        )
        backend.decoder = decoders.Fuse()
        super().__init__(backend)


PIECES = ["".join(chars) for n in (1, 2, 3) for chars in product("ab ", repeat=n)]
TEXT_TOKENS = TextTokens(PIECES)


def first_stop(text: str, stops: Sequence[str], allowed: Sequence[bool]) -> tuple[int, str] | None:
    """(end, stop string) by trying every end in turn; `allowed[i]`: a stop may be complete with character i."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete and allowed[end - 1]:
            return end, max(complete, key=len)
    return None


@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=12),
    st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3),
    st.booleans(),
    st.integers(0, 8),
)
@settings(max_examples=400, deadline=None)
def test_case_3_and_4_the_text_ends_where_a_search_of_the_whole_text_says(
    pieces: list[str], stops: list[str], include_stop: bool, min_tokens: int
) -> None:
    text = "".join(pieces)
    number = [n for n, piece in enumerate(pieces, 1) for _ in piece]
    found = first_stop(text, stops, [n > min_tokens for n in number])
    ids = [PIECES.index(piece) for piece in pieces]
    texts, stop = deltas(TEXT_TOKENS, [], ids, stop=stops, include_stop=include_stop, min_tokens=min_tokens)
    if found is None:
        assert ("".join(texts), stop) == (text, None)
        assert len(texts) == len(ids)
    else:
        end, expected = found
        assert stop == expected
        assert "".join(texts) == text[: end if include_stop else end - len(expected)]
        assert len(texts) == number[end - 1]  # not a token later
    # Until the end, all is shown but a suffix that could begin a stop string.
    so_far = ""
    for piece, shown in zip(pieces[: len(texts) - 1], range(1, len(texts)), strict=True):
        so_far += piece
        held = max((n for s in stops for n in range(len(s)) if so_far.endswith(s[:n])), default=0)
        assert "".join(texts[:shown]) == so_far[: len(so_far) - held]


@given(
    st.text("ab ", min_size=1, max_size=24), st.lists(st.text("ab ", min_size=1, max_size=5)), st.randoms()
)
@settings(max_examples=200, deadline=None)
def test_case_3_every_cut_into_tokens_gives_the_same_stop(
    text: str, stops: list[str], rng: random.Random
) -> None:
    results = set()
    for _ in range(4):
        ids, at = [], 0
        while at < len(text):
            piece = text[at : at + rng.randint(1, 3)]
            ids.append(PIECES.index(piece))
            at += len(piece)
        texts, stop = deltas(TEXT_TOKENS, [], ids, stop=stops)
        results.add(("".join(texts), stop))
    assert len(results) == 1


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["STOP"], "one STOP two", ("one ", "STOP")),
        ([" STOP"], "one STOP two", ("one", " STOP")),
        (["\n\n", "\n"], "a\n\nb", ("a", "\n")),
        (["user:", "\nuser:"], "yes\nuser: hi", ("yes", "\nuser:")),
        (["quick brown fox jumps", "brown"], "The quick brown fox", ("The quick ", "brown")),
        (["quick brown fox jumps", "green"], "The quick brown fox", ("The quick brown fox", None)),
        (["👋"], "hi é👋 you", ("hi é", "👋")),
        (["</answer>"], "x <answer> y </answer", ("x <answer> y </answer", None)),
    ],
)
def test_case_3_stop_strings_over_several_real_tokens(
    demo_tokenizer: Tokenizer, stops: list[str], text: str, expected: tuple[str, str | None]
) -> None:
    prompt, ids = demo_tokenizer.encode("Q: what?\nA:"), demo_tokenizer.encode(text)
    texts, stop = deltas(demo_tokenizer, prompt, ids, stop=stops)
    assert ("".join(texts), stop) == expected
    with_stop, _ = deltas(demo_tokenizer, prompt, ids, stop=stops, include_stop=True)
    assert "".join(with_stop) == expected[0] + (expected[1] or "")


def test_case_3_a_stop_string_does_not_match_the_prompt(demo_tokenizer: Tokenizer) -> None:
    prompt = demo_tokenizer.encode("say ST")
    texts, stop = deltas(demo_tokenizer, prompt, demo_tokenizer.encode("OP it"), stop=["STOP"])
    assert ("".join(texts), stop) == ("OP it", None)


def test_a_stop_string_in_what_the_last_token_flushes_still_stops() -> None:
    eos = BYTE_FALLBACK.encode("</s>")[-1]
    detokenizer = Detokenizer(BYTE_FALLBACK, [], SamplingParams(stop="👋"))
    texts = [detokenizer.push(i) for i in BYTE_FALLBACK.encode("ab👋")]
    assert all(stop is None for _, stop in texts)
    last = detokenizer.push(eos, is_stop_token=True, last=True)
    assert ("".join(text for text, _ in [*texts, last]), last.stop) == ("ab", "👋")


def test_case_4_a_stop_string_before_min_tokens_is_text(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("one\ntwo\nthree\nfour")
    newlines = [n for n, i in enumerate(ids, 1) if "\n" in demo_tokenizer.decode([i], True)]
    assert len(newlines) == 3
    texts, stop = deltas(demo_tokenizer, [], ids, stop=["\n"], min_tokens=newlines[1] - 1)
    assert ("".join(texts), stop, len(texts)) == ("one\ntwo", "\n", newlines[1])
    texts, stop = deltas(demo_tokenizer, [], ids, stop=["\n"], min_tokens=newlines[1])
    assert ("".join(texts), stop, len(texts)) == ("one\ntwo\nthree", "\n", newlines[2])


def test_case_5_one_token_that_is_the_last_gives_all_its_text(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("STOP")
    texts, stop = deltas(demo_tokenizer, [], ids[:1], stop=["STOP!"])
    assert ("".join(texts), stop) == (demo_tokenizer.decode(ids[:1], True), None)


def test_a_fork_goes_on_by_itself() -> None:
    tokenizer = byte_level()
    params = SamplingParams(stop=("xyz",))
    one = Detokenizer(tokenizer, [BYTE_ID[b] for b in b"abc"], params)
    other = one.fork()
    head, *rest = (BYTE_ID[b] for b in "é".encode())
    assert one.push(head).text == other.push(BYTE_ID[ord("x")]).text == ""
    assert [one.push(i).text for i in rest] == ["é"]
    assert [other.push(BYTE_ID[b]) for b in b"y!"] == [("", None), ("xy!", None)]
    assert [one.push(BYTE_ID[b]).stop for b in b"xyz"] == [None, None, "xyz"]


@pytest.mark.parametrize(
    ("include_stop", "skip_special_tokens", "expected"),
    [(False, True, "hi"), (False, False, "hi"), (True, True, "hi"), (True, False, "hi<|im_end|>")],
)
def test_a_stop_token_has_text_only_with_include_stop(
    demo_tokenizer: Tokenizer, include_stop: bool, skip_special_tokens: bool, expected: str
) -> None:
    params = SamplingParams(include_stop=include_stop, skip_special_tokens=skip_special_tokens)
    detokenizer = Detokenizer(demo_tokenizer, [], params)
    (hi,), (end,) = demo_tokenizer.encode("hi"), demo_tokenizer.encode("<|im_end|>")
    text = detokenizer.push(hi).text + detokenizer.push(end, is_stop_token=True, last=True).text
    assert text == expected


def test_a_stop_token_of_ordinary_text_is_left_out_and_what_was_held_comes_out(
    demo_tokenizer: Tokenizer,
) -> None:
    detokenizer = Detokenizer(demo_tokenizer, [], SamplingParams(stop="Hello World"))
    ids = demo_tokenizer.encode("Hello world")
    assert detokenizer.push(ids[0]).text == ""
    assert detokenizer.push(ids[1], is_stop_token=True, last=True) == ("Hello", None)


@pytest.mark.parametrize("prompt", [[], ["▁"], ["▁a"], ["<s>"], ["▁", "<s>"], ["ab", "</s>", "<s>"]])
@pytest.mark.parametrize("first", ["▁a", "a", "▁▁", "▁", "<s>", "<0x20>"])
def test_leading_spaces_are_those_of_the_decoded_whole(prompt: list[str], first: str) -> None:
    tokens = [*FALLBACK_TOKENS, "<s>", "</s>"]
    before, ids = ([tokens.index(t) for t in part] for part in (prompt, [first, "▁a", "▁a"]))
    assert "".join(deltas(BYTE_FALLBACK, before, ids)[0]) == added_text(BYTE_FALLBACK, before, ids)


class Counting(Tokenizer):
    """Counts the ids that are decoded."""

    num_decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("bytes_", [b"\x80", b"\xf0\x9f", b"\xbf\xbd\xef", b"\xff", b"a", b"\xe2\x82"])
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_cost_per_token_does_not_grow_even_on_endless_invalid_bytes(
    make: Callable[[], Tokenizer], bytes_: bytes
) -> None:
    tokenizer = Counting(make()._backend)
    ids = [BYTE_ID[b] if make is byte_level else 1 + b for b in bytes_] * 2000
    decoder = IncrementalDecoder(tokenizer, ids[:5], skip_special_tokens=True)
    text = "".join(map(decoder.push, ids)) + decoder.flush()
    assert tokenizer.num_decoded <= 16 * len(ids)
    assert text == added_text(make(), ids[:5], ids)


def test_endless_special_tokens_in_the_middle_of_a_character_cost_nothing() -> None:
    tokenizer = Counting(byte_level()._backend)
    begin = tokenizer.encode("<s>")[0]
    decoder = IncrementalDecoder(tokenizer, [], skip_special_tokens=True)
    head, *rest = (BYTE_ID[b] for b in "€".encode())
    assert decoder.push(head) == ""
    before = tokenizer.num_decoded
    assert {decoder.push(begin) for _ in range(1000)} == {""}
    assert tokenizer.num_decoded == before
    assert [decoder.push(i) for i in rest] == ["", "€"]


def test_a_long_prompt_is_not_decoded_whole() -> None:
    tokenizer = Counting(byte_level()._backend)
    IncrementalDecoder(tokenizer, [BYTE_ID[b] for b in b"abc" * 10_000], skip_special_tokens=True)
    assert tokenizer.num_decoded <= 8
