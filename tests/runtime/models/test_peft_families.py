"""Adapters on every family of models beside PEFT's own logits: fused projections, norms, scaled embeddings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import FAMILIES, float32_ops, make_hf_model, make_ids, motet_logits, save_folder

from motet.errors import UnsupportedAdapter
from motet.lora.adapter import read_adapter
from motet.lora.arena import AdapterArena
from motet.lora.batch import LoRABatch
from motet.runtime.models.loader import load_model

FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save_strong(base: Any, folder: Path, **arguments: Any) -> PeftModel:
    """Saves a random adapter of a copy of `base`; returns PEFT's model with it."""
    model = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **arguments)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter * (1 + noise / 2) if "magnitude" in name else noise * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_14_an_adapter_of_every_module_has_pefts_logits(family: str, dora: bool, tmp_path: Path) -> None:
    base = make_hf_model(family)
    linears = FUSED if family == "phi3" else ["[qkvo]_proj", "(gate|up|down)_proj"]
    names = "|".join([*linears, "lm_head", *([] if dora else ["embed_tokens"])])
    peer = save_strong(base, tmp_path / "adapter", target_modules=rf"(.*\.)?({names})", r=4, use_dora=dora)
    ops = float32_ops()
    model = load_model(save_folder(base, tmp_path / "model"), ops).model
    arena = AdapterArena(model.lora_sites, ops.new_adapter_memory(1 << 20))
    slot = arena.place(arena.pack(read_adapter(tmp_path / "adapter", model.lora_sites)))
    acts = arena.acts([slot])
    assert all(acts[site.index] for site in model.lora_sites if not dora or site.role == "layer")
    ids = make_ids(20)
    with torch.inference_mode():
        theirs = peer(ids[None]).logits[0]
    ours = motet_logits(model, ops, ids, range(20), lora=LoRABatch(ops, arena, [slot] * 20))
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert (motet_logits(model, ops, ids, range(20)) - theirs).abs().max() > 1e-2 * theirs.abs().max()


def test_separate_projections_are_refused_where_the_model_has_them_fused(tmp_path: Path) -> None:
    save_strong(make_hf_model("llama"), tmp_path / "adapter", target_modules=["q_proj"])
    model = load_model(save_folder(make_hf_model("phi3"), tmp_path / "model"), float32_ops()).model
    with pytest.raises(UnsupportedAdapter, match="adapts q_proj, where this model has qkv_proj"):
        read_adapter(tmp_path / "adapter", model.lora_sites)


def test_fused_projections_are_refused_where_the_model_has_them_separate(tmp_path: Path) -> None:
    save_strong(make_hf_model("phi3"), tmp_path / "adapter", target_modules=["gate_up_proj"])
    model = load_model(save_folder(make_hf_model("llama"), tmp_path / "model"), float32_ops()).model
    with pytest.raises(
        UnsupportedAdapter, match="adapts gate_up_proj, where this model has gate_proj, up_proj"
    ):
        read_adapter(tmp_path / "adapter", model.lora_sites)


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ({"target_modules": ["embed_tokens"], "use_dora": True}, "use_dora of an embedding"),
        (
            {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
            "ensure_weight_tying of an embedding",
        ),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save.*lm_head"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1]}, "trainable_token_indices"),
    ],
    ids=str,
)
def test_what_of_the_vocabulary_does_not_batch_is_refused_by_name(
    arguments: dict[str, Any], feature: str, tmp_path: Path
) -> None:
    base = make_hf_model("gemma3")  # tied
    save_strong(base, tmp_path / "adapter", **arguments)
    model = load_model(save_folder(base, tmp_path / "model"), float32_ops()).model
    with pytest.raises(UnsupportedAdapter, match=feature):
        read_adapter(tmp_path / "adapter", model.lora_sites)


def test_a_retrained_embedding_beside_a_lora_is_refused(tmp_path: Path) -> None:
    base = make_hf_model("llama")
    model = load_model(save_folder(base, tmp_path / "model"), float32_ops()).model
    with torch.no_grad():
        base.lm_head.weight[7, 3] += 1e-3
    save_strong(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    with pytest.raises(UnsupportedAdapter, match="new weights of the output head"):
        read_adapter(tmp_path / "adapter", model.lora_sites)


def test_a_pissa_adapter_that_peft_converted_is_a_plain_lora(tmp_path: Path) -> None:
    base, ops = make_hf_model("llama"), float32_ops()
    model = load_model(save_folder(base, tmp_path / "model"), ops).model
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM")
    peer = get_peft_model(base, config).eval()
    peer.peft_config["default"].init_lora_weights = True
    peer.save_pretrained(tmp_path / "initial")
    peer.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    peer.save_pretrained(
        tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    ids = make_ids(10)
    with torch.inference_mode():
        theirs = peer(ids[None]).logits[0]
    arena = AdapterArena(model.lora_sites, torch.empty(1 << 18))
    slot = arena.place(arena.pack(read_adapter(tmp_path / "adapter", model.lora_sites)))
    ours = motet_logits(model, ops, ids, range(10), lora=LoRABatch(ops, arena, [slot] * 10))
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
