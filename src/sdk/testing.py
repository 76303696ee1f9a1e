"""For the tests of applications: a tiny random model and adapters of it, made in a moment and always the same.

::

    from motet.sdk.testing import save_tiny_adapter, tiny_model

    async def test_my_app(tmp_path):
        with tiny_model() as model:
            async with AsyncEngine(model) as engine:
                await engine.load_adapter("acme", save_tiny_adapter(tmp_path / "acme"))
                completion = await engine.generate("Hello", SamplingParams(max_tokens=5), adapter="acme")

What the model says is noise, but it is the same noise on every run, another under each adapter, and all that an
application does with a real model works with it: text, chats, stop strings, adapters, tenants, metrics. Its
tokens are the 256 bytes and `<s>`, `</s>`, `<pad>` (ids 0 to 2); its context has 512 tokens. Neither torch nor
transformers is needed to make it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")

_LAYERS, _HIDDEN, _INNER, _HEADS, _KV_HEADS = 2, 64, 96, 4, 2
_KV = _HIDDEN // _HEADS * _KV_HEADS
_VOCABULARY = len(SPECIAL_TOKENS) + 256
_SPREAD = 0.3
"""Of the weights: wide enough for an answer that depends on all of the prompt."""

_LINEARS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_KV, _HIDDEN),
        "self_attn.v_proj": (_KV, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
)
"""[out, in] of each linear of a layer."""

_CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@contextmanager
def tiny_model(*, seed: int = 0) -> Iterator[Path]:
    """A tiny Llama in a temporary folder, for as long as the `with` lasts: `AsyncEngine(path)`."""
    with TemporaryDirectory(prefix="motet-tiny-") as folder:
        yield save_tiny_model(folder, seed=seed)


def save_tiny_model(folder: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Writes a tiny Llama (100,000 random float32 weights) with a byte tokenizer and a chat template.

    Returns the folder, which is made if it is not there. Another `seed` makes another model.
    """
    path = _made(folder)
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens": (_VOCABULARY, _HIDDEN), "lm_head": (_VOCABULARY, _HIDDEN)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(_LAYERS) for name, shape in _LINEARS.items()}
    norms = [
        f"model.layers.{i}.{n}"
        for i in range(_LAYERS)
        for n in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors = {f"{name}.weight": _normal(random, shape, _SPREAD) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": np.ones(_HIDDEN, np.float32) for name in ("model.norm", *norms)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    _write(path / "config.json", config)
    bos, eos, pad = SPECIAL_TOKENS
    tokens = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    _write(
        path / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT_TEMPLATE, **tokens},
    )
    _tokenizer().save(str(path / "tokenizer.json"))
    return path


def save_tiny_adapter(folder: str | os.PathLike[str], *, rank: int = 8, seed: int = 0) -> Path:
    """Writes a PEFT LoRA folder for the tiny model, on all its linears and strong enough to change what it says.

    Returns the folder, which is made if it is not there. Another `seed` makes another adapter.
    """
    path = _made(folder)
    random = np.random.default_rng([seed, rank])
    tensors = {}
    for layer in range(_LAYERS):
        for name, (rows, columns) in _LINEARS.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _normal(random, (rank, columns), columns**-0.5)
            tensors[f"{prefix}.lora_B.weight"] = _normal(random, (rows, rank), 2.0 * rank**-0.5)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "motet-tiny",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [name.split(".")[1] for name in _LINEARS],
    }
    _write(path / "adapter_config.json", config)
    return path


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _normal(random: np.random.Generator, shape: tuple[int, ...], spread: float) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = random.standard_normal(shape, dtype=np.float32) * np.float32(spread)
    return values


def _made(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
