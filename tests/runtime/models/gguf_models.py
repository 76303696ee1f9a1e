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
K_SCALES = {
    QuantisationType.Q4_K: {0: 2e-4, 2: 7.5 * 2e-4},
    QuantisationType.Q5_K: {0: 1e-4, 2: 15.5 * 1e-4},
    QuantisationType.Q6_K: {208: 2e-5},
}
"""Types that the `gguf` library reads but does not write; where in a block their float16 scales lie, and which make
arbitrary blocks weights around 0."""


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
        for at, scale in K_SCALES[kind].items():
            blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
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


ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
}
"""What llama.cpp's converter makes of each `model_type`."""


def write_gguf(
    path: Path,
    hf_model: Any,
    *,
    weight_type: QuantisationType = QuantisationType.F32,
    types: Mapping[str, QuantisationType] | None = None,
    metadata: Mapping[str, object] | None = None,
    more_tensors: Mapping[str, torch.Tensor] | None = None,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
) -> Path:
    """Two-dimensional weights are stored as `weight_type`, or as `types` says by their stems' ends; the rest as F32.

    metadata: added, or None to leave out.
    """
    config = hf_model.config
    model_arch = ARCHITECTURES[config.model_type]
    architecture = gguf.MODEL_ARCH_NAMES[model_arch]
    names = gguf.get_tensor_name_map(model_arch, config.num_hidden_layers)
    tensors = {}
    for name, parameter in hf_model.named_parameters():
        tensor = parameter.detach()
        if architecture in ("llama", "smollm3") and ".q_proj." in name:
            tensor = permute(tensor, config.num_attention_heads)
        if architecture in ("llama", "smollm3") and ".k_proj." in name:
            tensor = permute(tensor, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        stem, _, kind = name.rpartition(".")
        tensors[f"{names.get_name(stem)}.{kind}"] = tensor
    tensors |= dict(more_tensors or {})
    change(tensors)

    tokens = [f"t{i}" for i in range(config.vocab_size)]
    fields: dict[str, object] = {
        "general.type": "model",
        **{f"{architecture}.{key}": value for key, value in _hyperparameters(config).items()},
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
            own = (kind for end, kind in (types or {}).items() if name.endswith(f"{end}.weight"))
            kind = next(own, weight_type)
        writer.add_tensor(name, pack(tensor, kind) if tensor.ndim == 2 else tensor.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _hyperparameters(config: Any) -> dict[str, object]:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    told: dict[str, object] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.model_type in ("qwen3", "gemma2", "gemma3_text"):
        told |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
    if config.model_type in ("mistral", "phi3", "gemma2", "gemma3_text"):
        told["attention.sliding_window"] = config.sliding_window or 0
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            told[name] = config.__dict__[name]
    if config.model_type == "phi3":
        head_dim = config.hidden_size // config.num_attention_heads
        told["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * head_dim)
        told["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    return told


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
