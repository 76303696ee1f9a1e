"""PEFT's adapter_config.json: what a LoRA's result needs, and a refusal of what motet does not compute."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from motet.errors import AdapterLoadError, UnsupportedAdapter

CONFIG_NAME = "adapter_config.json"
MAX_RANK = 256
_MAX_CONFIG_BYTES = 1 << 20

# Keys whose value cannot change what a trained adapter computes: book-keeping, training, or the details of
# features that other keys switch on.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
_READ_HERE = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "target_modules"})
# The other ways to initialise (PiSSA, OLoRA, CorDA, LoftQ, ...) change the base model's weights as well.
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class PeftConfig:
    """What a LoRA's result needs of its config.

    `scaling` is lora_alpha / r (arXiv 2106.09685), with `use_rslora` lora_alpha / sqrt(r) (arXiv 2312.03732).
    `targets` are the entries of a `target_modules` list; empty if that is an expression or absent.
    """

    rank: int
    scaling: float
    targets: tuple[str, ...]


def read_peft_config(folder: Path) -> PeftConfig:
    """Reads `folder`/adapter_config.json.

    Raises `AdapterLoadError` if it is missing or damaged and `UnsupportedAdapter` if it switches on, by a
    known or an unknown key, anything but a plain LoRA.
    """
    path = folder / CONFIG_NAME
    config = _read_object(path)
    _refuse_other_features(path, config)
    rank = _required(path, config, "r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterLoadError(f"{path}: r = {rank!r}, but a rank is an integer of at least 1")
    if rank > MAX_RANK:
        raise UnsupportedAdapter(f"{path}: rank {rank}, but motet computes ranks up to {MAX_RANK}")
    rslora = config.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise AdapterLoadError(f"{path}: use_rslora = {rslora!r}, expected true or false")
    scaling = _alpha(path, config) / (math.sqrt(rank) if rslora else rank)
    return PeftConfig(rank, scaling, _targets(path, config))


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


def _refuse_other_features(path: Path, config: Mapping[str, object]) -> None:
    peft_type = _required(path, config, "peft_type")
    if peft_type != "LORA":
        raise UnsupportedAdapter(f"{path}: peft_type {peft_type!r}, but motet serves 'LORA' only")
    for key, value in config.items():
        # PEFT switches every feature off by a null, false, 0 or empty value; so will those to come.
        if not value or key in _READ_HERE or key in _WITHOUT_EFFECT or (key, value) == ("bias", "none"):
            continue
        if key == "init_lora_weights" and value in _PLAIN_INITS:
            continue
        raise UnsupportedAdapter(
            f"{path}: {key} = {_short(value)} asks for a PEFT feature that motet does not compute. "
            "It serves plain LoRA of the attention and MLP projections: train the adapter without it"
        )


def _required(path: Path, config: Mapping[str, object], key: str) -> object:
    if key not in config:
        raise AdapterLoadError(f"{path} lacks {key!r}: it is no config of a PEFT adapter, or not a whole one")
    return config[key]


def _alpha(path: Path, config: Mapping[str, object]) -> float:
    alpha = _required(path, config, "lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) < 1e30:
        raise AdapterLoadError(f"{path}: lora_alpha = {_short(alpha)}, expected a finite number")
    return float(alpha)


def _targets(path: Path, config: Mapping[str, object]) -> tuple[str, ...]:
    targets = config.get("target_modules")
    if targets is None or isinstance(targets, str):
        return ()
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise AdapterLoadError(
            f"{path}: target_modules = {_short(targets)}, expected a string or a list of strings"
        )
    return tuple(targets)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
