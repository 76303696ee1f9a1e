from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, LLAMA3_ROPE, float32_ops

from motet.errors import CorruptCheckpoint, UnsupportedModel
from motet.runtime.models.decoder_config import DecoderConfig
from motet.runtime.models.registry import MODELS, find_model_class

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LLAMA, {}),
        (LLAMA, {"num_key_value_heads": None, "head_dim": None}),
        (LLAMA, {"num_key_value_heads": 2, "head_dim": 20, "rms_norm_eps": 1e-5}),
        (LLAMA, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        (LLAMA, {"pretraining_tp": 1, "hidden_act": "silu", "rope_scaling": None, "sliding_window": 7}),
        (LLAMA, {"rope_parameters": LLAMA3_ROPE}),
        (QWEN2, {"num_key_value_heads": 2}),
        (QWEN2, {"num_key_value_heads": 2, "use_sliding_window": False, "sliding_window": 64}),
        (QWEN2, {"num_key_value_heads": 2, "layer_types": ["full_attention"] * 2, "attention_bias": False}),
    ],
)
def test_a_config_asks_for_the_same_tensors_as_with_transformers(
    base: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = base | changes
    hf_config, hf_class = FAMILIES["llama" if base is LLAMA else "qwen2"]
    with torch.device("meta"):
        theirs = hf_class(hf_config.from_dict(dict(config)))
    model = find_model_class(config).from_config(config, float32_ops())
    expected = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert {name: weight.shape for name, weight in model.weights().items()} == expected
    assert model.max_model_len == 128
    assert DecoderConfig.from_config(config).rms_norm_eps == theirs.config.rms_norm_eps


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("compression_config", {"format": "int-quantized"}),
        ("pretraining_tp", 2),
    ],
)
def test_a_feature_outside_the_supported_is_refused_by_name_with_what_is_supported(
    feature: str, value: object
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{feature} .*supported are silu, full attention"):
        DecoderConfig.from_config({**LLAMA, feature: value})


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
        DecoderConfig.from_config({key: v for key, v in {**LLAMA, **change}.items() if v is not None})
