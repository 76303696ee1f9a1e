"""hf_config: GGUF metadata as the `config.json` of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from motet.errors import UnsupportedModel
from motet.runtime.models.rope import FREQUENCY_DIVISORS

_ARCHITECTURES = MappingProxyType({"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"})

_RENAMED = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    }
)

_NEUTRAL: Mapping[str, tuple[object, ...] | None] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.sliding_window": (0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "rope.scale_linear": (1.0,),
        "rope.scaling.type": ("none",),
        "rope.scaling.factor": (0.0, 1.0),
        "rope.scaling.finetuned": None,
        "rope.scaling.original_context_length": None,
        "tensor_data_layout": None,
    }
)
"""Keys that change nothing, at these values (None: at any)."""

_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def hf_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: tuple[float, ...] | None,
) -> dict[str, Any]:
    """The `config.json` of a llama or qwen2 GGUF file.

    metadata: GGUF key -> value; shapes: of its tensors, by their GGUF names; rope_divisors: the tensor
    `rope_freqs.weight`, in which llama.cpp keeps Llama 3.1's rope scaling. Raises `UnsupportedModel` for
    another architecture and for any hyperparameter that is not understood.
    """
    architecture = metadata.get("general.architecture")
    if (
        not isinstance(architecture, str)
        or architecture not in _ARCHITECTURES
        or metadata.get("general.type", "model") != "model"
    ):
        raise UnsupportedModel(
            f"a GGUF {metadata.get('general.type', 'model')} of architecture {architecture!r}; "
            f"supported are models of {', '.join(_ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModel(
            "the model is split over several files; merge them: gguf-split --merge FIRST.gguf OUT.gguf"
        )
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "eos_token_id": [metadata[key] for key in _END_TOKENS if key in metadata],
    }
    if "token_embd.weight" in shapes:
        config["vocab_size"] = shapes["token_embd.weight"][0]
    head_sizes = {}
    for key, value in metadata.items():
        owner, _, name = key.partition(".")
        if owner != architecture:
            continue
        if name in _RENAMED:
            config[_RENAMED[name]] = value
        elif name in ("attention.value_length", "rope.dimension_count"):
            head_sizes[key] = value
        elif name not in _NEUTRAL:
            raise UnsupportedModel(f"{key} ({value!r}) is a hyperparameter that motet does not know")
        elif (neutral := _NEUTRAL[name]) is not None and value not in neutral:
            raise UnsupportedModel(f"{key} is {value!r}; supported is {' or '.join(map(repr, neutral))}")
    _check_head_sizes(config, head_sizes)
    if rope_divisors is not None:
        config["rope_parameters"] = {"rope_type": FREQUENCY_DIVISORS, "divisors": rope_divisors}
    return config


def _check_head_sizes(config: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    heads, hidden_size = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden_size, int):
        return  # the config's own reader says what is wrong with them
    head_dim = config.get("head_dim", hidden_size // max(heads, 1))
    for key, value in sizes.items():
        if value != head_dim:
            raise UnsupportedModel(f"{key} is {value}; only that of a whole head ({head_dim}) is supported")
