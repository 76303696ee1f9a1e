"""Tiny random models, made and judged by transformers, and the same run through motet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor

from motet.kernels.cpu.library import open_library, usable_isas
from motet.kernels.cpu.ops import CpuOps
from motet.kernels.ops import Ops
from motet.kernels.reference import ReferenceOps
from motet.lora.batch import LoRABatch
from motet.runtime.models.base import CausalLM

FAMILIES: dict[str, tuple[type, type]] = {
    family: (getattr(transformers, config), getattr(transformers, model))
    for family, config, model in [
        ("llama", "LlamaConfig", "LlamaForCausalLM"),
        ("mistral", "MistralConfig", "MistralForCausalLM"),
        ("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3Config", "Qwen3ForCausalLM"),
        ("smollm3", "SmolLM3Config", "SmolLM3ForCausalLM"),
        ("phi3", "Phi3Config", "Phi3ForCausalLM"),
        ("gemma2", "Gemma2Config", "Gemma2ForCausalLM"),
        ("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM"),
        ("olmo2", "Olmo2Config", "Olmo2ForCausalLM"),
    ]
}

OWN_SHAPES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "qwen3": {"head_dim": 20},
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0, "tie_word_embeddings": False},
    "phi3": {"pad_token_id": 0},
    "gemma2": {"head_dim": 20, "sliding_window": 9, "query_pre_attn_scalar": 12},
    "gemma3": {"head_dim": 20, "sliding_window": 9, "query_pre_attn_scalar": 12, "sliding_window_pattern": 2},
    "olmo2": {"pad_token_id": 0},
}
"""What a small model of a family has, or it would show little of what is its own."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def make_hf_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """A small float32 model in which every weight, bias and norm matters."""
    config_class, model_class = FAMILIES[family]
    shape: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**shape | OWN_SHAPES.get(family, {}) | changes)).eval()
    mean_of_norms = 0.0 if family.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean_of_norms if "norm" in name else 0.0, 0.2)
    return model


def save_folder(hf_model: Any, folder: Path, **options: Any) -> Path:
    hf_model.save_pretrained(folder, **options)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )
    return folder


def float32_ops() -> ReferenceOps:
    return ReferenceOps(torch.device("cpu"), torch.float32)


def backends(dtype: torch.dtype = torch.float32) -> list[Ops]:
    """The reference, and the native library where there is one: each has to compute what transformers does."""
    native = [CpuOps(*open_library(), dtype, 2)] if usable_isas() else []
    return [ReferenceOps(torch.device("cpu"), dtype), *native]


def make_ids(count: int, vocab_size: int = 96, seed: int = 1) -> Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def hf_logits(hf_model: Any, ids: Tensor, rows: Sequence[int], first_position: int = 0) -> Tensor:
    """transformers' logits behind the tokens at `rows`."""
    positions = torch.arange(len(ids))[None] + first_position
    keep = torch.tensor(list(rows), dtype=torch.int64)
    return (
        hf_model(input_ids=ids[None], position_ids=positions, use_cache=False, logits_to_keep=keep)
        .logits[0]
        .float()
    )


@torch.inference_mode()
def hf_logits_in_chunks(hf_model: Any, ids: Tensor, rows: Sequence[int], chunk: int = 1024) -> Tensor:
    """The same, the prompt taken in chunks, as the masks and scores of a long one would fill the memory."""
    cache, logits = None, []
    for first in range(0, len(ids), chunk):
        part = hf_model(input_ids=ids[None, first : first + chunk], past_key_values=cache, use_cache=True)
        cache = part.past_key_values
        logits.append(part.logits[0, [row - first for row in rows if first <= row < first + chunk]].float())
    return torch.cat(logits)


@torch.inference_mode()
def motet_logits(
    model: CausalLM,
    ops: Ops,
    ids: Tensor,
    rows: Sequence[int],
    *,
    first_position: int = 0,
    chunk: int = 1024,
    block_size: int = 16,
    lora: LoRABatch | None = None,
) -> Tensor:
    """motet's logits for the same, prefilled in chunks over a block table in no particular order."""
    num_blocks = -(-len(ids) // block_size)
    (group,) = model.kv_spec()
    caches = [
        ops.new_kv_cache(num_blocks, block_size, group.num_kv_heads, group.head_dim)
        for _ in range(group.num_layers)
    ]
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2))
    logits = []
    for first in range(0, len(ids), chunk):
        index = torch.arange(first, min(first + chunk, len(ids)))
        logits_rows = torch.tensor([row - first for row in rows if row in range(first, first + chunk)]).long()
        batch = SimpleNamespace(
            input_ids=ids[index],
            positions=index + first_position,
            slot_mapping=blocks[index // block_size] * block_size + index % block_size,
            attention={
                window: ops.plan_attention(
                    torch.tensor([0, len(index)]), index[-1:] + 1, blocks[None], block_size, window
                )
                for window in group.windows
            },
            lora=lora,
            logits_lora=lora and lora.of_rows(logits_rows.numpy()),
            logits_rows=logits_rows,
        )
        logits.append(model.forward(batch, caches))  # type: ignore[arg-type]  # only what a model reads
    return torch.cat(logits)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |Δ| / max |expected|."""
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())
