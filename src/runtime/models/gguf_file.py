"""GGUFFile: a checkpoint in one GGUF file, llama.cpp's format, told in Hugging Face's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from motet.errors import CorruptCheckpoint, UnsupportedModel
from motet.runtime.chat_template import ChatTemplate
from motet.runtime.models.checkpoint import StoredTensor
from motet.runtime.models.gguf_config import hf_config
from motet.runtime.models.gguf_reader import MappedGGUFReader
from motet.runtime.models.gguf_tensors import READERS, stored_tensor
from motet.runtime.tokenizer import TokenizerSource

_TENSORS = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_ROPE_DIVISORS = "rope_freqs.weight"


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
        divisors = stored.pop(_ROPE_DIVISORS, None)
        self.config: Mapping[str, Any] = hf_config(
            self.metadata,
            shapes={name: tuple(map(int, reversed(tensor.shape))) for name, tensor in stored.items()},
            rope_divisors=None if divisors is None else tuple(divisors.data.tolist()),
        )
        self.tensors: Mapping[str, StoredTensor] = {
            hf_name(name): stored_tensor(tensor, self._restore(name)) for name, tensor in stored.items()
        }

    def tokenizer(self) -> TokenizerSource:
        return TokenizerSource.from_gguf(self.metadata)

    def chat_template(self) -> ChatTemplate | None:
        return ChatTemplate.from_gguf(self.metadata)

    def _restore(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """What undoes the permutation of llama's q and k, done where llama.cpp rotates neighbours."""
        if self.metadata["general.architecture"] != "llama" or not re.search(r"\.attn_[qk]\.", name):
            return None
        heads: int = self.config.get("num_attention_heads", 1)
        kv_heads: int = self.config.get("num_key_value_heads", heads)
        return partial(_restore_halves, heads=heads if ".attn_q." in name else kv_heads)


def hf_name(name: str) -> str:
    """ "blk.0.attn_q.weight" -> "model.layers.0.self_attn.q_proj.weight"; an unknown name stays as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _TENSORS:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_TENSORS[match[2]]}.{match[3]}"


def _restore_halves(values: Tensor, heads: int) -> Tensor:
    """Undoes llama.cpp's permutation: a head's dimensions 2i and 2i + 1 go back to i and i + head_dim / 2."""
    pairs = values.view(heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
