"""Every rope kind, in every spelling, against transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import LLAMA3_ROPE
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from motet.errors import CorruptCheckpoint, UnsupportedModel
from motet.kernels.reference import ReferenceOps
from motet.runtime.models.families import read_decoder_config
from motet.runtime.models.rope import Rope, RopeConfig
from motet.runtime.models.rope_config import read_rope

OLD_LLAMA3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 2.5],
    "long_factor": [2.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 24_000,
}

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "max_position_embeddings": 32_768,
}

SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "rope_theta": {"rope_theta": 500_000.0},
    "integer theta": {"rope_theta": 10000},
    "null scaling": {"rope_theta": 1e6, "rope_scaling": None},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "parameters without a theta": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4},
    "llama3 parameters": {"rope_parameters": LLAMA3_ROPE},
    "llama3 scaling": {"rope_scaling": OLD_LLAMA3, "rope_theta": 500_000.0},
    "type, not rope_type": {"rope_scaling": {**OLD_LLAMA3, "rope_type": "llama3", "type": "llama3"}},
    "scaling before parameters": {"rope_scaling": OLD_LLAMA3, "rope_parameters": {"rope_theta": 7.0}},
    "original length from the context": {
        "rope_scaling": {
            key: v for key, v in OLD_LLAMA3.items() if key != "original_max_position_embeddings"
        },
        "max_position_embeddings": 4096,
    },
    "original length beside the scaling": {
        "rope_scaling": {**OLD_LLAMA3, "original_max_position_embeddings": 77},
        "original_max_position_embeddings": 2048,
    },
    "linear": {"rope_scaling": {"type": "linear", "factor": 4}},
    "yarn": {"rope_scaling": YARN},
    "yarn without a factor": {"rope_scaling": {**YARN, "factor": None}},
    "yarn with an attention factor": {"rope_scaling": {**YARN, "attention_factor": 0.7}},
    "yarn with mscales": {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "yarn with betas": {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    "yarn that stretches nothing": {"rope_scaling": {**YARN, "factor": 1.0}},
    "longrope": {"rope_scaling": LONGROPE},
    "longrope with an attention factor": {"rope_scaling": {**LONGROPE, "attention_factor": 1.5}},
    "longrope with a factor": {"rope_scaling": {**LONGROPE, "factor": 7.0}},
}


def assert_same_turns(
    rope: RopeConfig, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> None:
    ops = ReferenceOps(torch.device("cpu"), torch.float32)
    ours, signed_sin = Rope(rope, ops).cos_sin(positions)
    half = ours.shape[1] // 2
    sign = torch.cat((-torch.ones(half), torch.ones(half)))
    for actual, expected in ((ours, cos), (signed_sin * sign, sin)):
        assert actual.dtype == torch.float32
        # A float32 angle at 131,071 radians is only known to 0.008; up to 20,000 to 0.001.
        tolerance = torch.where(positions > 20_000, 3e-2, 3e-3)[:, None]
        assert actual.shape == expected.shape
        assert bool(((actual - expected).abs() <= tolerance).all())


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("head_dim", [2, 8, 64, 128])
def test_cos_and_sin_equal_those_of_transformers(spelling: str, head_dim: int) -> None:
    config = {"max_position_embeddings": 32_768, **copy.deepcopy(SPELLINGS[spelling])}
    if "longrope" in spelling:
        for key in ("short_factor", "long_factor"):
            config["rope_scaling"][key] = (config["rope_scaling"][key] * 16)[: head_dim // 2]
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, **copy.deepcopy(config)))
    positions = torch.tensor([0, 1, 511, 8_000, 20_000, *([] if "longrope" in spelling else [131_071])])
    expected = theirs(torch.empty(0), positions[None])
    rope = read_rope(config, head_dim)
    assert_same_turns(rope, expected[0][0], expected[1][0], positions)
    torch.testing.assert_close(rope.frequencies(), theirs.inv_freq, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_a_phi_3_turns_a_part_of_each_head_and_calls_longrope_by_three_names(name: str) -> None:
    scaling = {
        **LONGROPE,
        "type": name,
        "short_factor": [1.0, 1.25, 1.5, 1.75, 2.5, 3.5],
        "long_factor": [1.0] * 6,
    }
    del scaling["rope_type"]
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 24_000,
        "partial_rotary_factor": 0.75,
        "pad_token_id": 0,
        "rope_scaling": scaling,
    }
    ours = read_decoder_config(config)
    theirs = Phi3RotaryEmbedding(Phi3Config.from_dict(copy.deepcopy(config)))
    positions = torch.tensor([0, 1, 8_000, 20_000, 23_999])
    cos, sin = theirs(torch.empty(0), positions[None])
    assert cos.shape[-1] == 12
    assert_same_turns(ours.layers[0].rope, cos[0], sin[0], positions)
    assert ours.max_model_len == 24_000


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 3e4},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 2e6}}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}},
        {"rope_parameters": {"full_attention": None, "sliding_attention": None}},
    ],
)
def test_a_gemma_3_has_a_rope_for_each_layer_type(changes: dict[str, Any]) -> None:
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 32_768,
        "layer_types": ["sliding_attention", "full_attention"],
        **changes,
    }
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig.from_dict(copy.deepcopy(config)))
    positions = torch.tensor([0, 1, 8_000, 20_000])
    for layer, layer_type in zip(read_decoder_config(config).layers, config["layer_types"], strict=True):
        cos, sin = theirs(torch.empty(0), positions[None], layer_type)
        assert_same_turns(layer.rope, cos[0], sin[0], positions)


def test_no_rope_turns_nothing() -> None:
    cos, sin = Rope(RopeConfig(rotary_dim=0), ReferenceOps(torch.device("cpu"), torch.float32)).cos_sin(
        torch.arange(5)
    )
    assert cos.shape == sin.shape == (5, 0)


def test_divisors_divide_the_frequencies() -> None:
    config = {"rope_parameters": {"rope_type": "frequency_divisors", "divisors": (1.0, 2.0, 4.0, 8.0)}}
    plain, divided = read_rope({}, 8).frequencies(), read_rope(config, 8).frequencies()
    assert torch.equal(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_longrope_ends_where_its_other_frequencies_would_begin() -> None:
    config = {"max_position_embeddings": 131_072, "rope_scaling": LONGROPE}
    assert read_rope(config, 8).max_length == 24_000
    assert read_rope({**config, "rope_scaling": YARN}, 8).max_length is None


@pytest.mark.parametrize("asked", [None, 24_000, 24_001])
def test_longrope_turns_as_long_sequences_do_if_such_are_asked_for(asked: int | None) -> None:
    config = {"max_position_embeddings": 131_072, "rope_scaling": LONGROPE, "max_model_len": asked}
    rope = read_rope(config, 8)
    factors = LONGROPE["long_factor" if asked == 24_001 else "short_factor"]
    torch.testing.assert_close(
        rope.frequencies(), read_rope({}, 8).frequencies() / torch.tensor(factors), rtol=3e-7, atol=0
    )
    assert rope.max_length == (None if asked == 24_001 else 24_000)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_dynamic_rope_is_refused_as_it_depends_on_the_current_length(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"'dynamic'.*current length.*cached exactly"):
        read_rope({key: {"rope_type": "dynamic", "factor": 2.0}}, 8)


@pytest.mark.parametrize("rope_type", ["proportional", "axial", "mrope"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_other_rope_types_are_refused_by_name(rope_type: str, key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{rope_type}'; supported are default, linear, llama3"):
        read_rope({key: {"rope_type": rope_type, "factor": 2.0}}, 8)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "mrope_section"),
    ],
)
def test_partial_rotation_ropes_per_layer_type_and_unknown_keys_are_refused(
    config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        read_rope(config, 8)


@pytest.mark.parametrize("share", [0, -1, 1.5, "half"])
def test_a_share_of_the_head_outside_0_to_1_is_corrupt(share: object) -> None:
    with pytest.raises(CorruptCheckpoint, match="partial_rotary_factor"):
        read_rope({"partial_rotary_factor": share}, 8, partial=True)


@pytest.mark.parametrize(
    "scaling",
    [
        {**YARN, "original_max_position_embeddings": "4096"},
        {**YARN, "attention_factor": "one"},
        {**YARN, "original_max_position_embeddings": 1},
        {**LONGROPE, "short_factor": 1.0},
        {**LONGROPE, "short_factor": [1.0, 2.0]},
        {**LONGROPE, "short_factor": [1.0, "2"]},
        {"rope_type": "linear"},
        {"rope_type": "default", "rope_theta": 0},
    ],
)
def test_a_scaling_that_makes_no_sense_is_corrupt(scaling: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match="config: "):
        read_decoder_config({**LLAMA, "rope_scaling": scaling})
