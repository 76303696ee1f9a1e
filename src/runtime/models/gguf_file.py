"""GGUFFile: a checkpoint in one GGUF file, llama.cpp's format, told in Hugging Face's words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from motet.errors import CorruptCheckpoint, UnsupportedModel
from motet.runtime.chat_template import ChatTemplate
from motet.runtime.models.checkpoint import StoredTensor
from motet.runtime.models.gguf_architecture import GGUF_ARCHITECTURES
from motet.runtime.models.gguf_config import ROPE_TENSORS, hf_config
from motet.runtime.models.gguf_reader import MappedGGUFReader
from motet.runtime.models.gguf_tensors import READERS, stored_tensor
from motet.runtime.tokenizer import Tokenizer


class GGUFFile:
    """`Checkpoint` of a `.gguf` file. Raises `CorruptCheckpoint` or `UnsupportedModel`."""

    dtypes: ClassVar[tuple[str, ...]] = tuple(READERS)

    def __init__(self, path: Path) -> None:
        try:
            # Copy-on-write: torch wants memory that could be written to; nobody does.
            reader = MappedGGUFReader(path, mode="c")
            self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # upstream lets whatever its arithmetic on damaged bytes raises escape
            raise CorruptCheckpoint(
                f"not a GGUF file, or damaged, or cut short ({type(error).__name__}: {error}); fetch it again"
            ) from error
        if reader.byte_order != "I":
            raise UnsupportedModel(
                "the file's byte order is not this machine's; convert it with gguf-convert-endian"
            )
        self.generation_config: Mapping[str, Any] = {}
        stored = {tensor.name: tensor for tensor in reader.tensors}
        ropes = {name: tuple(stored.pop(name).data.tolist()) for name in ROPE_TENSORS if name in stored}
        shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in stored.items()}
        self.config: Mapping[str, Any] = hf_config(self.metadata, shapes, ropes)
        written = GGUF_ARCHITECTURES[self.metadata["general.architecture"]]
        heads, kv_heads = (self.config.get(f"num_{which}_heads") or 1 for which in ("attention", "key_value"))
        self.tensors: Mapping[str, StoredTensor] = {
            written.hf_name(name): stored_tensor(tensor, written.restore(name, heads, kv_heads))
            for name, tensor in stored.items()
        }

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self.metadata)

    def chat_template(self) -> ChatTemplate | None:
        return ChatTemplate.from_gguf(self.metadata)
