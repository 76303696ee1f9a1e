"""Every PEFT feature that motet computes, all in one mixed batch, beside PEFT's own logits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaForCausalLM

from motet.config import EngineConfig
from motet.params import SamplingParams
from motet.runtime.build import Runtime, build_runtime
from motet.runtime.request import Request
from tests.tiny import save_tiny_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# By name; {} of a LoraConfig's arguments.
PLAIN: dict[str, dict[str, Any]] = {
    "only q": {"target_modules": ["q_proj"], "r": 4},
    "rslora": {"target_modules": ALL, "use_rslora": True, "lora_alpha": 4},
    "patterns": {
        "target_modules": ALL,
        "r": 6,
        "lora_alpha": 9,
        # The first that fits wins, in the order of the file, which PEFT sorts.
        "rank_pattern": {".*1.mlp.down_proj": 3, ".*mlp.*": 12, "^model.layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {".*.v_proj": 1, r".*[01]\.self_attn\..*": 30, "up_proj": 2.5},
    },
    "rslora with patterns": {
        "target_modules": ALL,
        "use_rslora": True,
        "rank_pattern": {"[qv]_proj": 2, "k_proj|mlp.*": 4},
        "alpha_pattern": {"q_proj": 3},
    },
    "all-linear": {"target_modules": "all-linear"},
    "expression": {"target_modules": r".*\.1\.(self_attn|mlp)\.(q|up|down)_proj"},
    "excluded": {"target_modules": ALL, "exclude_modules": ["k_proj", "layers.0.mlp.up_proj"]},
    "excluded by expression": {"target_modules": ALL, "exclude_modules": r".*\.0\.self_attn\..*"},
    "layers": {"target_modules": ALL, "layers_to_transform": [1]},
    "layers of a list": {
        "target_modules": ["o_proj"],
        "layers_to_transform": 0,
        "layers_pattern": ["h", "layers"],
    },
    "rank 256": {"target_modules": ["down_proj"], "r": 256, "lora_alpha": 2048},
    "lora_bias": {"target_modules": ALL, "lora_bias": True},
    "DoRA": {"target_modules": ALL, "use_dora": True},
    "DoRA with patterns": {
        "target_modules": ["k_proj", "up_proj"],
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"k_proj": 3},
    },
    "MiCA": {"target_modules": ["q_proj"], "init_lora_weights": "mica"},
    "output head": {"target_modules": [*ALL, "lm_head"]},
    "output head alone": {"target_modules": ["lm_head"], "r": 2},
    "output head with DoRA": {"target_modules": ["lm_head"], "use_dora": True},
    "output head with a bias": {"target_modules": ["lm_head"], "lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens"], "r": 3},
    "embedding and all": {
        "target_modules": ["embed_tokens", "lm_head", *ALL],
        "rank_pattern": {"embed_tokens": 5},
    },
    "bias=all": {"target_modules": ["q_proj", "down_proj"], "bias": "all"},
    "bias=lora_only": {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
    "DoRA with bias=all": {"target_modules": ["v_proj", "gate_proj"], "use_dora": True, "bias": "all"},
}

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
}


def save_strong(base: LlamaForCausalLM, folder: Path, seed: int, arguments: Mapping[str, Any]) -> Path:
    """Saves an adapter whose every trained parameter is random and strong."""
    config = LoraConfig(task_type="CAUSAL_LM", **arguments)
    model = get_peft_model(copy.deepcopy(base), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                if "magnitude" in name:
                    parameter *= 1 + 0.5 * noise
                else:
                    parameter.copy_(noise * (0.5 if noise.ndim == 1 else 1 / min(noise.shape) ** 0.5 / 2))
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def peft_logits(base: LlamaForCausalLM, folder: Path | None, ids: list[int], last: int) -> Tensor:
    model = copy.deepcopy(base)
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder)
    return model.eval()(torch.tensor([ids])).logits[0, -last:]


def mixed_logits(
    runtime: Runtime, names: list[str | None], steps: list[dict[int, Tensor]]
) -> list[tuple[Request, Tensor]]:
    """Each request with its logits of four steps, all requests side by side in each."""
    requests = []
    for row, name in enumerate(names):
        request = runtime.intake.make_request(
            SamplingParams(max_tokens=4, ignore_eos=True, temperature=0),
            tenant="t",
            adapter=None if name is None else runtime.adapters.acquire(name),
            priority=0,
            deadline=None,
        )
        request.set_prompt([3 + (7 * i * (row + 1)) % 250 for i in range(5 + row)], None)
        runtime.core.scheduler.add(request)
        requests.append(request)
    while runtime.core.has_work:
        runtime.core.step()
    assert [len(step) for step in steps] == [len(names)] * 4
    return [(request, torch.stack([step[request.request_id] for step in steps])) for request in requests]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_case_14_every_feature_in_one_batch_has_pefts_logits(
    kind: str, tmp_path: Path, logits_of_steps: list[dict[int, Tensor]]
) -> None:
    save_tiny_model(tmp_path / "model", **MODELS[kind])
    base = LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
    base.save_pretrained(tmp_path / "model")
    folders: dict[str | None, Path | None] = {None: None}
    for seed, (name, arguments) in enumerate(PLAIN.items()):
        folders[name] = save_strong(base, tmp_path / name, seed, arguments)
    config = EngineConfig(kv_cache_bytes=8 << 20, max_num_batched_tokens=2048)
    runtime = build_runtime(tmp_path / "model", config, lambda _: None)
    for name, folder in folders.items():
        if name is not None and folder is not None:
            runtime.adapter_loader.load(name, folder)
    runtime.adapter_loader.run_jobs()
    runtime.adapters.check_integrity()
    wrong = {}
    for request, ours in mixed_logits(runtime, list(folders), logits_of_steps):
        name = None if request.adapter is None else request.adapter.name
        ids = request.token_ids
        theirs = peft_logits(base, folders[name], ids[:-1], 4)
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        if not error <= 1e-4:
            wrong[name] = error
        if name is not None:
            plain = peft_logits(base, None, ids[:-1], 4)
            assert (plain - theirs).abs().max() > 1e-2 * theirs.abs().max(), f"{name} changes nothing"
    assert not wrong
