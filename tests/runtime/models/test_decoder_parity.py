"""The decoder against transformers: random weights, every family, rope kind, bias and head shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    LLAMA3_ROPE,
    float32_ops,
    hf_logits,
    make_hf_model,
    make_ids,
    motet_logits,
    relative_error,
    save_folder,
)

from motet.kernels.reference import ReferenceOps
from motet.runtime.models.loader import load_model

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_grouped_heads": ("llama", {}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama_as_many_kv_heads_as_heads": ("llama", {"num_key_value_heads": 4}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_attention_bias": ("llama", {"attention_bias": True}),
    "llama_mlp_bias": ("llama", {"mlp_bias": True}),
    "llama_explicit_head_dim": ("llama", {"head_dim": 20}),
    "llama_other_eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama_theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama_llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_theta": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_llama3_rope": ("qwen2", {"rope_parameters": LLAMA3_ROPE}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("first_position", [0, 8_000, 20_000])
def test_logits_equal_those_of_transformers(variant: str, first_position: int, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    hf_model = make_hf_model(family, **changes)
    ops = float32_ops()
    model = load_model(save_folder(hf_model, tmp_path), ops).model
    ids, rows = make_ids(40), range(40)
    expected = hf_logits(hf_model, ids, rows, first_position)
    for chunk in (40, 7):
        actual = motet_logits(model, ops, ids, rows, first_position=first_position, chunk=chunk)
        assert relative_error(actual, expected) <= 1e-4


@pytest.mark.parametrize("variant", ["llama_grouped_heads", "llama_llama3_rope", "qwen2"])
def test_logits_equal_those_of_transformers_behind_a_context_of_8000_and_20000_tokens(
    variant: str, tmp_path: Path
) -> None:
    family, changes = VARIANTS[variant]
    small = {"hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    hf_model = make_hf_model(family, **small, **changes)
    ops = float32_ops()
    model = load_model(save_folder(hf_model, tmp_path), ops).model
    rows = [*range(8_000, 8_008), *range(20_000, 20_008)]
    ids = make_ids(20_008)
    expected = hf_logits(hf_model, ids, rows)
    assert relative_error(motet_logits(model, ops, ids, rows, chunk=2048), expected) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_in_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    hf_model = make_hf_model(family)
    folder = save_folder(hf_model, tmp_path)
    in_bfloat16 = type(hf_model).from_pretrained(folder, dtype=torch.bfloat16)
    ops = ReferenceOps(torch.device("cpu"), torch.bfloat16)
    model = load_model(folder, ops).model
    ids, rows = make_ids(40), range(40)
    exact = hf_logits(hf_model, ids, rows)
    theirs = relative_error(hf_logits(in_bfloat16, ids, rows), exact)
    logits = motet_logits(model, ops, ids, rows)
    assert logits.dtype == torch.float32
    assert 0 < relative_error(logits, exact) <= 1.5 * theirs


def test_only_the_rows_asked_for_get_logits(tmp_path: Path) -> None:
    ops = float32_ops()
    model = load_model(save_folder(make_hf_model(), tmp_path), ops).model
    ids = make_ids(20)
    every = motet_logits(model, ops, ids, range(20))
    torch.testing.assert_close(motet_logits(model, ops, ids, [3, 19]), every[[3, 19]])
    assert motet_logits(model, ops, ids, []).shape == (0, model.vocab_size)


def test_kv_spec_and_lora_sites_describe_the_model(tmp_path: Path) -> None:
    hf_model = make_hf_model(head_dim=20)
    model = load_model(save_folder(hf_model, tmp_path), float32_ops()).model
    (group,) = model.kv_spec()
    assert (group.kind, group.num_layers, group.num_kv_heads, group.head_dim, group.window) == (
        "full",
        2,
        2,
        20,
        None,
    )
    assert [site.index for site in model.lora_sites] == list(range(8))
    linears = {
        name: module for name, module in hf_model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    del linears["lm_head"]
    described = {
        module: (out_features, site.in_features)
        for site in model.lora_sites
        for module, out_features in zip(site.modules, site.out_features, strict=True)
    }
    assert described == {name: tuple(linear.weight.shape) for name, linear in linears.items()}


class _SiteRecorder:
    """Stands where a step's adapters do; its delta doubles the linear's output."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def add_delta(self, ops: object, site: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        assert x.shape[1] == site.in_features
        assert out.shape[1] == sum(site.out_features)
        self.seen.append(site.index)
        out += out.clone()


def test_adapters_act_on_every_site_once_before_what_follows_the_linear(tmp_path: Path) -> None:
    hf_model = make_hf_model("qwen2")
    ops = float32_ops()
    model = load_model(save_folder(hf_model, tmp_path), ops).model
    recorder = _SiteRecorder()
    ids, rows = make_ids(12), range(12)
    logits = motet_logits(model, ops, ids, rows, lora=recorder)
    assert recorder.seen == list(range(8))
    with torch.no_grad():  # the same doubling, done to transformers' weights
        for name, parameter in hf_model.named_parameters():
            if "_proj" in name:
                parameter *= 2
    assert relative_error(logits, hf_logits(hf_model, ids, rows)) <= 1e-4
