"""DecoderConfig: what `config.json` says of a Llama-like decoder, checked.

What `decoder.py` does not compute is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from motet.errors import CorruptCheckpoint, UnsupportedModel
from motet.runtime.models.rope import SUPPORTED_ROPE_TYPES, RopeConfig, read_rope

SUPPORTED = (
    "supported are silu, full attention, "
    f"rope {' or '.join(SUPPORTED_ROPE_TYPES)}, and weights that are not quantised"
)

_COMPUTED = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "pretraining_tp": (1, None),
}
"""Keys that change what a model computes, and the values for which `decoder.py` is right. Absent is fine."""

Count = Annotated[int, Field(gt=0)]


class DecoderConfig(BaseModel):
    """The shape of a decoder, in the names of `config.json` where that has one."""

    model_config = ConfigDict(frozen=True, strict=True)

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    max_position_embeddings: Count
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope: RopeConfig

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `config.json` as transformers does, defaults included.

        Raises `UnsupportedModel` for a feature outside the above, `CorruptCheckpoint` for a value that
        makes no sense.
        """
        _refuse_what_is_not_computed(config)
        fields = {name: config[name] for name in cls.model_fields if config.get(name) is not None}
        try:
            result = cls.model_validate(fields | _derived(config))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise CorruptCheckpoint(f"config: {name}: {first['msg']} (found {first['input']!r})") from error
        if result.num_attention_heads % result.num_key_value_heads:
            raise CorruptCheckpoint(
                f"config: num_attention_heads ({result.num_attention_heads}) is no multiple of "
                f"num_key_value_heads ({result.num_key_value_heads})"
            )
        if result.rope.divisors is not None and len(result.rope.divisors) != result.head_dim // 2:
            raise CorruptCheckpoint(
                f"config: {len(result.rope.divisors)} rope frequency divisors; "
                f"a head of {result.head_dim} dimensions needs {result.head_dim // 2}"
            )
        return result


def _refuse_what_is_not_computed(config: Mapping[str, Any]) -> None:
    for key, computed in _COMPUTED.items():
        if key in config and config[key] not in computed:
            raise UnsupportedModel(f"config: {key} is {config[key]!r}; {SUPPORTED}")
    for layer_type in config.get("layer_types") or ():
        if layer_type != "full_attention":
            raise UnsupportedModel(f"config: layer_types has {layer_type!r}; {SUPPORTED}")


def _derived(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `config.json` names otherwise, leaves out, or leaves to the architecture."""
    qwen2 = config["architectures"][0] == "Qwen2ForCausalLM"
    attention_bias = config.get("attention_bias", False)
    derived = {
        "qkv_bias": True if qwen2 else attention_bias,
        "o_bias": False if qwen2 else attention_bias,
        "mlp_bias": False if qwen2 else config.get("mlp_bias", False),
        "rope": read_rope(config),
    }
    heads, hidden_size = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("num_key_value_heads") is None:
        derived["num_key_value_heads"] = heads
    if config.get("head_dim") is None:
        derived["head_dim"] = _quotient(hidden_size, heads)
    return derived


def _quotient(a: object, b: object) -> int | None:
    """None where there is none; then what `a` or `b` lacks is reported of them."""
    return a // b if isinstance(a, int) and isinstance(b, int) and b > 0 else None
