"""Tiny random models, made and judged by transformers, and the same run through motet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from motet.kernels.ops import Ops
from motet.kernels.reference import ReferenceOps
from motet.runtime.models.base import CausalLM

FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}

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
    model = model_class(config_class(**shape | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def save_folder(hf_model: Any, folder: Path, **options: Any) -> Path:
    hf_model.save_pretrained(folder, **options)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )
    return folder


def float32_ops() -> ReferenceOps:
    return ReferenceOps(torch.device("cpu"), torch.float32)


def make_ids(count: int, vocab_size: int = 96, seed: int = 1) -> Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def hf_logits(hf_model: Any, ids: Tensor, rows: Sequence[int], first_position: int = 0) -> Tensor:
    """transformers' logits behind the tokens at `rows`."""
    positions = torch.arange(len(ids))[None] + first_position
    hidden = hf_model.model(input_ids=ids[None], position_ids=positions, use_cache=False).last_hidden_state[0]
    return hf_model.lm_head(hidden[list(rows)]).float()


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
    lora: object = None,
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
        batch = SimpleNamespace(
            input_ids=ids[index],
            positions=index + first_position,
            slot_mapping=blocks[index // block_size] * block_size + index % block_size,
            attention=ops.plan_attention(
                torch.tensor([0, len(index)]), index[-1:] + 1, blocks[None], block_size
            ),
            lora=lora,
            logits_rows=torch.tensor(
                [row - first for row in rows if row in range(first, first + chunk)]
            ).long(),
        )
        logits.append(model.forward(batch, caches))  # type: ignore[arg-type]  # only what a model reads
    return torch.cat(logits)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |Δ| / max |expected|."""
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())
