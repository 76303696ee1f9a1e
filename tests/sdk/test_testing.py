"""What we give applications for their tests: real enough for transformers and PEFT to agree about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM

from motet import AsyncEngine, SamplingParams
from motet.sdk.testing import save_tiny_adapter, save_tiny_model, tiny_model
from tests.sdk.conftest import CONFIG
from tests.tiny import greedy


@pytest.mark.anyio
async def test_an_engine_runs_the_tiny_model_and_its_adapters_as_their_own_libraries_do(tmp_path: Path):
    prompt = [5, 6, 7, 8, 9, 10, 11]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    adapter = save_tiny_adapter(tmp_path / "adapter", rank=5)
    with tiny_model() as folder:
        base = LlamaForCausalLM.from_pretrained(folder).eval()
        expected = [greedy(base, prompt, 12)]
        expected.append(greedy(PeftModel.from_pretrained(base, adapter), prompt, 12))
        async with AsyncEngine(folder, CONFIG) as engine:
            await engine.load_adapter("a", adapter)
            ours = [
                list((await engine.generate(prompt, params, adapter=name)).token_ids) for name in (None, "a")
            ]
            chat = await engine.chat([{"role": "user", "content": "é"}], params).result()
        theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
            [{"role": "user", "content": "é"}], add_generation_prompt=True, return_dict=False
        )
    assert ours == expected and expected[0] != expected[1]
    assert list(chat.prompt_token_ids) == theirs
    assert not folder.exists()


def test_a_seed_makes_the_same_model_and_adapter_again_and_another_seed_others(tmp_path: Path):
    def content(folder: Path, name: str) -> bytes:
        return (folder / name).read_bytes()

    models = [save_tiny_model(tmp_path / f"m{i}", seed=seed) for i, seed in enumerate([0, 0, 1])]
    weights = [content(folder, "model.safetensors") for folder in models]
    assert weights[0] == weights[1] != weights[2]
    adapters = [save_tiny_adapter(tmp_path / f"a{i}", seed=seed) for i, seed in enumerate([0, 0, 1])]
    weights = [content(folder, "adapter_model.safetensors") for folder in adapters]
    assert weights[0] == weights[1] != weights[2]


def test_it_is_made_in_a_moment_without_torch_or_transformers(tmp_path: Path):
    script = f"""
import sys, time
start = time.process_time()
from motet.sdk.testing import save_tiny_adapter, save_tiny_model
save_tiny_model({str(tmp_path / "model")!r})
save_tiny_adapter({str(tmp_path / "adapter")!r})
print(time.process_time() - start, *{{"torch", "transformers", "peft"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.0, "seconds, and no library that is named"
