"""A tiny random Llama, its sites, and adapters that PEFT made for it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from motet.lora.sites import LoRASite

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 48, 80, 2, 4, 2
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def sites() -> tuple[LoRASite, ...]:
    kv = HIDDEN // HEADS * KV_HEADS
    packed = [
        (HIDDEN, {"self_attn.q_proj": HIDDEN, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
        (HIDDEN, {"self_attn.o_proj": HIDDEN}),
        (HIDDEN, {"mlp.gate_proj": INTERMEDIATE, "mlp.up_proj": INTERMEDIATE}),
        (INTERMEDIATE, {"mlp.down_proj": HIDDEN}),
    ]
    everywhere = [(layer, *linear) for layer in range(LAYERS) for linear in packed]
    return tuple(
        LoRASite(i, k, tuple(f"model.layers.{layer}.{name}" for name in out), tuple(out.values()))
        for i, (layer, k, out) in enumerate(everywhere)
    )


@pytest.fixture(scope="session")
def make_peft(llama: LlamaForCausalLM) -> Callable[..., PeftModel]:
    """A PEFT model over a copy of the Llama, with random A and a strong random B (PEFT's own begins at 0)."""

    def make(*, seed: int = 0, **config: Any) -> PeftModel:
        lora = LoraConfig(**{"r": 8, "target_modules": list(ALL_TARGETS), **config})
        with warnings.catch_warnings():
            # PEFT asks transformers for a property that has a newer name.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            model = get_peft_model(copy.deepcopy(llama), lora)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return model.eval()

    return make


@pytest.fixture
def make_adapter(make_peft: Callable[..., PeftModel], tmp_path: Path) -> Callable[..., Path]:
    """The folder that PEFT saves for `make_peft`'s model."""

    def make(folder: str = "adapter", **config: Any) -> Path:
        make_peft(**config).save_pretrained(tmp_path / folder)
        return tmp_path / folder

    return make
