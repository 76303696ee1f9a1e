"""HFFolder: a checkpoint as `save_pretrained` writes it: config.json and safetensors, whole or sharded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from motet.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from motet.runtime.chat_template import ChatTemplate
from motet.runtime.models.checkpoint import StoredTensor
from motet.runtime.tokenizer import Tokenizer


class HFFolder:
    """`Checkpoint` of a folder. Raises `ModelNotFound`, `CorruptCheckpoint` or `UnsupportedModel`."""

    dtypes: ClassVar[tuple[str, ...]] = ("F64", "F32", "F16", "BF16")

    def __init__(self, path: Path) -> None:
        self._path = path
        _check_is_not_gguf(path)
        if not (path / "config.json").is_file():
            raise ModelNotFound(
                "the folder has no config.json; a Hugging Face model folder or a .gguf file is expected"
            )
        self.config: Mapping[str, Any] = _read_object(path / "config.json")
        self.generation_config: Mapping[str, Any] = _read_optional(path / "generation_config.json")
        self.tensors: Mapping[str, StoredTensor] = dict(_open_shards(path))

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self._path)

    def chat_template(self) -> ChatTemplate | None:
        return ChatTemplate.from_folder(self._path, _read_optional(self._path / "tokenizer_config.json"))


def _check_is_not_gguf(path: Path) -> None:
    found = sorted(file.name for file in path.glob("*.gguf"))
    if found and not any(path.glob("*.safetensors")):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UnsupportedModel(
            f"the folder has no safetensors, but GGUF files ({found[0]}{more}): pass the path of one instead"
        )


def _open_shards(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    if (path / "model.safetensors").is_file():
        yield from _open_safetensors(path / "model.safetensors")
        return
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        _explain_missing_weights(path)
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptCheckpoint(f"{index.name} has no weight_map object")
    found: set[str] = set()
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard or not (path / shard).is_file():
            raise CorruptCheckpoint(f"the shard {shard}, which {index.name} names, is not in the folder")
        for name, tensor in _open_safetensors(path / shard):
            if name in found:
                raise CorruptCheckpoint(f"two shards hold the tensor {name}")
            found.add(name)
            yield name, tensor
    for name, shard in weight_map.items():
        if name not in found:
            raise CorruptCheckpoint(f"the tensor {name} is not in {shard}, where {index.name} says it is")


def _open_safetensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping: it has only this method)
                view = file.get_slice(name)
                yield name, _stored(view.get_dtype(), file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpoint(f"{path.name} is damaged or cut short ({error}); fetch it again") from error


def _stored(dtype: str, tensor: torch.Tensor) -> StoredTensor:
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return StoredTensor(dtype, tuple(tensor.shape), raw, read=lambda: tensor)


def _read_optional(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return _read_object(path) if path.is_file() else {}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptCheckpoint(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{path.name} holds {type(content).__name__}, not an object")
    return content


def _explain_missing_weights(path: Path) -> NoReturn:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickled:
        raise UnsupportedModel(
            f"the weights are pickled ({pickled[0]}), and motet opens no pickle, since that can run any code. If "
            'you trust them, convert them once: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{path}', dtype='auto').save_pretrained('{path}-safetensors')\""
        )
    raise CorruptCheckpoint("there is neither model.safetensors nor model.safetensors.index.json")
