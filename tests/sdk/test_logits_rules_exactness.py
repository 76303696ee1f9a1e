"""Penalties, biases, bans and processors on a real engine: transformers' answers, whatever happens around them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from motet import AsyncEngine, Completion, EngineConfig, InvalidRequest, RequestFailed, SamplingParams
from tests.sdk.checks import settled
from tests.tiny import VOCAB_SIZE, greedy, tiny_tokenizer

NUM_TOKENS = 60
PROMPTS = [[3 + (i * j + i) % 250 for j in range(1, 4 + 5 * i)] for i in range(8)]
LETTERS = tuple(tiny_tokenizer().token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz")
OTHERS = [token_id for token_id in range(VOCAB_SIZE) if token_id not in LETTERS]


class Penalties(LogitsProcessor):
    """OpenAI's formula, over the output alone."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.prompt_length :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


class OnlyEven:
    """An application's own processor: even ids at even places, odd ids at odd ones."""

    def __call__(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        logits[(len(token_ids) + 1) % 2 :: 2] = -math.inf
        return logits


class TheirOnlyEven(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return OnlyEven()(input_ids[0], scores[0].clone())[None]


@pytest.fixture(scope="module")
def cases(tiny_model: LlamaForCausalLM) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """(prompt, params, transformers' answer): every rule alone and all together, a plain request among them."""
    tokenizer = tiny_tokenizer()
    letters = greedy(tiny_model, PROMPTS[2], NUM_TOKENS, suppress_tokens=OTHERS)
    words = [tokenizer.decode(letters[k : k + size]) for k, size in ((1, 3), (7, 2), (12, 1), (20, 4))]
    ids = [tokenizer.encode(text).ids for word in words for text in (word, " " + word)]
    bias = {int(token): 4.0 for token in PROMPTS[3][:5]} | {7: -100.0}
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.75}
    theirs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        (
            {"allowed_token_ids": LETTERS, "bad_words": words},
            {"suppress_tokens": OTHERS, "bad_words_ids": ids},
        ),
        ({"logit_bias": bias}, {"sequence_bias": {(token,): added for token, added in bias.items()}}),
        (penalties, {"logits_processor": LogitsProcessorList([Penalties(len(PROMPTS[4]), 1.5, 0.75)])}),
        ({"logits_processors": OnlyEven()}, {"logits_processor": LogitsProcessorList([TheirOnlyEven()])}),
        (
            {"repetition_penalty": 0.8, "bad_words": ["a"]},
            {"repetition_penalty": 0.8, "bad_words_ids": [list(LETTERS[:1])]},
        ),
        (
            {
                "repetition_penalty": 1.2,
                "allowed_token_ids": LETTERS,
                "bad_words": words,
                "logits_processors": OnlyEven(),
            },
            {
                "repetition_penalty": 1.2,
                "suppress_tokens": OTHERS,
                "bad_words_ids": ids,
                "logits_processor": LogitsProcessorList([TheirOnlyEven()]),
            },
        ),
    ]
    made = []
    for prompt, (ours, options) in zip(PROMPTS, theirs, strict=True):
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, **ours)
        made.append((prompt, params, greedy(tiny_model, prompt, NUM_TOKENS, **options)))
    return made


async def answers(
    engine: AsyncEngine, cases: list[tuple[list[int], SamplingParams, list[int]]]
) -> list[Completion]:
    prompts, params = [prompt for prompt, _, _ in cases], [p for _, p, _ in cases]
    done = await engine.generate_batch(prompts, params)
    await settled(engine)
    for completion in done:
        if isinstance(completion, Exception):
            raise completion
    return [completion for completion in done if isinstance(completion, Completion)]


def test_the_rules_matter(
    cases: list[tuple[list[int], SamplingParams, list[int]]], tiny_model: LlamaForCausalLM
):
    changed = [answer != greedy(tiny_model, prompt, NUM_TOKENS) for prompt, _, answer in cases]
    assert sum(changed) >= 6 and not changed[0], changed


@pytest.mark.anyio
async def test_answers_with_every_rule_are_those_of_transformers_alone_together_and_again(
    engine: AsyncEngine, cases: list[tuple[list[int], SamplingParams, list[int]]]
):
    for prompt, params, answer in cases:
        assert list((await engine.generate(prompt, params)).token_ids) == answer
    again = await answers(engine, cases)
    assert [list(completion.token_ids) for completion in again] == [answer for _, _, answer in cases]
    assert all(completion.usage.cached_tokens > 0 for completion in again[4:])


@pytest.mark.parametrize("caching", [True, False])
def test_case_18_preempted_again_and_again_penalties_and_logprobs_stay_the_same(
    tiny_folder: Path,
    tiny_model: LlamaForCausalLM,
    cases: list[tuple[list[int], SamplingParams, list[int]]],
    caching: bool,
):
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4
    tight = EngineConfig(
        block_size=4,
        kv_cache_bytes=26 * block_bytes,
        max_num_batched_tokens=24,
        enable_prefix_caching=caching,
        threads=1,
    )

    async def run() -> list[Completion]:
        async with AsyncEngine(tiny_folder, tight) as engine:
            return await answers(engine, cases * 2)

    done = anyio.run(run)
    assert max(completion.usage.preemptions for completion in done) >= 3
    for completion, (prompt, _, answer) in zip(done, cases * 2, strict=True):
        assert list(completion.token_ids) == answer
        with torch.inference_mode():
            logits = tiny_model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs = completion.outputs[0].logprobs
        assert logprobs is not None
        for row, top, token_id in zip(logits.log_softmax(-1), logprobs, answer, strict=True):
            likeliest = {int(i): float(row[i]) for i in [*row.topk(2).indices, token_id]}
            assert top == pytest.approx(likeliest, abs=1e-4), "the model's own, before all rules"


@pytest.mark.anyio
@pytest.mark.parametrize("asked", [None, 1.0, 1.7])
async def test_the_models_own_repetition_penalty_holds_unless_another_is_asked_for(
    tiny_folder: Path, tmp_path: Path, tiny_model: LlamaForCausalLM, asked: float | None
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.3}))
    params = SamplingParams(max_tokens=20, ignore_eos=True, repetition_penalty=asked)
    async with AsyncEngine(folder, EngineConfig(kv_cache_bytes=1 << 20, threads=1)) as engine:
        done = await engine.generate(PROMPTS[4], params)
    assert list(done.token_ids) == greedy(tiny_model, PROMPTS[4], 20, repetition_penalty=asked or 1.3)


@pytest.mark.anyio
async def test_a_seeded_sample_with_rules_is_the_same_alone_and_in_company(
    engine: AsyncEngine, cases: list[tuple[list[int], SamplingParams, list[int]]]
):
    drawn = [
        (prompt, params.model_copy(update={"temperature": 1.0, "top_p": 0.9, "seed": 5}), answer)
        for prompt, params, answer in cases
    ]
    together = await answers(engine, drawn)
    for completion, case in zip(together, drawn, strict=True):
        (alone,) = await answers(engine, [case])
        assert alone.token_ids == completion.token_ids
    assert set(together[2].token_ids) <= set(LETTERS)


@pytest.mark.anyio
async def test_case_24_a_processor_that_fails_in_mid_stream_ends_its_stream_alone(
    engine: AsyncEngine, cases: list[tuple[list[int], SamplingParams, list[int]]]
):
    calls = 0

    def fail_at_the_third(token_ids: Tensor, logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return logits if calls < 3 else logits[:5]

    failing = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logits_processors=fail_at_the_third)
    prompts, params = [case[0] for case in cases], [case[1] for case in cases]
    *others, failed = await engine.generate_batch([*prompts, [5, 6]], [*params, failing])
    assert [list(completion.token_ids) for completion in others] == [answer for _, _, answer in cases]
    assert isinstance(failed, RequestFailed)
    assert "fail_at_the_third" in str(failed) and "shape [5]" in str(failed)
    stream = engine.stream([5, 6], failing)
    with pytest.raises(RequestFailed, match=r"logits_processors\[0\]"):
        await stream.result()
    calls = 0
    stream = engine.stream([5, 6], failing)
    assert len([await anext(stream), await anext(stream)]) == 2, "what came before is not lost"
    with pytest.raises(RequestFailed, match=r"logits_processors\[0\]"):
        await anext(stream)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"logit_bias": {5: 1.0, VOCAB_SIZE: 1.0}},
            f"logit_bias: token id {VOCAB_SIZE} is outside the vocabulary",
        ),
        ({"allowed_token_ids": [VOCAB_SIZE]}, f"allowed_token_ids: token id {VOCAB_SIZE} is outside"),
        ({"allowed_token_ids": []}, "no token is left to choose"),
        ({"allowed_token_ids": [1], "min_tokens": 1}, "no token is left to choose"),
    ],
    ids=str,
)
async def test_case_27_what_can_be_known_at_once_is_refused_at_once(
    engine: AsyncEngine, wrong: dict[str, Any], message: str
):
    with pytest.raises(InvalidRequest, match=message):
        engine.stream("hello", SamplingParams(**wrong))


@pytest.mark.anyio
@pytest.mark.parametrize("prompt", ["hello", [5, 6]], ids=["text", "ids"])
async def test_case_27_what_the_tokenizer_must_tell_is_refused_by_the_first_token(
    engine: AsyncEngine, prompt: str | list[int]
):
    params = SamplingParams(allowed_token_ids=LETTERS[:2], bad_words=["a", "b"])
    stream = engine.stream(prompt, params)
    with pytest.raises(InvalidRequest, match="no token is left to choose"):
        await anext(stream)
    fine = await engine.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(fine.token_ids) == 3


@pytest.mark.anyio
async def test_case_27_bans_that_leave_nothing_only_in_mid_answer_end_that_request(engine: AsyncEngine):
    """No single word forbids the letter, but behind itself it is forbidden."""
    params = SamplingParams(max_tokens=5, ignore_eos=True, allowed_token_ids=LETTERS[0], bad_words="aa")
    stream = engine.stream([5, 6], params)
    assert (await anext(stream)).text == "a"
    with pytest.raises(RequestFailed, match="no token is left to choose"):
        await anext(stream)


@pytest.mark.anyio
async def test_a_word_that_the_prompt_began_is_not_completed(engine: AsyncEngine):
    ab = list(LETTERS[:2])
    free = SamplingParams(max_tokens=1, allowed_token_ids=ab, logit_bias={ab[1]: 100.0})
    assert (await engine.generate("xa", free)).text == "b"
    forbidden = free.model_copy(update={"bad_words": ("ab",)})
    assert (await engine.generate("xa", forbidden)).text == "a"
