"""Writes random LoRA adapters a0, a1, … for a model folder, as PEFT saves them.

    python -m benchmarks.make_adapters [--model FOLDER] [--out FOLDER] [--count 64]

For speed only: at the default `--std` greedy text hardly differs from the base model's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.common import ADAPTERS_FOLDER, MODEL_FOLDER, make_parser
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FIRST_SEED = 1000


def make_adapters(model_folder: Path, out: Path, count: int, rank: int, std: float) -> None:
    """A has rows of about unit length, B entries of deviation `std`; the scaling is 2."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    for index in range(count):
        torch.manual_seed(FIRST_SEED + index)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_A" in name:
                    weight.copy_(torch.randn_like(weight) / weight.shape[1] ** 0.5)
                elif "lora_B" in name:
                    weight.copy_(torch.randn_like(weight) * std)
        model.save_pretrained(str(out / f"a{index}"), save_embedding_layers=False)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--out", type=Path, default=ADAPTERS_FOLDER)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--std", type=float, default=0.02)
    arguments = parser.parse_args()
    make_adapters(arguments.model, arguments.out, arguments.count, arguments.rank, arguments.std)


if __name__ == "__main__":
    main()
