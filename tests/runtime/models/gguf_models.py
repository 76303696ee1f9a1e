"""Writes transformers' models as GGUF files with the `gguf` library, as llama.cpp's converter would."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.gguf.dequant import dequantize

from motet.runtime.models.gguf_reader import MappedGGUFReader

QuantisationType = gguf.GGMLQuantizationType
K_SCALES = {QuantisationType.Q4_K: (0, 2), QuantisationType.Q5_K: (0, 2), QuantisationType.Q6_K: (208,)}
"""Types that the `gguf` library reads but does not write, and where in a block their float16 scales lie."""


def pack(weight: torch.Tensor, kind: QuantisationType) -> npt.NDArray[Any]:
    """weight [N, K] as rows of blocks. Of a type in `K_SCALES`: arbitrary blocks, the same for the same row."""
    if kind not in K_SCALES:
        packed: npt.NDArray[Any] = gguf.quants.quantize(weight.numpy(), kind)
        return packed
    values_per_block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = []
    for row in weight.numpy():
        generator = np.random.default_rng(zlib.crc32(row.tobytes()))
        blocks = generator.integers(256, size=(len(row) // values_per_block, size), dtype=np.uint8)
        for at in K_SCALES[kind]:
            blocks[:, at : at + 2] = np.array([1e-4], np.float16).view(np.uint8)
        rows.append(blocks.reshape(-1))
    return np.stack(rows)


def unpack(packed: npt.NDArray[Any], kind: QuantisationType) -> torch.Tensor:
    """The values, by transformers' own arithmetic for what the `gguf` library cannot write itself."""
    if kind not in K_SCALES:
        return torch.from_numpy(gguf.quants.dequantize(packed, kind).copy())
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = torch.from_numpy(packed.reshape(-1, size))
    return dequantize(blocks, int(kind)).reshape(len(packed), -1)


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k of a Llama: halves become neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    hf_model: Any,
    *,
    weight_type: QuantisationType = QuantisationType.F32,
    embedding_type: QuantisationType | None = None,
    metadata: Mapping[str, object] | None = None,
    rope_divisors: torch.Tensor | None = None,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
) -> Path:
    """Two-dimensional weights are stored as `weight_type`, the rest as F32. metadata: added, or None to leave out."""
    config = hf_model.config
    architecture = config.model_type
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.LLAMA if architecture == "llama" else gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers
    )
    tensors = {}
    for name, parameter in hf_model.named_parameters():
        tensor = parameter.detach()
        if architecture == "llama" and ".q_proj." in name:
            tensor = permute(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = permute(tensor, config.num_key_value_heads)
        stem, _, kind = name.rpartition(".")
        tensors[f"{names.get_name(stem)}.{kind}"] = tensor
    if rope_divisors is not None:
        tensors["rope_freqs.weight"] = rope_divisors
    change(tensors)

    tokens = [f"t{i}" for i in range(config.vocab_size)]
    fields: dict[str, object] = {
        "general.type": "model",
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 2,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (fields | dict(metadata or {})).items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        kind = QuantisationType.F32
        if tensor.ndim == 2:
            kind = embedding_type if embedding_type and name == "token_embd.weight" else weight_type
        writer.add_tensor(name, pack(tensor, kind) if tensor.ndim == 2 else tensor.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)


def round_trip(hf_model: Any, weight_type: QuantisationType) -> Any:
    """The same model with every matrix as its GGUF form gives it back."""
    for parameter in hf_model.parameters():
        if parameter.ndim == 2:
            # Along rows, so permuting rows before or after is one.
            parameter.data = unpack(pack(parameter.detach(), weight_type), weight_type)
    return hf_model


def smollm2_from_gguf(path: Path) -> Any:
    """SmolLM2-135M in transformers, from a GGUF file: `from_pretrained(gguf_file=...)` in a tenth of its time."""
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    hf_model = LlamaForCausalLM(config).eval()
    stored = {tensor.name: tensor for tensor in MappedGGUFReader(path).tensors}
    for name, parameter in hf_model.named_parameters():
        stem, _, kind = name.rpartition(".")
        tensor = stored.pop(f"{names.get_name(stem)}.{kind}")
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if ".q_proj." in name or ".k_proj." in name:
            heads = values.shape[0] // config.head_dim
            values = values.view(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        assert values.shape == parameter.shape
        parameter.data = values
    assert not stored
    return hf_model
