"""PEFT's adapter_config.json: what an adapter's result needs of it, and a refusal of what motet does not compute.

Every field of PEFT 0.21's `LoraConfig` is one of these:

- read here: `_READ_HERE`;
- without effect on what a trained adapter computes: `_WITHOUT_EFFECT`;
- off (null, false, 0 or empty), as PEFT writes a feature that is not used;
- refused by its name. So is a field that a later PEFT adds and an adapter switches on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from motet.errors import AdapterLoadError, UnsupportedAdapter

CONFIG_NAME = "adapter_config.json"
MAX_RANK = 256
_MAX_CONFIG_BYTES = 1 << 20

_READ_HERE = frozenset(
    {
        "alpha_pattern",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_dora",
        "use_rslora",
    }
)
# Book-keeping, training, or the details of what other fields switch on. `fan_in_fan_out` is for GPT-2's layers:
# PEFT itself turns it off for all others.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
# The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base model's weights as well.
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")

Bias = Literal["none", "all", "lora_only"]
Names = tuple[str, ...]


@dataclass(frozen=True)
class PeftConfig:
    """What the result of a LoRA (arXiv 2106.09685) needs of its config. `motet.lora.targets` makes sense of it."""

    path: Path
    rank: int
    alpha: float
    rslora: bool
    """Scale by alpha / sqrt(rank) (arXiv 2312.03732), not by alpha / rank."""
    dora: bool
    """Weight-decomposed (arXiv 2402.09353)."""
    lora_bias: bool
    """B has a bias."""
    tied: bool
    """A tied output head gets the embedding's LoRA too."""
    bias: Bias
    """Which biases of the base model the adapter has its own of."""
    rank_pattern: Mapping[str, int]
    """{expression: rank}; the first that fits a module's path wins over `rank`."""
    alpha_pattern: Mapping[str, float]
    targets: str | Names | None
    """An expression for whole paths or the ends of paths; None: whatever the file holds."""
    excluded: str | Names
    layers: tuple[int, ...] | None
    """With targets as ends of paths: only in these layers. None: in all."""
    layer_lists: Names
    """Expressions for the names of the lists that `layers` counts in; empty: any."""


def read_peft_config(folder: Path) -> PeftConfig:
    """Reads `folder`/adapter_config.json.

    Raises `AdapterLoadError` if it is missing, damaged or contradicts itself, and `UnsupportedAdapter` if it
    switches on, by a known or an unknown field, what motet does not compute.
    """
    path = folder / CONFIG_NAME
    fields = _Fields(path, _read_object(path))
    fields.refuse_other_features()
    targets, layers = fields.names("target_modules"), fields.layers()
    layer_lists = fields.names("layers_pattern") or ()
    if isinstance(targets, str) and (layers is not None or layer_lists):
        raise AdapterLoadError(
            f"{path}: layers_to_transform and layers_pattern need target_modules as a list, not as an expression"
        )
    return PeftConfig(
        path=path,
        rank=fields.rank(),
        alpha=fields.number("lora_alpha", fields.required("lora_alpha")),
        rslora=fields.flag("use_rslora"),
        dora=fields.flag("use_dora"),
        lora_bias=fields.flag("lora_bias"),
        tied=fields.flag("ensure_weight_tying"),
        bias=fields.bias(),
        rank_pattern={key: fields.whole("rank_pattern", r) for key, r in fields.pattern("rank_pattern")},
        alpha_pattern={key: fields.number("alpha_pattern", x) for key, x in fields.pattern("alpha_pattern")},
        targets=targets,
        excluded=fields.names("exclude_modules") or (),
        layers=layers,
        layer_lists=(layer_lists,) if isinstance(layer_lists, str) else layer_lists,
    )


def _read_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise AdapterLoadError(
            f"there is no {path}: an adapter is a folder as PEFT's `save_pretrained` writes it, "
            "with adapter_config.json and adapter_model.safetensors"
        )
    with path.open("rb") as file:
        text = file.read(_MAX_CONFIG_BYTES + 1)
    if len(text) > _MAX_CONFIG_BYTES:
        raise AdapterLoadError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes: no PEFT config is")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterLoadError(f"{path} is not JSON: {error}. Save the adapter again") from error
    if not isinstance(config, dict):
        raise AdapterLoadError(f"{path} holds no JSON object of LoraConfig's fields. Save the adapter again")
    return config


@dataclass(frozen=True)
class _Fields:
    """The fields as JSON gives them, each taken out only in the shape that PEFT gives it."""

    path: Path
    values: Mapping[str, object]

    def refuse_other_features(self) -> None:
        peft_type = self.required("peft_type")
        if peft_type != "LORA":
            raise UnsupportedAdapter(f"{self.path}: peft_type {peft_type!r}, but motet serves 'LORA' only")
        init = self.values.get("init_lora_weights")
        if init is not None and init not in _PLAIN_INITS:
            raise UnsupportedAdapter(
                f"{self.path}: init_lora_weights = {_short(init)} has changed the base model's weights too. Save "
                "the adapter with `save_pretrained(..., path_initial_model_for_weight_conversion=...)`, which "
                "makes a plain LoRA of it"
            )
        for name, value in self.values.items():
            if value and name not in _READ_HERE and name not in _WITHOUT_EFFECT:
                raise UnsupportedAdapter(
                    f"{self.path}: {name} = {_short(value)} asks for a PEFT feature that motet does not compute. "
                    "See docs/adapters.md for those that it does, and train the adapter without this one"
                )

    def required(self, name: str) -> object:
        if name not in self.values:
            raise AdapterLoadError(
                f"{self.path} lacks {name!r}: it is no config of a PEFT adapter, or not a whole one"
            )
        return self.values[name]

    def rank(self) -> int:
        return self.whole("r", self.required("r"))

    def whole(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise AdapterLoadError(
                f"{self.path}: {name} = {_short(value)}, but a rank is an integer of at least 1"
            )
        return value

    def number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
            raise AdapterLoadError(f"{self.path}: {name} = {_short(value)}, expected a finite number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name) or False
        if not isinstance(value, bool):
            raise AdapterLoadError(f"{self.path}: {name} = {_short(value)}, expected true or false")
        return value

    def bias(self) -> Bias:
        value = self.values.get("bias") or "none"
        if value not in ("none", "all", "lora_only"):
            raise UnsupportedAdapter(
                f"{self.path}: bias = {_short(value)}; motet knows 'none', 'all' and 'lora_only'"
            )
        return value

    def pattern(self, name: str) -> list[tuple[str, object]]:
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise AdapterLoadError(
                f"{self.path}: {name} = {_short(value)}, expected an object of expressions and numbers"
            )
        return list(value.items())

    def names(self, name: str) -> str | Names | None:
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(x, str) for x in value):
            return tuple(value)
        raise AdapterLoadError(
            f"{self.path}: {name} = {_short(value)}, expected a string or a list of strings"
        )

    def layers(self) -> tuple[int, ...] | None:
        value = self.values.get("layers_to_transform")
        if value is None or value == []:
            return None
        layers = value if isinstance(value, list) else [value]
        if any(isinstance(x, bool) or not isinstance(x, int) for x in layers):
            raise AdapterLoadError(
                f"{self.path}: layers_to_transform = {_short(value)}, expected an integer or a list of them"
            )
        return tuple(layers)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
