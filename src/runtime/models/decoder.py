"""The decoder of Llama 2 and 3, SmolLM2 and Qwen2 (arXiv 2307.09288, 2407.21783, 2407.10671): pre-norm, RoPE,
grouped-query attention, SwiGLU. One model, varied by its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motet.kernels.ops import KVCache, Ops
from motet.runtime.models.base import KVGroup, Weight
from motet.runtime.models.decoder_config import DecoderConfig
from motet.runtime.models.layers import Linear, make_linear
from motet.runtime.models.rope import Rope

if TYPE_CHECKING:
    from motet.runtime.forward_batch import ForwardBatch


class DecoderLayer:
    """Attention, then SwiGLU, each behind a norm."""

    def __init__(self, config: DecoderConfig, ops: Ops, index: int) -> None:
        self._ops = ops
        self._config = config
        self._path = f"model.layers.{index}"
        hidden_size, head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        attention, mlp = f"{self._path}.self_attn", f"{self._path}.mlp"
        self._input_norm = torch.empty(hidden_size, dtype=ops.dtype, device=ops.device)
        self._qkv = make_linear(
            ops,
            kind="column",
            in_features=hidden_size,
            splits=[
                (f"{attention}.q_proj", q_size),
                (f"{attention}.k_proj", kv_size),
                (f"{attention}.v_proj", kv_size),
            ],
            bias=config.qkv_bias,
            site_index=4 * index,
        )
        self._o = make_linear(
            ops,
            kind="row",
            in_features=q_size,
            splits=[(f"{attention}.o_proj", hidden_size)],
            bias=config.o_bias,
            site_index=4 * index + 1,
        )
        self._post_attention_norm = torch.empty(hidden_size, dtype=ops.dtype, device=ops.device)
        self._gate_up = make_linear(
            ops,
            kind="column",
            in_features=hidden_size,
            splits=[
                (f"{mlp}.gate_proj", config.intermediate_size),
                (f"{mlp}.up_proj", config.intermediate_size),
            ],
            bias=config.mlp_bias,
            site_index=4 * index + 2,
        )
        self._down = make_linear(
            ops,
            kind="row",
            in_features=config.intermediate_size,
            splits=[(f"{mlp}.down_proj", hidden_size)],
            bias=config.mlp_bias,
            site_index=4 * index + 3,
        )
        self.linears = (self._qkv, self._o, self._gate_up, self._down)

    def weights(self) -> dict[str, Weight]:
        bound = {
            f"{self._path}.input_layernorm.weight": Weight(self._input_norm),
            f"{self._path}.post_attention_layernorm.weight": Weight(self._post_attention_norm),
        }
        for linear in self.linears:
            bound |= linear.weights()
        return bound

    def forward(
        self, batch: ForwardBatch, x: Tensor, residual: Tensor, rope: tuple[Tensor, Tensor], kv: KVCache
    ) -> Tensor:
        """x [T, H] D, what the previous layer adds to the residual stream -> what this one adds to it."""
        ops, config = self._ops, self._config
        x = ops.add_rms_norm(x, residual, self._input_norm, config.rms_norm_eps)
        q = ops.rope_and_store_kv(
            self._qkv(batch, x),
            *rope,
            kv,
            batch.slot_mapping,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        x = ops.paged_attention(q, kv, batch.attention, scale=config.head_dim**-0.5)
        x = self._o(batch, x)
        x = ops.add_rms_norm(x, residual, self._post_attention_norm, config.rms_norm_eps)
        return self._down(batch, ops.silu_and_mul(self._gate_up(batch, x)))


class Decoder:
    """`CausalLM` for LlamaForCausalLM and Qwen2ForCausalLM."""

    def __init__(self, config: DecoderConfig, ops: Ops) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_position_embeddings
        self._ops = ops
        self._embedding = torch.empty(
            config.vocab_size, config.hidden_size, dtype=ops.dtype, device=ops.device
        )
        self._layers = [DecoderLayer(config, ops, i) for i in range(config.num_hidden_layers)]
        self._norm = torch.empty(config.hidden_size, dtype=ops.dtype, device=ops.device)
        self._lm_head: Linear | None = None  # tied: the embedding serves
        if not config.tie_word_embeddings:
            self._lm_head = make_linear(
                ops, kind="column", in_features=config.hidden_size, splits=[("lm_head", config.vocab_size)]
            )
        self._rope = Rope(config.rope, config.head_dim, ops)
        self.lora_sites = tuple(
            linear.site for layer in self._layers for linear in layer.linears if linear.site is not None
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], ops: Ops) -> Decoder:
        return cls(DecoderConfig.from_config(config), ops)

    def kv_spec(self) -> list[KVGroup]:
        config = self.config
        return [
            KVGroup(
                "full", config.num_hidden_layers, config.num_key_value_heads, config.head_dim, window=None
            )
        ]

    def weights(self) -> dict[str, Weight]:
        bound = {"model.embed_tokens.weight": Weight(self._embedding)}
        for layer in self._layers:
            bound |= layer.weights()
        bound["model.norm.weight"] = Weight(self._norm)
        if self._lm_head is not None:
            bound |= self._lm_head.weights()
        return bound

    def tied_weights(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self._lm_head is None else {}

    def finish_loading(self) -> None:
        linears = [linear for layer in self._layers for linear in layer.linears]
        if self._lm_head is not None:
            linears.append(self._lm_head)
        # A backend may rearrange each weight on one core; two at a time keeps the spare memory small.
        with ThreadPoolExecutor(2, thread_name_prefix="motet-pack") as pool:
            list(pool.map(Linear.pack, linears))

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[KVCache]) -> Tensor:
        ops = self._ops
        x = ops.embedding(batch.input_ids, self._embedding)
        residual = torch.zeros_like(x)
        rope = self._rope.cos_sin(batch.positions)
        for layer, kv in zip(self._layers, kv_caches, strict=True):
            x = layer.forward(batch, x, residual, rope, kv)
        rows = batch.logits_rows
        x = ops.add_rms_norm(x[rows], residual[rows], self._norm, self.config.rms_norm_eps)
        logits = ops.linear(x, self._embedding) if self._lm_head is None else self._lm_head(batch, x)
        return logits.float()
