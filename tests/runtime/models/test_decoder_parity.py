"""The decoder against transformers: random weights, every family, rope kind, bias and head shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    LLAMA3_ROPE,
    OWN_SHAPES,
    backends,
    float32_ops,
    hf_logits,
    hf_logits_in_chunks,
    make_hf_model,
    make_ids,
    motet_logits,
    relative_error,
    save_folder,
)

from motet.runtime.models.loader import load_model

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 4096}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
    "factor": 4.0,
}
SLIDING, FULL = "sliding_attention", "full_attention"

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
    "llama_linear_rope": ("llama", {"rope_parameters": LINEAR}),
    "llama_yarn_rope": ("llama", {"rope_parameters": YARN}),
    "llama_longrope": ("llama", {"rope_parameters": LONGROPE}),
    "mistral_window": ("mistral", {}),
    "mistral_window_of_one": ("mistral", {"sliding_window": 1}),
    "mistral_without_window": ("mistral", {"sliding_window": None}),
    "mistral_explicit_head_dim": ("mistral", {"head_dim": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_theta": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_llama3_rope": ("qwen2", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2_last_layer_sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_tied_with_bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_yarn_rope": ("qwen3", {"rope_parameters": YARN}),
    "qwen3_layers_listed": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL]},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3_without_rope_in_listed_layers": ("smollm3", {"no_rope_layers": [0, 1]}),
    "smollm3_biases_tied": (
        "smollm3",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3_sliding_where_there_is_no_rope": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 9},
    ),
    "phi3": ("phi3", {}),
    "phi3_window": ("phi3", {"sliding_window": 9}),
    "phi3_partial_rope": (
        "phi3",
        {
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3_longrope": (
        "phi3",
        {
            "rope_parameters": {key: value for key, value in LONGROPE.items() if key != "factor"},
            "original_max_position_embeddings": 24_000,
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma2_without_softcaps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2_hard_softcaps": ("gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0}),
    "gemma2_untied_with_bias": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3": ("gemma3", {}),
    "gemma3_linear_rope_with_softcap": (
        "gemma3",
        {
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2_tied_with_bias": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "olmo2_one_kv_head_yarn": ("olmo2", {"num_key_value_heads": 1, "rope_parameters": YARN}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("first_position", [0, 8_000, 20_000])
def test_logits_equal_those_of_transformers(variant: str, first_position: int, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    hf_model = make_hf_model(family, **changes)
    folder = save_folder(hf_model, tmp_path)
    ids, rows = make_ids(40), range(40)
    expected = hf_logits(hf_model, ids, rows, first_position)
    for ops in backends():
        model = load_model(folder, ops).model
        for chunk in (40, 7):
            actual = motet_logits(model, ops, ids, rows, first_position=first_position, chunk=chunk)
            assert relative_error(actual, expected) <= 1e-4, ops.name


@pytest.mark.parametrize(
    "variant",
    [
        "llama_grouped_heads",
        "llama_llama3_rope",
        "qwen2",
        "mistral_window",
        *(pytest.param(v, marks=pytest.mark.slow) for v in ("llama_yarn_rope", "gemma2", "gemma3")),
    ],
)
def test_logits_equal_those_of_transformers_behind_a_context_of_8000_and_20000_tokens(
    variant: str, tmp_path: Path
) -> None:
    family, changes = VARIANTS[variant]
    small = {"hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    if family.startswith("gemma"):
        small |= {"num_hidden_layers": 2, "head_dim": 16}
    if "sliding_window" in OWN_SHAPES.get(family, {}):
        small["sliding_window"] = 600
    hf_model = make_hf_model(family, **small, **changes)
    folder = save_folder(hf_model, tmp_path)
    rows = [*range(8_000, 8_008), *range(20_000, 20_008)]
    ids = make_ids(20_008)
    expected = (hf_logits_in_chunks if "sliding_window" in small else hf_logits)(hf_model, ids, rows)
    for ops in backends():
        logits = motet_logits(load_model(folder, ops).model, ops, ids, rows, chunk=2048)
        assert relative_error(logits, expected) <= 1e-4, ops.name


@pytest.mark.parametrize("first_position", [0, 8_000, 20_000])
def test_longrope_beyond_its_original_context_equals_transformers_where_it_was_asked_for(
    first_position: int, tmp_path: Path
) -> None:
    scaling = {key: value for key, value in LONGROPE.items() if key != "factor"}
    hf_model = make_hf_model("phi3", rope_parameters=scaling, original_max_position_embeddings=30)
    folder = save_folder(hf_model, tmp_path)
    ids, rows = make_ids(40), range(40)
    expected = hf_logits(hf_model, ids, rows, first_position)
    for ops in backends():
        assert load_model(folder, ops).model.max_model_len == 30
        model = load_model(folder, ops, max_model_len=32_768).model
        assert model.max_model_len == 32_768
        for chunk in (40, 7):
            actual = motet_logits(model, ops, ids, rows, first_position=first_position, chunk=chunk)
            assert relative_error(actual, expected) <= 1e-4, ops.name


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    hf_model = make_hf_model(family)
    folder = save_folder(hf_model, tmp_path)
    in_bfloat16 = type(hf_model).from_pretrained(folder, dtype=torch.bfloat16)
    ids, rows = make_ids(40), range(40)
    exact = hf_logits(hf_model, ids, rows)
    theirs = relative_error(hf_logits(in_bfloat16, ids, rows), exact)
    for ops in backends(torch.bfloat16):
        logits = motet_logits(load_model(folder, ops).model, ops, ids, rows)
        assert logits.dtype == torch.float32
        assert 0 < relative_error(logits, exact) <= 1.5 * theirs, ops.name


def test_only_the_rows_asked_for_get_logits(tmp_path: Path) -> None:
    ops = float32_ops()
    model = load_model(save_folder(make_hf_model(), tmp_path), ops).model
    ids = make_ids(20)
    every = motet_logits(model, ops, ids, range(20))
    torch.testing.assert_close(motet_logits(model, ops, ids, [3, 19]), every[[3, 19]])
    assert motet_logits(model, ops, ids, []).shape == (0, model.vocab_size)


@pytest.mark.parametrize(
    ("variant", "windows"),
    [
        ("llama_grouped_heads", (None,)),
        ("mistral_window", (9,)),
        ("qwen2_last_layer_sliding", (None, 9)),
        ("gemma3", (9, None)),
    ],
)
def test_kv_spec_tells_each_window_of_the_layers_once(
    variant: str, windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    family, changes = VARIANTS[variant]
    hf_model = make_hf_model(family, num_hidden_layers=4, **changes)
    (group,) = load_model(save_folder(hf_model, tmp_path), float32_ops()).model.kv_spec()
    assert (group.num_layers, group.windows) == (4, windows)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    hf_model = make_hf_model("mistral", sliding_window=64, max_position_embeddings=64)
    (group,) = load_model(save_folder(hf_model, tmp_path), float32_ops()).model.kv_spec()
    assert group.windows == (None,)


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_spec_and_lora_sites_describe_the_model(family: str, tmp_path: Path) -> None:
    hf_model = make_hf_model(family, head_dim=20)
    model = load_model(save_folder(hf_model, tmp_path), float32_ops()).model
    (group,) = model.kv_spec()
    assert (group.kind, group.num_layers, group.num_kv_heads, group.head_dim) == ("full", 2, 2, 20)
    assert [site.index for site in model.lora_sites] == list(range(10))
    linears = {
        name: module for name, module in hf_model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    described = {
        module: (out_features, site.in_features)
        for site in model.lora_sites
        for module, out_features in zip(site.modules, site.out_features, strict=True)
    }
    assert described.pop("model.embed_tokens") == (48, 96)
    assert described == {name: tuple(linear.weight.shape) for name, linear in linears.items()}


class _SiteRecorder:
    """Stands where a step's adapters do; its delta doubles the linear's output."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def adapts(self, site: Any) -> bool:
        return True

    def of_rows(self, rows: torch.Tensor) -> _SiteRecorder:
        return self

    def add_delta(self, site: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        assert x.shape[1:] == (() if site.role == "embedding" else (site.in_features,))
        assert out.shape[1] == sum(site.out_features)
        self.seen.append(site.index)
        out += out.clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_act_on_every_site_once_before_what_follows_the_linear(family: str, tmp_path: Path) -> None:
    hf_model = make_hf_model(family)
    folder, ids, rows = save_folder(hf_model, tmp_path), make_ids(12), range(12)
    logits = {}
    for ops in backends():
        recorder = _SiteRecorder()
        logits[ops.name] = motet_logits(load_model(folder, ops).model, ops, ids, rows, lora=recorder)
        assert recorder.seen == [8, *range(8), 9]
    with torch.no_grad():  # the same doubling, done to transformers' weights
        for name, parameter in hf_model.named_parameters():
            if "_proj" in name or name in ("model.embed_tokens.weight", "lm_head.weight"):
                parameter *= 2
    expected = hf_logits(hf_model, ids, rows)
    assert {name: error for name in logits if (error := relative_error(logits[name], expected)) > 1e-4} == {}
