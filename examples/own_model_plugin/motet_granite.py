"""Granite 3 (IBM) as a plug-in of motet: a Llama whose embeddings, attention, residuals and logits are scaled.

`pip install ./examples/own_model_plugin`, and `AsyncEngine` opens folders whose config.json says GraniteForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from motet import UnsupportedModel
from motet.models import ForwardBatch, KVCache, KVGroup, Linear, LoRASite, Ops, Weight, make_linear


@dataclass(frozen=True)
class GraniteConfig:
    """What `config.json` says, as far as it changes the computation."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    tie_word_embeddings: bool

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GraniteConfig:
        if config.get("attention_bias") or config.get("mlp_bias"):
            raise UnsupportedModel("config: this plug-in knows Granite without biases")
        rope = config.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
            raise UnsupportedModel("config: this plug-in knows Granite with plain RoPE")
        given = {"rope_theta": rope.get("rope_theta", 10_000.0), **config}
        return cls(**{field.name: given[field.name] for field in fields(cls)})


class GraniteLayer:
    """Attention, then SwiGLU; what each adds to the residual stream is scaled."""

    def __init__(self, config: GraniteConfig, ops: Ops, index: int) -> None:
        self.ops, self.config, self.path = ops, config, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        kv_size = config.num_key_value_heads * config.head_dim
        attention, mlp = f"{self.path}.self_attn", f"{self.path}.mlp"
        self.input_norm = torch.empty(hidden, dtype=ops.activations, device=ops.device)
        self.post_norm = torch.empty(hidden, dtype=ops.activations, device=ops.device)
        self.qkv = make_linear(
            ops,
            kind="column",
            in_features=hidden,
            splits=[
                (f"{attention}.q_proj", hidden),
                (f"{attention}.k_proj", kv_size),
                (f"{attention}.v_proj", kv_size),
            ],
            site_index=4 * index,
        )
        self.o = make_linear(
            ops,
            kind="row",
            in_features=hidden,
            splits=[(f"{attention}.o_proj", hidden)],
            site_index=4 * index + 1,
        )
        self.gate_up = make_linear(
            ops,
            kind="column",
            in_features=hidden,
            splits=[(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)],
            site_index=4 * index + 2,
        )
        self.down = make_linear(
            ops,
            kind="row",
            in_features=inner,
            splits=[(f"{mlp}.down_proj", hidden)],
            site_index=4 * index + 3,
        )
        self.linears = (self.qkv, self.o, self.gate_up, self.down)

    def weights(self) -> dict[str, Weight]:
        bound = {
            f"{self.path}.input_layernorm.weight": Weight(self.input_norm),
            f"{self.path}.post_attention_layernorm.weight": Weight(self.post_norm),
        }
        for linear in self.linears:
            bound |= linear.weights()
        return bound

    def forward(
        self, batch: ForwardBatch, x: Tensor, residual: Tensor, rope: tuple[Tensor, Tensor], kv: KVCache
    ) -> Tensor:
        ops, config = self.ops, self.config
        x = ops.add_rms_norm(x, residual, self.input_norm, config.rms_norm_eps)
        q = ops.rope_and_store_kv(
            self.qkv(batch, x),
            *rope,
            kv,
            batch.slot_mapping,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        x = ops.paged_attention(q, kv, batch.attention[None], scale=config.attention_multiplier)
        x = self.o(batch, x) * config.residual_multiplier
        x = ops.add_rms_norm(x, residual, self.post_norm, config.rms_norm_eps)
        return self.down(batch, ops.silu_and_mul(self.gate_up(batch, x))) * config.residual_multiplier


class Granite:
    """Satisfies `motet.models.CausalLM`."""

    def __init__(self, config: GraniteConfig, ops: Ops) -> None:
        self.config, self.ops = config, ops
        self.vocab_size, self.max_model_len = config.vocab_size, config.max_position_embeddings
        self.embedding = torch.empty(
            config.vocab_size, config.hidden_size, dtype=ops.dtype, device=ops.device
        )
        self.layers = [GraniteLayer(config, ops, i) for i in range(config.num_hidden_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=ops.activations, device=ops.device)
        head = [("lm_head", config.vocab_size)]
        self.lm_head: Linear | None = None  # tied: the embedding serves
        if not config.tie_word_embeddings:
            self.lm_head = make_linear(ops, kind="column", in_features=config.hidden_size, splits=head)
        self.linears = [linear for layer in self.layers for linear in layer.linears]
        turns = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.frequencies = (1.0 / config.rope_theta**turns).to(ops.device)

    @property
    def lora_sites(self) -> tuple[LoRASite, ...]:
        return tuple(linear.site for linear in self.linears if linear.site is not None)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], ops: Ops) -> Granite:
        return cls(GraniteConfig.from_config(config), ops)

    def kv_spec(self) -> list[KVGroup]:
        config = self.config
        return [KVGroup("full", config.num_hidden_layers, config.num_key_value_heads, config.head_dim)]

    def weights(self) -> dict[str, Weight]:
        bound = {"model.embed_tokens.weight": Weight(self.embedding), "model.norm.weight": Weight(self.norm)}
        for layer in self.layers:
            bound |= layer.weights()
        return bound if self.lm_head is None else bound | self.lm_head.weights()

    def tied_weights(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head is None else {}

    def finish_loading(self) -> None:
        for linear in [*self.linears, *([] if self.lm_head is None else [self.lm_head])]:
            linear.pack()
        self.embedding = self.ops.pack_table(self.embedding)

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[KVCache]) -> Tensor:
        x = self.ops.embedding(batch.input_ids, self.embedding) * self.config.embedding_multiplier
        residual = torch.zeros_like(x)
        rope = self.cos_sin(batch.positions)
        for layer, kv in zip(self.layers, kv_caches, strict=True):
            x = layer.forward(batch, x, residual, rope, kv)
        rows = batch.logits_rows
        x = self.ops.add_rms_norm(x[rows], residual[rows], self.norm, self.config.rms_norm_eps)
        logits = self.ops.linear(x, self.embedding) if self.lm_head is None else self.lm_head(batch, x)
        return logits.float() / self.config.logits_scaling

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `Ops.rope_and_store_kv` takes them: each angle for both halves, sin's first half negated."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        dtype = self.ops.activations
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
