"""The tensor side on a real tiny model: mixed adapters beside PEFT's own logits, and plans in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import LlamaForCausalLM

from motet.config import EngineConfig
from motet.params import SamplingParams
from motet.runtime.build import Runtime, build_runtime
from motet.runtime.request import Request
from tests.tiny import greedy

PROMPTS = [[3 + (7 * i * (row + 1)) % 250 for i in range(20 + row)] for row in range(7)]


@pytest.fixture
def released() -> list[Request]:
    return []


def make_runtime(folder: Path, released: list[Request], depth: int, **config: object) -> Runtime:
    settings = EngineConfig(kv_cache_bytes=4 << 20, max_num_batched_tokens=512).model_copy(update=config)
    return build_runtime(folder, settings, released.append, depth=depth)


def add(
    runtime: Runtime, prompt: list[int], num_tokens: int, adapter: str | None = None, **params: Any
) -> Request:
    request = runtime.intake.make_request(
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params),
        tenant="t",
        adapter=runtime.adapters.acquire(adapter) if adapter is not None else None,
        priority=0,
        deadline=None,
    )
    request.set_prompt(prompt, None)
    runtime.core.scheduler.add(request)
    return request


def run(runtime: Runtime) -> None:
    while runtime.core.has_work:
        runtime.core.step()
        runtime.core.scheduler.check_integrity()


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


def test_case_13_a_batch_of_base_and_six_ranks_has_pefts_logits_in_each_row(
    tiny_folder: Path,
    adapters: dict[str, Path],
    released: list[Request],
    logits_of_steps: list[dict[int, Tensor]],
):
    runtime = make_runtime(tiny_folder, released, depth=1)
    for name, folder in adapters.items():
        runtime.adapter_loader.load(name, folder)
    runtime.adapter_loader.run_jobs()
    names = [None, *adapters]
    requests = [add(runtime, prompt, 4, name) for prompt, name in zip(PROMPTS, names, strict=True)]
    run(runtime)
    assert [len(step) for step in logits_of_steps] == [7] * 4, "all seven rows share each step"
    for request, name in zip(requests, names, strict=True):
        peer = LlamaForCausalLM.from_pretrained(tiny_folder).eval()
        if name is not None:
            peer = PeftModel.from_pretrained(peer, adapters[name]).eval()
        with torch.inference_mode():
            theirs = peer(torch.tensor([request.token_ids])).logits[0]
        for step, logits in enumerate(logits_of_steps):
            ours = logits[request.request_id]
            assert close(ours, theirs[request.num_prompt_tokens - 1 + step]), (name, step)
    assert released == requests


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_in_flight_give_the_same_tokens(
    tiny_folder: Path, tiny_model: LlamaForCausalLM, released: list[Request], depth: int
):
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4
    runtime = make_runtime(
        tiny_folder, released, depth, block_size=4, kv_cache_bytes=24 * block_bytes, max_num_batched_tokens=16
    )
    requests = [add(runtime, prompt, 30) for prompt in PROMPTS]
    run(runtime)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.token_ids[request.num_prompt_tokens :] == greedy(tiny_model, prompt, 30)
    assert sum(request.num_preemptions for request in requests) > 0
    assert len(released) == 7
    assert runtime.core.scheduler.kv.pool.num_free == 24
    assert not runtime.core._runner._batches._rows.keys() - set(runtime.core.scheduler._dropped)


@pytest.mark.parametrize("depth", [1, 2])
def test_case_18_penalties_see_every_token_preempted_and_with_plans_in_flight(
    tiny_folder: Path, tiny_model: LlamaForCausalLM, released: list[Request], depth: int
):
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4
    runtime = make_runtime(
        tiny_folder, released, depth, block_size=4, kv_cache_bytes=16 * block_bytes, max_num_batched_tokens=16
    )
    penalties = [1.0, 1.3, 0.8] * 4
    prompts = [*PROMPTS, *(prompt[3:] for prompt in PROMPTS[:5])]
    requests = [
        add(runtime, prompt, 36, repetition_penalty=penalty)
        for prompt, penalty in zip(prompts, penalties, strict=True)
    ]
    for request in requests[1::3]:
        word = tuple(greedy(tiny_model, request.token_ids, 2, repetition_penalty=1.3))
        request.sampling = runtime.intake.forbid(request.sampling, (word,))
    run(runtime)
    for request, prompt, penalty in zip(requests, prompts, penalties, strict=True):
        rules = request.sampling.rules
        words = [list(word) for word in rules.bad_words] if rules is not None else []
        expected = greedy(tiny_model, prompt, 36, repetition_penalty=penalty, bad_words_ids=words or None)
        assert request.token_ids[len(prompt) :] == expected
    assert sum(request.num_preemptions > 0 for request in requests if request.sampling.rules is not None) >= 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_siblings_of_a_copied_block_say_what_transformers_says(
    tiny_folder: Path, tiny_model: LlamaForCausalLM, released: list[Request], depth: int, caching: bool
):
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4
    runtime = make_runtime(
        tiny_folder,
        released,
        depth,
        block_size=4,
        kv_cache_bytes=40 * block_bytes,
        max_num_batched_tokens=16,
        enable_prefix_caching=caching,
    )
    groups = [add(runtime, prompt, 12, n=3, prompt_logprobs=0) for prompt in PROMPTS[:4]]
    everyone: dict[int, Request] = {}
    num_copies = 0
    while runtime.core.has_work:
        runtime.core.step()
        everyone |= {request.request_id: request for request in runtime.core.scheduler.requests}
        num_copies += len(runtime.core.last_plan.copies)
        runtime.core.scheduler.check_integrity()
    assert num_copies >= 2 * sum(len(prompt) % 4 != 1 for prompt in PROMPTS[:4]) > 0
    for group, prompt in zip(groups, PROMPTS[:4], strict=True):
        outputs = [request for request in everyone.values() if request.group_id == group.request_id]
        assert len(outputs) == 3
        for request in outputs:
            assert request.token_ids[len(prompt) :] == greedy(tiny_model, prompt, 12)
        with torch.inference_mode():
            rows = tiny_model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for i, token_id in enumerate(prompt[1:], 1):
            assert group.prompt_logprobs[i] == pytest.approx(
                {token_id: float(rows[i - 1, token_id])}, abs=1e-3
            )
    assert len(released) == 4
