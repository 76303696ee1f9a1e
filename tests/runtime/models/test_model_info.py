"""What an engine says of its model is what the files and transformers say."""

from __future__ import annotations

import pytest

from motet import AsyncEngine, EngineConfig
from motet.kernels.ops import select_ops


@pytest.mark.anyio
async def test_model_info_agrees_with_transformers(tiny_folder, tiny_model):
    config = tiny_model.config
    async with AsyncEngine(tiny_folder, EngineConfig(kv_cache_bytes=1 << 20, max_model_len=64)) as engine:
        info = engine.model_info()
    assert info.architecture == "LlamaForCausalLM"
    assert info.num_parameters == tiny_model.num_parameters()
    assert (info.vocab_size, info.num_layers) == (config.vocab_size, config.num_hidden_layers)
    assert info.max_model_len == 64
    assert (
        info.kv_bytes_per_token
        == 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    )
    assert set(info.adapter_targets) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "embed_tokens",
        "lm_head",
    }
    assert (info.dtype, info.device, info.backend) == ("float32", "cpu", select_ops("cpu", "float32").name)
    assert len(bytes.fromhex(info.digest)) == 32
