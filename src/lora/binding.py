"""Which tensor of an adapter's file belongs to which module of the model: every key bound, every promise kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from motet.errors import AdapterLoadError, UnsupportedAdapter
from motet.lora.peft_config import PeftConfig
from motet.lora.refusals import listed
from motet.lora.sites import Projection
from motet.lora.targets import Target, find_targets

# Each part of a module's adapter by the end of its key. PEFT leaves the adapter's name out of keys, other tools
# do not.
_NAME = r"(?:\.(?!weight$)[^.]+)?"
_PARTS = {
    part: re.compile(rf"(?P<module>.+?)(?:\.base_layer)?\.{end}")
    for part, end in {
        "lora_A": rf"lora_A{_NAME}\.weight",
        "lora_B": rf"lora_B{_NAME}\.weight",
        "lora_B.bias": rf"lora_B{_NAME}\.bias",
        "lora_magnitude_vector": rf"lora_magnitude_vector{_NAME}(?:\.weight)?",
        "lora_embedding_A": rf"lora_embedding_A{_NAME}",
        "lora_embedding_B": rf"lora_embedding_B{_NAME}",
        "bias": "bias",
        "weight": "weight",
    }.items()
}
_PARTS_OF_ROLE = {
    "layer": {"lora_A", "lora_B", "lora_B.bias", "lora_magnitude_vector", "bias"},
    "head": {"lora_A", "lora_B", "lora_B.bias", "lora_magnitude_vector", "bias", "weight"},
    "embedding": {"lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "weight"},
}
_FOREIGN_KEYS = (
    ("modules_to_save.", "modules_to_save"),
    ("trainable_tokens_", "trainable_token_indices"),
    ("lora_embedding_", "LoRA of an embedding"),
    ("embed_tokens.", "LoRA or new weights of the embedding"),
    ("lm_head.", "LoRA or new weights of the output head"),
)
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Parts = dict[str, str]
"""{part: key} of one module."""


@dataclass(frozen=True)
class BoundModule:
    """One module that the adapter's file holds tensors of."""

    projection: Projection
    parts: Parts
    target: Target | None
    """None: it has no LoRA, only a bias of its own or a copy of the base model's weight."""


def bind(
    file: Path, keys: Iterable[str], config: PeftConfig, modules: Mapping[str, Projection]
) -> list[BoundModule]:
    """What the file holds of each module, in the order of their paths.

    Raises `AdapterLoadError`, listing the keys, if one binds to nothing or twice, or if the config promises
    what the file lacks; `UnsupportedAdapter`, naming the feature, for what motet does not compute.
    """
    bound, headless = _bind_keys(file, sorted(keys), modules)
    if not bound:
        raise AdapterLoadError(f"{file} holds no tensor: the adapter was not saved as a whole. Save it again")

    # Trained on the decoder without its head, the config's names do not begin with "model.".
    def own(path: str) -> str:
        return path.removeprefix("model.") if headless else path

    targets = find_targets(
        config,
        (own(path) for path, m in modules.items() if m.site.role == "layer"),
        (own(path) for path, m in modules.items() if m.site.role != "layer"),
        (own(path) for path, parts in bound.items() if not parts.keys() <= {"bias", "weight"}),
    )
    if not targets:
        raise AdapterLoadError(
            f"{config.path}: target_modules fits no module of this model, so {file.name} has no LoRA for it"
        )
    found = [
        BoundModule(m, bound.get(path, {}), targets.get(own(path)))
        for path, m in sorted(modules.items())
        if path in bound or own(path) in targets
    ]
    _check_promises(file, config, found, modules)
    return found


def _bind_keys(
    file: Path, keys: list[str], modules: Mapping[str, Projection]
) -> tuple[dict[str, Parts], bool]:
    """({path: Parts}, whether the keys' paths lack the "model." of the model's own)."""
    bound: dict[str, Parts] = {}
    strange, doubled, headless = [], [], True
    for key in keys:
        place = _place(key, modules)
        if place is None:
            _refuse_foreign(file, key, modules)
            strange.append(key)
            continue
        written, path, part = place
        headless &= written != path
        if part in bound.setdefault(path, {}):
            doubled.append(key)
        bound[path][part] = key
    if strange:
        kinds = sorted({path.rpartition(".")[2] for path in modules})
        raise AdapterLoadError(
            f"{file}: {listed(strange)} bind to nothing in this model: the adapter was made for another. "
            f"The modules of this model that can be adapted are called {', '.join(kinds)}"
        )
    if doubled:
        raise AdapterLoadError(f"{file}: {listed(doubled)} bind where other keys bind already")
    return bound, headless


def _place(key: str, modules: Mapping[str, Projection]) -> tuple[str, str, str] | None:
    """(module's path as the key has it, as the model has it, part)."""
    for part, expression in _PARTS.items():
        if match := expression.fullmatch(key):
            written = _without_wrappers(match["module"])
            for path in (written, f"model.{written}"):
                if path in modules and part in _PARTS_OF_ROLE[modules[path].site.role]:
                    return written, path, part
    return None


def _without_wrappers(path: str) -> str:
    while path.startswith("base_model.model."):
        path = path.removeprefix("base_model.model.")
    return path


def _refuse_foreign(file: Path, key: str, modules: Mapping[str, Projection]) -> None:
    for mark, feature in _FOREIGN_KEYS:
        if mark in key:
            raise UnsupportedAdapter(f"{file}: {key} is {feature}, which motet does not compute here")
    for fused, parts in _FUSED.items():
        for theirs, ours in ((fused, parts), *((part, (fused,)) for part in parts)):
            before, found, _ = _without_wrappers(key).partition(f".{theirs}.")
            if found and any(f"{m}{before}.{ours[0]}" in modules for m in ("", "model.")):
                raise UnsupportedAdapter(
                    f"{file}: {key} adapts {theirs}, where this model has {', '.join(ours)}. The file does not "
                    "say in which order the fused projection holds its parts: train the adapter on this model"
                )


def _check_promises(
    file: Path, config: PeftConfig, found: list[BoundModule], modules: Mapping[str, Projection]
) -> None:
    missing, extra = [], []
    for module in found:
        promised = _promised(config, module)
        missing += [f"{part} of {module.projection.path}" for part in sorted(promised - module.parts.keys())]
        extra += [key for part, key in module.parts.items() if part not in promised | {"weight"}]
    if config.bias == "all":
        held = {module.projection.path for module in found}
        missing += [
            f"bias of {path}" for path, m in modules.items() if m.bias is not None and path not in held
        ]
    if missing:
        raise AdapterLoadError(
            f"{file} lacks what {config.path.name} promises: {listed(missing)}. It is not whole, or the config is "
            "another adapter's"
        )
    if extra:
        raise AdapterLoadError(
            f"{file}: {listed(extra)} would be left out, as {config.path.name} does not promise any such tensor: it "
            "is another adapter's, or was changed"
        )


def _promised(config: PeftConfig, module: BoundModule) -> set[str]:
    """The parts that the config says the module has."""
    promised = set()
    if module.target is not None and module.projection.site.role == "embedding":
        features = {
            "use_dora": config.dora,
            "lora_bias": config.lora_bias,
            "ensure_weight_tying": config.tied,
        }
        if on := [name for name in features if features[name]]:
            raise UnsupportedAdapter(f"{config.path}: {on[0]} of an embedding, which motet does not compute")
        promised |= {"lora_embedding_A", "lora_embedding_B"}
    elif module.target is not None:
        promised |= {"lora_A", "lora_B"}
        promised |= {"lora_B.bias"} if config.lora_bias else set()
        promised |= {"lora_magnitude_vector"} if config.dora else set()
    own_bias = config.bias == "all" or (config.bias == "lora_only" and module.target is not None)
    if own_bias and module.projection.bias is not None:
        promised.add("bias")
    return promised
