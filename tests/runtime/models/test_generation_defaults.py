from __future__ import annotations

import logging
from typing import Any

import pytest
from transformers import GenerationConfig

from motet.errors import CorruptCheckpoint
from motet.runtime.models.generation_defaults import (
    GenerationDefaults,
    read_eos_token_ids,
    read_generation_defaults,
)


def test_no_generation_config_means_greedy() -> None:
    defaults = read_generation_defaults({})
    assert defaults == GenerationDefaults()
    assert not defaults.do_sample
    assert defaults.temperature is defaults.top_p is defaults.top_k is defaults.min_p is None
    assert defaults.repetition_penalty is None


def test_what_transformers_writes_is_read_back() -> None:
    written = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05
    ).to_diff_dict()
    assert read_generation_defaults(written) == GenerationDefaults(
        do_sample=True, temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05
    )


def test_null_and_integer_values_are_understood() -> None:
    defaults = read_generation_defaults({"temperature": 1, "top_p": None, "top_k": 0})
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (1.0, None, 0)


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1}, {"top_p": 2.0}, {"top_k": "many"}, {"do_sample": "yes"}, {"repetition_penalty": 0}],
)
def test_a_value_out_of_its_range_is_corrupt(bad: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match=next(iter(bad))):
        read_generation_defaults(bad)


def test_what_is_not_applied_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "motet"):
        read_generation_defaults({"no_repeat_ngram_size": 0, "bad_words_ids": None})
        assert not caplog.records
        read_generation_defaults({"no_repeat_ngram_size": 3, "bad_words_ids": [[5]]})
    assert "no_repeat_ngram_size=3" in caplog.text and "bad_words_ids=[[5]]" in caplog.text


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({}, {}, ()),
        ({}, {"eos_token_id": None}, ()),
        ({}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [7, 5]}, {"eos_token_id": 5}, (7, 5)),
        ({"eos_token_id": 5}, {"eos_token_id": [3, 5]}, (5, 3)),
    ],
)
def test_case_29_end_tokens_are_those_of_both_files_lists_included(
    generation_config: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert read_eos_token_ids(generation_config, config) == expected


def test_an_end_token_that_is_no_id_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpoint, match="eos_token_id"):
        read_eos_token_ids({}, {"eos_token_id": ["</s>"]})
