"""A model that motet does not know, run by a class of one's own: a tiny random Granite, made by transformers.

Here `register_model` names the class to this process; `pip install ./examples/own_model_plugin` would do so for all.
"""

import asyncio
import tempfile
from pathlib import Path

import torch
from motet_granite import Granite
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GraniteConfig, GraniteForCausalLM
from transformers.utils.logging import disable_progress_bar

from motet import AsyncEngine, SamplingParams, register_model


def make_checkpoint(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = GraniteConfig(vocab_size=len(alphabet), eos_token_id=0, bos_token_id=0, **sizes, **heads)
    GraniteForCausalLM(config).save_pretrained(folder)


async def main(folder: str) -> None:
    register_model("GraniteForCausalLM", Granite)
    async with AsyncEngine(folder) as engine:
        completion = await engine.generate("granite", SamplingParams(max_tokens=8, ignore_eos=True))
        print(f"{completion.usage.output_tokens} tokens: {completion.text!r}")


disable_progress_bar()
with tempfile.TemporaryDirectory() as folder:
    make_checkpoint(Path(folder))
    asyncio.run(main(folder))
