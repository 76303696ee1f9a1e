"""Log-probabilities of the prompt, beside transformers' own, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from motet import AsyncEngine, EngineConfig, InvalidRequest, SamplingParams
from tests.sdk.checks import settled
from tests.sdk.conftest import CONFIG
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.anyio

PROMPT = [3 + (7 * i) % 250 for i in range(50)]
ASKING = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=3)

PromptLogprobs = Sequence[Mapping[int, float] | None] | None


def theirs(model: torch.nn.Module, prompt: list[int], k: int) -> list[dict[int, float] | None]:
    with torch.inference_mode():
        rows = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    expected: list[dict[int, float] | None] = [None]
    for row, token_id in zip(rows, prompt[1:], strict=True):
        chosen = [*row.topk(k).indices.tolist(), token_id]
        expected.append({i: float(row[i]) for i in chosen})
    return expected


def check(ours: PromptLogprobs, expected: list[dict[int, float] | None]) -> None:
    assert ours is not None
    assert ours[0] is None
    assert len(ours) == len(expected)
    for a, b in zip(ours[1:], expected[1:], strict=True):
        assert a == pytest.approx(b, abs=1e-3)


@pytest.fixture
def expected(tiny_model: LlamaForCausalLM) -> list[dict[int, float] | None]:
    return theirs(tiny_model, PROMPT, 3)


async def test_they_are_those_of_transformers(engine: AsyncEngine, tiny_model: LlamaForCausalLM):
    for k in (0, 1, 5, VOCAB_SIZE):
        completion = await engine.generate(PROMPT, ASKING.model_copy(update={"prompt_logprobs": k}))
        check(completion.prompt_logprobs, theirs(tiny_model, PROMPT, k))
    assert (await engine.generate(PROMPT, SamplingParams(max_tokens=1))).prompt_logprobs is None


async def test_under_an_adapter_they_are_those_of_peft(
    engine: AsyncEngine, tiny_folder: Path, adapters: dict[str, Path]
):
    peer = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_folder), adapters["r5"]).eval()
    await engine.load_adapter("a", adapters["r5"])
    completion = await engine.generate(PROMPT, ASKING, adapter="a")
    check(completion.prompt_logprobs, theirs(peer, PROMPT, 3))


async def test_case_6_in_chunks_of_8_a_prompt_of_50_has_the_same(tiny_folder: Path, expected):
    async with AsyncEngine(tiny_folder, CONFIG.model_copy(update={"max_num_batched_tokens": 8})) as engine:
        completion = await engine.generate(PROMPT, ASKING)
        assert len(completion.prompt_logprobs) == 50
        check(completion.prompt_logprobs, expected)


async def test_a_warm_cache_changes_nothing_but_is_not_used(engine: AsyncEngine, expected):
    await engine.generate(PROMPT, SamplingParams(max_tokens=4))
    assert (await engine.generate(PROMPT, SamplingParams(max_tokens=4))).usage.cached_tokens == 48
    completion = await engine.generate(PROMPT, ASKING)
    check(completion.prompt_logprobs, expected)
    assert completion.usage.cached_tokens == 0


async def test_what_they_computed_is_cached_for_others(engine: AsyncEngine):
    await engine.generate(PROMPT, ASKING)
    assert (await engine.generate(PROMPT, SamplingParams(max_tokens=4))).usage.cached_tokens == 48


async def test_n_answers_have_them_once(engine: AsyncEngine, expected):
    params = ASKING.model_copy(update={"n": 3, "temperature": 1.0, "seed": 1, "logprobs": 1})
    completion = await engine.generate(PROMPT, params)
    check(completion.prompt_logprobs, expected)
    plain = await engine.generate(PROMPT, params.model_copy(update={"prompt_logprobs": None}))
    assert [o.token_ids for o in plain.outputs] == [o.token_ids for o in completion.outputs]


async def test_without_an_answer_and_of_one_token(engine: AsyncEngine, expected):
    completion = await engine.generate(PROMPT, ASKING.model_copy(update={"max_tokens": 0}))
    assert completion.token_ids == ()
    check(completion.prompt_logprobs, expected)
    assert (await engine.generate([5], ASKING)).prompt_logprobs == (None,)


async def test_a_stream_has_them_in_its_result(engine: AsyncEngine, expected):
    stream = engine.stream(PROMPT, ASKING)
    assert len([token async for token in stream]) == 4
    check((await stream.result()).prompt_logprobs, expected)


@pytest.mark.parametrize("caching", [True, False])
async def test_case_18_preempted_in_mid_prompt_they_are_the_same(tiny_folder: Path, expected, caching: bool):
    config = EngineConfig(
        kv_cache_bytes=5 * 2 * 2 * 2 * 16 * 4 * 16,
        threads=1,
        max_num_batched_tokens=4,
        enable_prefix_caching=caching,
    )
    async with AsyncEngine(tiny_folder, config) as engine:
        stream = engine.stream(PROMPT, ASKING)
        while not engine.stats().running:
            await engine.abort("nobody")  # comes back after a turn
        urgent = [engine.stream(PROMPT[:40], SamplingParams(max_tokens=8), priority=1) for _ in range(2)]
        for other in urgent:
            await other.result()
        completion = await stream.result()
        assert completion.usage.preemptions > 0
        check(completion.prompt_logprobs, expected)
        await settled(engine)


async def test_more_than_the_vocabulary_holds_is_refused(engine: AsyncEngine):
    with pytest.raises(InvalidRequest, match=f"prompt_logprobs is {VOCAB_SIZE + 1}"):
        engine.stream(PROMPT, ASKING.model_copy(update={"prompt_logprobs": VOCAB_SIZE + 1}))
