"""Tiny random models, tokenizers and PEFT adapters, made with the libraries that are our oracles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

EOS = 1
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_SIZE = 3 + len(BYTES)


def tiny_tokenizer() -> Tokenizer:
    """One token a byte; ids 0 to 2 are `<s>`, `</s>`, `<pad>`. Puts nothing before a prompt."""
    vocab = {"<s>": 0, "</s>": EOS, "<pad>": 2} | {byte: i for i, byte in enumerate(BYTES, 3)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<pad>")])
    return tokenizer


def tiny_config(**changes: Any) -> LlamaConfig:
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(defaults | changes))


def save_tiny_model(folder: Path, *, seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """Writes a random model with its tokenizer to a folder; returns transformers' own instance of it."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**config)).eval()
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def save_adapter(
    base: PreTrainedModel,
    folder: Path,
    *,
    rank: int = 8,
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    seed: int = 0,
    strength: float = 0.5,
    **config: Any,
) -> Path:
    """Writes a random PEFT adapter, strong enough to change what the model says. The base is left as it was."""
    torch.manual_seed(1000 + seed)
    peft_model = get_peft_model(
        base,
        LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets), task_type="CAUSAL_LM", **config),
    )
    for name, weight in peft_model.named_parameters():
        if "lora_" in name:
            fan_in = weight.shape[1]
            scale = strength if "lora_B" in name else 1.0
            weight.data = torch.randn_like(weight) * scale / fan_in**0.5
    peft_model.save_pretrained(folder)
    peft_model.unload()
    config_file = folder / "adapter_config.json"
    config_file.write_text(
        json.dumps(json.loads(config_file.read_text()) | {"base_model_name_or_path": "tiny"})
    )
    return folder


def greedy(
    model: PreTrainedModel | PeftModel, prompt: list[int], num_tokens: int, **options: Any
) -> list[int]:
    """transformers' own greedy answer, end tokens ignored. `options` go to its `generate`."""
    x = torch.tensor([prompt])
    with torch.inference_mode():
        y = model.generate(
            input_ids=x,
            attention_mask=torch.ones_like(x),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
            **options,
        )
    return y[0, len(prompt) :].tolist()
