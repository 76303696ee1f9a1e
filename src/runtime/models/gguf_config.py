"""hf_config: GGUF metadata as the `config.json` of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from motet.errors import UnsupportedModel
from motet.runtime.models.gguf_architecture import GGUF_ARCHITECTURES
from motet.runtime.models.rope import FREQUENCY_DIVISORS

Values = tuple[float, ...]

ROPE_DIVISORS, SHORT_FACTORS, LONG_FACTORS = ROPE_TENSORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)
"""Tensors in which llama.cpp keeps Llama 3.1's and Phi-3's ropes: what each frequency is divided by."""

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

_READ_BELOW = (
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
)

_NEUTRAL: Mapping[str, tuple[object, ...] | None] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.sliding_window": (0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "rope.scale_linear": (1.0,),
        "rope.scaling.finetuned": None,
        "tensor_data_layout": None,
    }
)
"""Keys that change nothing, at these values (None: at any)."""

_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")

# What llama.cpp knows of these families though no file says it.
_DEFAULT_THETA = 10_000.0
_LARGEST_GEMMAS = MappingProxyType({"gemma2": 46, "gemma3": 62})
"""How many layers the 27B models have: they alone scale attention by hidden_size / heads, not by the size of a head."""


def hf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_tensors: Mapping[str, Values]
) -> dict[str, Any]:
    """The `config.json` of a GGUF file.

    metadata: GGUF key -> value; shapes: of its tensors, by their GGUF names; rope_tensors: those of
    `ROPE_TENSORS` that it has. Raises `UnsupportedModel` for another architecture and for any hyperparameter that
    is not understood.
    """
    architecture = _check_architecture(metadata)
    told = {
        name: value
        for key, value in metadata.items()
        for owner, _, name in [key.partition(".")]
        if owner == architecture
    }
    renamed = {**_RENAMED, **GGUF_ARCHITECTURES[architecture].keys}
    for name, value in told.items():
        if name in renamed or name in _READ_BELOW:
            continue
        if name not in _NEUTRAL:
            raise UnsupportedModel(
                f"{architecture}.{name} ({value!r}) is a hyperparameter that motet does not know"
            )
        if (neutral := _NEUTRAL[name]) is not None and value not in neutral:
            supported = " or ".join(map(repr, neutral))
            raise UnsupportedModel(f"{architecture}.{name} is {value!r}; supported is {supported}")
    config: dict[str, Any] = {
        "architectures": [GGUF_ARCHITECTURES[architecture].hf_class],
        "rope_theta": _DEFAULT_THETA,
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "eos_token_id": [metadata[key] for key in _END_TOKENS if key in metadata],
    }
    if "token_embd.weight" in shapes:
        config["vocab_size"] = shapes["token_embd.weight"][0]
    config |= {renamed[name]: value for name, value in told.items() if name in renamed}
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    heads, hidden_size = config.get("num_attention_heads"), config.get("hidden_size")
    # Of what is missing or no number, the config's own reader says what is wrong.
    if isinstance(heads, int) and isinstance(hidden_size, int):
        config.setdefault("head_dim", hidden_size // max(heads, 1))
        _read_head_sizes(architecture, told, config)
        _read_attention(architecture, config)
    config["rope_scaling"] = _read_rope(architecture, told, rope_tensors)
    return config


def _check_architecture(metadata: Mapping[str, Any]) -> str:
    if (count := metadata.get("split.count", 1)) > 1:  # first: only the first file knows the architecture
        raise UnsupportedModel(
            f"one of {count} files that a model is split into, where one whole file is expected; merge them with "
            "llama.cpp's `llama-gguf-split --merge FIRST.gguf WHOLE.gguf` and pass the path of WHOLE.gguf"
        )
    architecture, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if not isinstance(architecture, str) or architecture not in GGUF_ARCHITECTURES or kind != "model":
        raise UnsupportedModel(
            f"a GGUF {kind} of architecture {architecture!r}; "
            f"supported are models of {', '.join(GGUF_ARCHITECTURES)}"
        )
    return architecture


def _read_head_sizes(architecture: str, told: Mapping[str, Any], config: dict[str, Any]) -> None:
    head_dim = config["head_dim"]
    for name in ("attention.value_length", "rope.dimension_count"):
        size = told.get(name, head_dim)
        if size == head_dim:
            continue
        if architecture != "phi3" or name != "rope.dimension_count" or size not in range(1, head_dim):
            raise UnsupportedModel(
                f"{architecture}.{name} is {size}; only that of a whole head ({head_dim}) is supported"
            )
        config["partial_rotary_factor"] = size / head_dim


def _read_attention(architecture: str, config: dict[str, Any]) -> None:
    if "sliding_window" in config:
        config["sliding_window"] = config["sliding_window"] or None  # 0: all is seen
    if architecture == "llama" and config.get("sliding_window"):
        config["architectures"] = ["MistralForCausalLM"]
    if architecture in _LARGEST_GEMMAS:
        largest = config.get("num_hidden_layers") == _LARGEST_GEMMAS[architecture]
        share = config["hidden_size"] // max(config["num_attention_heads"], 1)
        config["query_pre_attn_scalar"] = share if largest else config["head_dim"]


def _read_rope(
    architecture: str, told: Mapping[str, Any], tensors: Mapping[str, Values]
) -> Mapping[str, Any] | None:
    kind, factor = told.get("rope.scaling.type", "linear"), told.get("rope.scaling.factor", 0.0)
    if kind == "linear" and factor in (0.0, 1.0):
        kind = "none"
    original = told.get("rope.scaling.original_context_length")
    if SHORT_FACTORS in tensors or LONG_FACTORS in tensors:
        if (
            architecture != "phi3"
            or tensors.keys() != {SHORT_FACTORS, LONG_FACTORS}
            or kind not in ("none", "longrope")
        ):
            raise UnsupportedModel(
                f"a {architecture} of rope type {kind!r} with {', '.join(tensors)}; only a Phi-3 has these two "
                f"tensors, {SHORT_FACTORS} and {LONG_FACTORS}"
            )
        return {
            "rope_type": "longrope",
            "short_factor": list(tensors[SHORT_FACTORS]),
            "long_factor": list(tensors[LONG_FACTORS]),
            "original_max_position_embeddings": original,
            "attention_factor": told.get("rope.scaling.attn_factor"),
        }
    if told.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"{architecture}.rope.scaling.attn_factor is {told['rope.scaling.attn_factor']}; supported is 1.0, "
            "but for a Phi-3 with LongRoPE"
        )
    if ROPE_DIVISORS in tensors and kind == "none":
        return {"rope_type": FREQUENCY_DIVISORS, "divisors": tensors[ROPE_DIVISORS]}
    if kind == "linear" and not tensors:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and not tensors:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind != "none" or tensors:
        raise UnsupportedModel(
            f"{architecture}.rope.scaling.type is {kind!r}{' with ' if tensors else ''}{', '.join(tensors)}; "
            "supported are 'none', 'linear' and 'yarn', and those tensors with 'none'"
        )
    return None
