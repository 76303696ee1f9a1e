"""Engines over models that motet does not know: plug-ins, run as transformers and PEFT run the same weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedModel

from motet import AsyncEngine, EngineConfig, SamplingParams, register_model
from motet.runtime.models import plugins
from tests.sdk.checks import settled
from tests.tiny import greedy, save_adapter, save_tiny_model, tiny_config, tiny_tokenizer

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_model_plugin"
PROMPT = [3 + (7 * i) % 250 for i in range(40)]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
SMALL = EngineConfig(max_num_batched_tokens=16, kv_cache_bytes=1 << 20)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A folder with a tiny random Granite whose every multiplier matters."""
    folder = tmp_path_factory.mktemp("granite")
    torch.manual_seed(0)
    shape = tiny_config().to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    scales = {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7}
    config = GraniteConfig(
        **{key: shape[key] for key in keys},
        **scales,
        num_key_value_heads=2,
        initializer_range=0.3,
        logits_scaling=2.0,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = GraniteForCausalLM(config).eval()
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder, model


async def answers_of(folder: Path, adapter: Path | None = None) -> list[list[int]]:
    async with AsyncEngine(folder, SMALL) as engine:
        answers = [(await engine.generate(PROMPT, PARAMS)).token_ids]
        if adapter is not None:
            await engine.load_adapter("a", adapter)
            answers.append((await engine.generate(PROMPT, PARAMS, adapter="a")).token_ids)
        await settled(engine)
    return [list(answer) for answer in answers]


async def test_an_installed_plug_in_runs_in_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "plugin_package")
    model = save_tiny_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OwnForCausalLM"))
    assert await answers_of(tmp_path) == [greedy(model, PROMPT, 16)]


async def test_the_plug_in_of_the_examples_answers_as_transformers_and_peft_do(
    granite: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    entry = re.search(r"^GraniteForCausalLM = .*$", (EXAMPLE / "pyproject.toml").read_text(), re.MULTILINE)
    assert entry is not None
    info = tmp_path / "motet_granite-0.1.0.dist-info"  # what pip makes of the example's pyproject.toml
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: motet-granite\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[motet.models]\n" + entry[0].replace('"', "") + "\n")
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    folder, model = granite
    adapter = save_adapter(model, tmp_path / "adapter", strength=2.0)
    base = GraniteForCausalLM.from_pretrained(folder).eval()
    adapted = greedy(PeftModel.from_pretrained(base, adapter).eval(), PROMPT, 16)
    expected = [greedy(model, PROMPT, 16), adapted]
    assert expected[0] != expected[1]
    assert await answers_of(folder, adapter) == expected


async def test_a_class_registered_by_the_application_runs_in_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from motet.runtime.models.decoder import Decoder

    monkeypatch.setattr(plugins, "_registered", {})
    register_model("MyLlamaForCausalLM", Decoder)
    model = save_tiny_model(tmp_path, seed=5)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MyLlamaForCausalLM"))
    assert await answers_of(tmp_path) == [greedy(model, PROMPT, 16)]
