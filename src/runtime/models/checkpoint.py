"""Checkpoint: one face for every file format that a model can be loaded from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from motet.kernels.ops import Blocks
from motet.runtime.chat_template import ChatTemplate
from motet.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class StoredTensor:
    """A tensor where it lies in the file, memory-mapped: nothing is read before it is asked for."""

    dtype: str
    """In the format's own words: "BF16", "Q4_1", ..."""

    shape: tuple[int, ...]

    raw: npt.NDArray[np.uint8]
    """The bytes of the file, in one dimension."""

    read: Callable[[], Tensor]
    """The values, [shape] in a floating dtype; may share the file's memory."""

    blocks: Callable[[], Blocks] | None = None
    """The same in the file's own codes, where a backend may compute with these; may share the file's memory."""


class Checkpoint(Protocol):
    """A model's files, spoken of in Hugging Face's words whatever the format."""

    config: Mapping[str, Any]
    """As in `config.json`."""

    generation_config: Mapping[str, Any]
    """As in `generation_config.json`; empty where there is none."""

    tensors: Mapping[str, StoredTensor]
    """By the names that transformers gives them."""

    dtypes: ClassVar[tuple[str, ...]]
    """The `StoredTensor.dtype`s that can be read."""

    def tokenizer(self) -> Tokenizer: ...

    def chat_template(self) -> ChatTemplate | None: ...
