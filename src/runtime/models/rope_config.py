"""read_rope: what `config.json` says of the rope, in the spellings of all years."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from motet.errors import CorruptCheckpoint, UnsupportedModel
from motet.runtime.models.rope import (
    FREQUENCY_DIVISORS,
    AnyScaling,
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)

Parameters = Mapping[str, Any]

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_number, value))


_NUMBERS = (
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
_CHECKS: Mapping[str, Callable[[object], bool]] = MappingProxyType(
    {
        **dict.fromkeys(("rope_type", "type"), lambda value: isinstance(value, str)),
        **dict.fromkeys(("truncate", "finetuned"), lambda value: isinstance(value, bool)),
        **dict.fromkeys(("short_factor", "long_factor", "divisors"), _is_list),
        **dict.fromkeys(_NUMBERS, _is_number),
    }
)
"""What may stand in a rope's parameters. Another key may change the turns in a way that is not computed here."""


def rope_parameters(config: Parameters) -> Parameters:
    """`rope_parameters`, or the older `rope_scaling`, of a `config.json`; empty where it has neither."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise CorruptCheckpoint(f"config: rope_parameters is {parameters!r}; an object is needed")
    return parameters


def read_rope(config: Parameters, head_dim: int, *, partial: bool = False) -> RopeConfig:
    """The one rope of a `config.json`; what is absent is filled in as transformers does.

    partial: whether the architecture can turn a part of each head. Raises `UnsupportedModel` for what is not
    computed, pydantic's `ValidationError` or `CorruptCheckpoint` for values that make no sense.
    """
    parameters = rope_parameters(config)
    theta = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    return _make_rope(config, parameters, theta, head_dim, partial=partial)


def read_ropes_of_layer_types(
    config: Parameters, head_dim: int, default_thetas: Mapping[str, float]
) -> dict[str, RopeConfig]:
    """Each layer type's rope, of a `config.json` as Gemma 3 writes it, today or in its first version."""
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not all(isinstance(x or {}, Mapping) for x in nested.values()):
        raise CorruptCheckpoint(
            f"config: rope_parameters is {nested!r}; an object for each of {', '.join(default_thetas)} is needed"
        )
    if strange := nested.keys() - default_thetas.keys():
        raise UnsupportedModel(f"config: rope_parameters has {sorted(strange)[0]!r}, which is no layer type")
    thetas = {
        "full_attention": config.get("rope_theta"),
        "sliding_attention": config.get("rope_local_base_freq"),
    }
    ropes = {}
    for layer_type, default in default_thetas.items():
        parameters = nested.get(layer_type) or {"rope_type": "default"}
        if layer_type == "full_attention":
            parameters = {**parameters, **rope_parameters({"rope_scaling": config.get("rope_scaling")})}
        theta = parameters.get("rope_theta", default if thetas[layer_type] is None else thetas[layer_type])
        ropes[layer_type] = _make_rope(config, parameters, theta, head_dim)
    return ropes


def _make_rope(
    config: Parameters, parameters: Parameters, theta: Any, head_dim: int, *, partial: bool = False
) -> RopeConfig:
    """The rope of one `rope_parameters` object; config: the whole, for what it says beside it."""
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "dynamic":
        raise UnsupportedModel(
            "config: rope_type is 'dynamic', whose turns depend on the current length, so that keys could not "
            f"be cached exactly; supported are {', '.join(ROPE_TYPES)}"
        )
    if not isinstance(rope_type, str) or rope_type not in _SCALINGS:
        raise UnsupportedModel(f"config: rope_type is {rope_type!r}; supported are {', '.join(ROPE_TYPES)}")
    parameters = {key: value for key, value in parameters.items() if value is not None}
    for key, value in parameters.items():
        if key not in _CHECKS:
            raise UnsupportedModel(f"config: rope_parameters has {key!r}, which is not computed")
        if not _CHECKS[key](value):
            raise CorruptCheckpoint(f"config: rope_parameters: {key} is {value!r}, which makes no sense")
    read = _SCALINGS[rope_type]
    scaling = None if read is None else read(config, parameters)
    max_length = None
    if rope_type == "longrope" and not _is_long(config, parameters):
        max_length = int(_original_length(config, parameters))
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1) and not partial:
        raise UnsupportedModel(f"config: partial_rotary_factor is {share}; here only whole heads (1.0) turn")
    if share is not None and not (_is_number(share) and 0 < share <= 1):
        raise CorruptCheckpoint(f"config: partial_rotary_factor is {share!r}; a share of the head is needed")
    rotary_dim = head_dim if share is None else int(head_dim * share)
    return RopeConfig(rotary_dim=rotary_dim, theta=theta, max_length=max_length, scaling=scaling)


def _original_length(config: Parameters, parameters: Parameters) -> float:
    """What the rope was first trained for; a key of the whole config goes before one of its rope's."""
    length = config.get("original_max_position_embeddings")
    if length is None:
        length = parameters.get("original_max_position_embeddings", config["max_position_embeddings"])
    if not _is_number(length) or length <= 1:
        raise CorruptCheckpoint(f"config: original_max_position_embeddings is {length!r}; a length is needed")
    return float(length)


def _is_long(config: Parameters, parameters: Parameters) -> bool:
    return (config.get("max_model_len") or 0) > _original_length(config, parameters)


def _linear(config: Parameters, parameters: Parameters) -> AnyScaling:
    return LinearScaling.model_validate({"factor": parameters.get("factor")})


def _divisors(config: Parameters, parameters: Parameters) -> AnyScaling:
    return DivisorScaling(divisors=tuple(parameters.get("divisors", ())))


def _llama3(config: Parameters, parameters: Parameters) -> AnyScaling:
    return Llama3Scaling.model_validate(
        {**parameters, "original_max_position_embeddings": _original_length(config, parameters)}
    )


def _yarn(config: Parameters, parameters: Parameters) -> AnyScaling:
    original = _original_length(config, parameters)
    factor = parameters.get("factor", config["max_position_embeddings"] / original)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    default = magnitude(1.0)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        default = magnitude(parameters["mscale"]) / magnitude(parameters["mscale_all_dim"])
    return YarnScaling(
        magnitude=parameters.get("attention_factor", default),
        factor=factor,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=parameters.get("truncate", True),
        original_max_position_embeddings=original,
    )


def _longrope(config: Parameters, parameters: Parameters) -> AnyScaling:
    """One of its two sets of frequencies.

    transformers turns a sequence by the short ones up to the original context, and by the long ones, all its tokens
    from the first on, as soon as it is longer; keys that are already cached cannot follow. So the short ones serve,
    and sequences end at the original context (`RopeConfig.max_length`), unless longer ones were asked for: then
    the long ones serve, exactly for those whose prompt is longer than the original context.
    """
    original = _original_length(config, parameters)
    factor = parameters.get("factor", config["max_position_embeddings"] / original)
    factors = "long_factor" if _is_long(config, parameters) else "short_factor"
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return DivisorScaling(
        magnitude=parameters.get("attention_factor", default),
        divisors=tuple(parameters.get(factors, ())),
    )


_SCALINGS: Mapping[str, Callable[[Parameters, Parameters], AnyScaling] | None] = MappingProxyType(
    {
        "default": None,
        "linear": _linear,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
        FREQUENCY_DIVISORS: _divisors,
    }
)
