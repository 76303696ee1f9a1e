"""Greedy float32 output of every family is transformers' and PEFT's own, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from peft import PeftModel

from motet import AsyncEngine, EngineConfig, SamplingParams
from tests.runtime.models.tiny_models import FAMILIES, make_hf_model, save_folder
from tests.sdk.checks import settled
from tests.sdk.completions import complete, ids
from tests.tiny import greedy, save_adapter

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = [[3 + (i * j + i) % 90 for j in range(2 + 10 * i)] for i in range(5)]
"""2 to 42 tokens; the windows have 9."""


class TinyFamily(NamedTuple):
    name: str
    hf_model: Any
    folder: Path
    answers: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    # Tied, a random model repeats itself: its answers would show little.
    hf_model = make_hf_model(request.param, tie_word_embeddings=False)
    folder = save_folder(hf_model, tmp_path_factory.mktemp(request.param))
    return TinyFamily(
        request.param, hf_model, folder, [greedy(hf_model, prompt, PARAMS.max_tokens) for prompt in PROMPTS]
    )


def test_a_family_answers_as_transformers_does_batched_and_from_the_prefix_cache(family: TinyFamily) -> None:
    config = EngineConfig(block_size=4, kv_cache_bytes=4 << 20, threads=1)
    first, again = complete(family.folder, PROMPTS, config, PARAMS, rounds=2)
    assert ids(first) == ids(again) == family.answers
    assert sum(completion.usage.cached_tokens > 0 for completion in again) >= 4


def test_a_family_answers_as_transformers_does_in_chunks_of_7(family: TinyFamily) -> None:
    config = EngineConfig(max_num_batched_tokens=7, max_num_seqs=3, kv_cache_bytes=4 << 20, threads=1)
    (done,) = complete(family.folder, PROMPTS, config, PARAMS)
    assert ids(done) == family.answers


def test_a_family_answers_as_transformers_does_preempted(family: TinyFamily) -> None:
    head_dim = getattr(family.hf_model.config, "head_dim", 12)
    block_bytes = 2 * 2 * 2 * head_dim * 4 * 4
    config = EngineConfig(
        block_size=4, kv_cache_bytes=16 * block_bytes, enable_prefix_caching=False, threads=1
    )
    (done,) = complete(family.folder, PROMPTS, config, PARAMS)
    assert ids(done) == family.answers
    assert max(completion.usage.preemptions for completion in done) >= 1


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_a_family_s_adapters_answer_as_with_peft_beside_each_other_and_the_base(
    family: TinyFamily, tmp_path: Path
) -> None:
    attention = {"phi3": ("qkv_proj", "o_proj")}.get(family.name, ("q_proj", "k_proj", "v_proj", "o_proj"))
    mlp = {"phi3": ("gate_up_proj", "down_proj")}.get(family.name, ("gate_proj", "up_proj", "down_proj"))
    folders = {
        "all": save_adapter(
            family.hf_model,
            tmp_path / "all",
            rank=8,
            targets=(*attention, *mlp, "embed_tokens"),
            strength=2.0,
        ),
        "attention": save_adapter(
            family.hf_model, tmp_path / "attention", rank=3, targets=attention, seed=1, strength=2.0
        ),
    }
    expected: dict[tuple[str | None, int], list[int]] = {(None, i): family.answers[i] for i in (0, 2, 4)}
    for name, folder in folders.items():
        peft_model = PeftModel.from_pretrained(family.hf_model, folder).eval()
        for i in (0, 2, 4):
            expected[name, i] = greedy(peft_model, PROMPTS[i], PARAMS.max_tokens)
            assert expected[name, i] != family.answers[i]
        peft_model.unload()

    async def run() -> dict[tuple[str | None, int], list[int]]:
        done: dict[tuple[str | None, int], list[int]] = {}
        config = EngineConfig(block_size=4, kv_cache_bytes=8 << 20, max_num_batched_tokens=40, threads=1)
        async with AsyncEngine(family.folder, config) as engine:
            for name, folder in folders.items():
                await engine.load_adapter(name, folder)

            async def one(name: str | None, i: int) -> None:
                completion = await engine.generate(PROMPTS[i], PARAMS, adapter=name)
                done[name, i] = list(completion.token_ids)

            async with anyio.create_task_group() as group:
                for name, i in expected:
                    group.start_soon(one, name, i)
            await settled(engine)
        return done

    assert anyio.run(run) == expected
