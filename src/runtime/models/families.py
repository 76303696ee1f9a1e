"""read_decoder_config: what each family's `config.json` means, defaults included, as transformers reads it.

What `decoder.py` does not compute is refused here, by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from motet.errors import CorruptCheckpoint, UnsupportedModel
from motet.runtime.models.decoder_config import Count, DecoderConfig, LayerAttention, Positive, Shape
from motet.runtime.models.rope import RopeConfig
from motet.runtime.models.rope_config import read_rope, read_ropes_of_layer_types, rope_parameters

FULL, SLIDING = "full_attention", "sliding_attention"

NO_ROPE = RopeConfig(rotary_dim=0)


class Keys(Shape):
    """The keys of `config.json` that one family or another reads, beside its rope's."""

    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: list[str] | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    sliding_window_pattern: Count = 6
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    query_pre_attn_scalar: Positive = 256
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None


@dataclass(frozen=True)
class Family:
    """How one architecture's `config.json` is read."""

    read: Callable[[Keys, Mapping[str, Any]], Mapping[str, Any]]
    """To the fields of `DecoderConfig` that `Shape` has not."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a config means by leaving a key out, where it is not what `Keys` says."""

    computed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Beside `_COMPUTED`: for keys that change what a model computes, the values that are right here."""


_COMPUTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "quantization_config": (None,),
        "compression_config": (None,),
        "pretraining_tp": (1, None),
    }
)
"""Keys that change what a model computes, and the values for which `decoder.py` is right. Absent is fine."""

_OFF = (False, None)


def read_decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of one of `FAMILIES`; another architecture, which a plug-in names, as a Llama's.

    Raises `UnsupportedModel` for a feature that is not computed, `CorruptCheckpoint` for a value that makes no
    sense.
    """
    architecture = config["architectures"][0]
    family = FAMILIES.get(architecture, FAMILIES["LlamaForCausalLM"])
    config = {**family.defaults, **config}
    for key, computed in ({**_COMPUTED, **family.computed}).items():
        if key in config and config[key] not in computed:
            supported = " or ".join(repr(value) for value in computed)
            raise UnsupportedModel(
                f"config: {key} is {config[key]!r}; {architecture} is supported with {supported}"
            )
    try:
        keys = _read_keys(config)
        shape = {name: getattr(keys, name) for name in Shape.model_fields}
        derived = {
            "attention_scale": keys.head_dim**-0.5,
            **family.read(keys, config),
        }
        return DecoderConfig(**shape, **derived)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise CorruptCheckpoint(f"config: {name}: {first['msg']} (found {first['input']!r})") from error


def _read_keys(config: Mapping[str, Any]) -> Keys:
    fields = {name: config[name] for name in Keys.model_fields if config.get(name) is not None}
    heads, hidden_size = config.get("num_attention_heads"), config.get("hidden_size")
    fields.setdefault("num_key_value_heads", heads)
    if "head_dim" not in fields and isinstance(heads, int) and isinstance(hidden_size, int) and heads > 0:
        fields["head_dim"] = hidden_size // heads
    keys = Keys.model_validate(fields)
    if keys.num_attention_heads % keys.num_key_value_heads:
        raise CorruptCheckpoint(
            f"config: num_attention_heads ({keys.num_attention_heads}) is no multiple of "
            f"num_key_value_heads ({keys.num_key_value_heads})"
        )
    return keys


def _alike(keys: Keys, layer_type: str) -> list[str]:
    """The types of layers that are all of one, in a family that knows no other."""
    types = [layer_type] * keys.num_hidden_layers
    if keys.layer_types not in (None, types):
        raise UnsupportedModel(
            f"config: layer_types is {keys.layer_types}; here every layer is a {layer_type}"
        )
    return types


def _listed(keys: Keys, default: Callable[[int], str]) -> list[str]:
    """The types of layers as `layer_types` lists them; default: the type of layer i, where it is absent."""
    types = keys.layer_types
    if types is None:
        return [default(i) for i in range(keys.num_hidden_layers)]
    if other := [layer_type for layer_type in types if layer_type not in (FULL, SLIDING)]:
        raise UnsupportedModel(f"config: layer_types has {other[0]!r}; supported are {FULL} and {SLIDING}")
    if len(types) != keys.num_hidden_layers:
        raise CorruptCheckpoint(
            f"config: layer_types has {len(types)} entries for {keys.num_hidden_layers} layers"
        )
    return types


def _layers(
    keys: Keys, types: Sequence[str], ropes: Sequence[RopeConfig], window: int | None
) -> tuple[LayerAttention, ...]:
    if SLIDING in types and window is None:
        raise CorruptCheckpoint("config: layer_types has sliding_attention, but there is no sliding_window")
    if window is not None and window >= keys.max_position_embeddings:
        window = None  # nothing is ever outside
    return tuple(
        LayerAttention(window=window if layer_type == SLIDING else None, rope=rope)
        for layer_type, rope in zip(types, ropes, strict=True)
    )


def _all_alike(keys: Keys, rope: RopeConfig, window: int | None = None) -> tuple[LayerAttention, ...]:
    types = _alike(keys, FULL if window is None else SLIDING)
    return _layers(keys, types, [rope] * len(types), window)


def _last_layers_sliding(keys: Keys, config: Mapping[str, Any]) -> tuple[LayerAttention, ...]:
    window = keys.sliding_window if keys.use_sliding_window else None
    types = _listed(keys, lambda i: SLIDING if window and i >= keys.max_window_layers else FULL)
    return _layers(keys, types, [read_rope(config, keys.head_dim)] * len(types), window)


def _attention_bias(keys: Keys) -> Mapping[str, Any]:
    return {"qkv_bias": keys.attention_bias, "o_bias": keys.attention_bias}


def _llama(keys: Keys, config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **_attention_bias(keys),
        "layers": _all_alike(keys, read_rope(config, keys.head_dim)),
        "mlp_bias": keys.mlp_bias,
    }


def _mistral(keys: Keys, config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"layers": _all_alike(keys, read_rope(config, keys.head_dim), keys.sliding_window)}


def _qwen2(keys: Keys, config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"layers": _last_layers_sliding(keys, config), "qkv_bias": True}


def _qwen3(keys: Keys, config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_attention_bias(keys), "layers": _last_layers_sliding(keys, config), "qk_norm": "head"}


def _smollm3(keys: Keys, config: Mapping[str, Any]) -> Mapping[str, Any]:
    window = keys.sliding_window if keys.use_sliding_window else None
    turns = keys.no_rope_layers  # 1 or 0: whether a layer has a rope
    if turns is None:
        turns = [int((i + 1) % keys.no_rope_layer_interval != 0) for i in range(keys.num_hidden_layers)]
    if len(turns) < keys.num_hidden_layers:
        raise CorruptCheckpoint(
            f"config: no_rope_layers has {len(turns)} entries for {keys.num_hidden_layers} layers"
        )
    rope = read_rope(config, keys.head_dim)
    ropes = [rope if turn else NO_ROPE for turn in turns[: keys.num_hidden_layers]]
    types = _listed(keys, lambda i: SLIDING if window and not turns[i] else FULL)
    layers = _layers(keys, types, ropes, window)
    return {**_attention_bias(keys), "layers": layers, "mlp_bias": keys.mlp_bias}


def _phi3(keys: Keys, config: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = rope_parameters(config)
    name = parameters.get("rope_type", parameters.get("type", "default"))
    if name in ("su", "yarn"):  # LongRoPE's first names
        parameters = {**parameters, "rope_type": "longrope"}
    elif name not in ("default", "longrope"):
        raise UnsupportedModel(f"config: rope_type is {name!r}; a Phi-3 has default or longrope")
    rope = read_rope({**config, "rope_scaling": parameters}, keys.head_dim, partial=True)
    return {"layers": _all_alike(keys, rope, keys.sliding_window), "fused_projections": True}


def _gemma2(keys: Keys, config: Mapping[str, Any]) -> Mapping[str, Any]:
    types = _listed(keys, lambda i: FULL if i % 2 else SLIDING)
    ropes = [read_rope(config, keys.head_dim)] * len(types)
    return {
        **_gemma(keys),
        "layers": _layers(keys, types, ropes, keys.sliding_window),
        "attention_softcap": keys.attn_logit_softcapping,
    }


def _gemma3(keys: Keys, config: Mapping[str, Any]) -> Mapping[str, Any]:
    types = _listed(keys, lambda i: SLIDING if (i + 1) % keys.sliding_window_pattern else FULL)
    ropes = read_ropes_of_layer_types(config, keys.head_dim, {FULL: 1_000_000.0, SLIDING: 10_000.0})
    layers = _layers(keys, types, [ropes[layer_type] for layer_type in types], keys.sliding_window)
    return {**_gemma(keys), "layers": layers, "qk_norm": "head"}


def _gemma(keys: Keys) -> Mapping[str, Any]:
    return {
        **_attention_bias(keys),
        "attention_scale": keys.query_pre_attn_scalar**-0.5,
        "norms": "around",
        "norm_offset": 1,
        "activation": "gelu_tanh",
        "embedding_scale": keys.hidden_size**0.5,
        "logit_softcap": keys.final_logit_softcapping,
    }


def _olmo2(keys: Keys, config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_llama(keys, config), "norms": "after", "qk_norm": "projection"}


_NO_BIAS = {"attention_bias": _OFF, "mlp_bias": _OFF}
_GEMMA_COMPUTED = {
    "hidden_act": ("gelu_pytorch_tanh", None),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": _OFF,
    "use_sliding_window": _OFF,
    "mlp_bias": _OFF,
}
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(_llama, computed={"use_sliding_window": _OFF}),
        "MistralForCausalLM": Family(
            _mistral,
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            computed={"use_sliding_window": _OFF, **_NO_BIAS},
        ),
        "Qwen2ForCausalLM": Family(
            _qwen2, defaults={"num_key_value_heads": 32, "sliding_window": 4096}, computed={"mlp_bias": _OFF}
        ),
        "Qwen3ForCausalLM": Family(
            _qwen3,
            defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
            computed={"mlp_bias": _OFF},
        ),
        "SmolLM3ForCausalLM": Family(
            _smollm3,
            defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        ),
        "Phi3ForCausalLM": Family(
            _phi3,
            defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
            computed={"use_sliding_window": _OFF, "lm_head_bias": _OFF, **_NO_BIAS},
        ),
        "Gemma2ForCausalLM": Family(
            _gemma2,
            defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            computed=_GEMMA_COMPUTED,
        ),
        "Gemma3ForCausalLM": Family(
            _gemma3,
            defaults=_GEMMA_DEFAULTS,
            # transformers reads the key and does not compute it: whose answer would be right?
            computed={**_GEMMA_COMPUTED, "attn_logit_softcapping": (None,)},
        ),
        "Olmo2ForCausalLM": Family(
            _olmo2,
            defaults={"rms_norm_eps": 1e-5},
            computed={"use_sliding_window": _OFF, "mlp_bias": _OFF},
        ),
    }
)
