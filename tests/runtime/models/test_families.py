"""What each family's config means, against transformers; and what is refused of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, LLAMA3_ROPE, float32_ops

from motet.errors import CorruptCheckpoint, UnsupportedModel
from motet.runtime.models.families import FAMILIES as READ
from motet.runtime.models.families import read_decoder_config
from motet.runtime.models.registry import MODELS, find_model_class

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [FAMILIES[family][1].__name__], **SHAPE, **changes}


LLAMA = config_of("llama")
SLIDING, FULL = "sliding_attention", "full_attention"


def test_every_family_is_tested() -> None:
    assert {model.__name__ for _, model in FAMILIES.values()} == READ.keys() == MODELS.keys()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"num_key_value_heads": None, "head_dim": None}),
        ("llama", {"head_dim": 20, "rms_norm_eps": 1e-5}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"pretraining_tp": 1, "hidden_act": "silu", "rope_scaling": None, "sliding_window": 7}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("mistral", {"head_dim": None, "sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
        ("qwen2", {"layer_types": [FULL] * 4, "attention_bias": False}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
        ("phi3", {"num_key_value_heads": None, "tie_word_embeddings": True}),
        ("gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
        ("gemma3", {"hidden_act": "gelu_pytorch_tanh", "use_bidirectional_attention": False}),
        ("olmo2", {"num_key_value_heads": None, "attention_bias": True}),
    ],
)
def test_a_config_asks_for_the_same_tensors_as_with_transformers(
    family: str, changes: dict[str, Any]
) -> None:
    config = config_of(family, **changes)
    hf_config, hf_class = FAMILIES[family]
    with torch.device("meta"):
        theirs = hf_class(hf_config.from_dict(dict(config)))
    model = find_model_class(config).from_config(config, float32_ops())
    expected = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert {name: weight.shape for name, weight in model.weights().items()} == expected
    assert model.max_model_len == 128
    assert read_decoder_config(config).rms_norm_eps == theirs.config.rms_norm_eps


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"max_position_embeddings": 8192}),
        ("mistral", {"sliding_window": 9}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}),
        ("qwen2", {"use_sliding_window": True, "max_position_embeddings": 8192, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL] * 2}),
        ("smollm3", {}),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0, 1]}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "no_rope_layer_interval": 2}),
        ("phi3", {}),
        ("phi3", {"sliding_window": 9}),
        ("gemma2", {"max_position_embeddings": 8192}),
        ("gemma2", {"sliding_window": 9}),
        ("gemma2", {"sliding_window": 9, "layer_types": [FULL, SLIDING, SLIDING, FULL]}),
        ("gemma3", {"sliding_window": 9}),
        ("gemma3", {"sliding_window": 9, "sliding_window_pattern": 3}),
    ],
)
def test_each_layer_has_the_window_and_the_rope_that_transformers_gives_it(
    family: str, changes: dict[str, Any]
) -> None:
    config = config_of(family, **changes)
    hf_config, hf_class = FAMILIES[family]
    with torch.device("meta"):
        theirs = hf_class(hf_config.from_dict(dict(config)))
    for ours, layer in zip(read_decoder_config(config).layers, theirs.model.layers, strict=True):
        attention = layer.self_attn
        window = getattr(attention, "sliding_window", getattr(theirs.config, "sliding_window", None))
        assert ours.window == window
        assert bool(ours.rope.rotary_dim) == bool(getattr(attention, "use_rope", True))


def test_defaults_of_softcaps_and_thetas_are_those_of_transformers() -> None:
    gemma2 = read_decoder_config(config_of("gemma2"))
    assert (gemma2.attention_softcap, gemma2.logit_softcap, gemma2.attention_scale) == (50.0, 30.0, 1 / 16)
    off = read_decoder_config(config_of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (off.attention_softcap, off.logit_softcap) == (None, None)
    gemma3 = read_decoder_config(config_of("gemma3", num_hidden_layers=6, sliding_window=9))
    assert [layer.rope.theta for layer in gemma3.layers] == [1e4] * 5 + [1e6]
    assert read_decoder_config(config_of("smollm3")).layers[0].rope.theta == 2e6


@pytest.mark.parametrize(
    ("family", "feature", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "use_sliding_window", True),
        ("llama", "layer_types", [FULL, SLIDING, FULL, FULL]),
        ("llama", "quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("llama", "compression_config", {"format": "int-quantized"}),
        ("llama", "pretraining_tp", 2),
        ("mistral", "attention_bias", True),
        ("mistral", "layer_types", [FULL, SLIDING, FULL, FULL]),
        ("qwen2", "hidden_act", "gelu"),
        ("qwen2", "layer_types", [FULL, "chunked_attention", FULL, FULL]),
        ("qwen3", "mlp_bias", True),
        ("smollm3", "layer_types", ["linear_attention"] * 4),
        ("phi3", "lm_head_bias", True),
        ("phi3", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "hidden_activation", "silu"),
        ("olmo2", "hidden_act", "gelu"),
        ("olmo2", "layer_types", [SLIDING] * 4),
    ],
)
def test_a_feature_outside_the_supported_is_refused_by_name(family: str, feature: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{feature.replace('rope_scaling', 'rope_type')} "):
        read_decoder_config(config_of(family, **{feature: value}))


def test_a_gemma_3_that_sees_images_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"Gemma3ForConditionalGeneration.*Gemma3ForCausalLM"):
        find_model_class({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": SHAPE})


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("qwen3", {"layer_types": [SLIDING] * 4}, "no sliding_window"),
        ("smollm3", {"layer_types": [SLIDING] * 4, "sliding_window": 9}, "no sliding_window"),
        ("qwen2", {"layer_types": [FULL]}, "1 entries for 4 layers"),
        ("smollm3", {"no_rope_layers": [1]}, "1 entries for 4 layers"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
    ],
)
def test_a_family_s_key_that_makes_no_sense_is_corrupt(
    family: str, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CorruptCheckpoint, match=complaint):
        read_decoder_config(config_of(family, **changes))


@pytest.mark.parametrize(
    "architectures",
    [None, [], ["MixtralForCausalLM"], ["LlamaForSequenceClassification"], "LlamaForCausalLM"],
)
def test_another_architecture_is_refused_with_the_list_of_those_that_are_not(architectures: object) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        find_model_class({"architectures": architectures})
    assert repr(architectures) in str(caught.value)
    assert all(name in str(caught.value) for name in MODELS)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers.*'two'"),
        ({"vocab_size": 96.5}, "vocab_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 13}, "head_dim"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_theta": 0}, "theta"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": "llama3"}, "rope_parameters"),
    ],
)
def test_a_config_that_makes_no_sense_is_corrupt_and_the_message_names_the_key(
    change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CorruptCheckpoint, match=complaint):
        read_decoder_config({key: v for key, v in {**LLAMA, **change}.items() if v is not None})
