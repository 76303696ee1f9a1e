"""The decoder's layers: attention and a gated MLP, with norms before, around or after them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from motet.kernels.ops import KVCache, Ops
from motet.runtime.models.base import Weight
from motet.runtime.models.decoder_config import DecoderConfig
from motet.runtime.models.layers import Linear, QKNorm, RMSNorm, make_linear

if TYPE_CHECKING:
    from motet.runtime.forward_batch import ForwardBatch


class Attention:
    """Grouped-query attention (arXiv 2305.13245) with a rope, over all tokens or a window of them."""

    def __init__(self, config: DecoderConfig, ops: Ops, index: int, path: str) -> None:
        self._ops = ops
        self._num_heads, self._num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._window = config.layers[index].window
        self._scale, self._softcap = config.attention_scale, config.attention_softcap
        q_size, kv_size = self._num_heads * config.head_dim, self._num_kv_heads * config.head_dim
        splits = [(f"{path}.q_proj", q_size), (f"{path}.k_proj", kv_size), (f"{path}.v_proj", kv_size)]
        if config.fused_projections:
            splits = [(f"{path}.qkv_proj", q_size + 2 * kv_size)]
        self._qkv = make_linear(
            ops,
            kind="column",
            in_features=config.hidden_size,
            splits=splits,
            bias=config.qkv_bias,
            site_index=4 * index,
        )
        self._qk_norm: QKNorm | None = None
        if config.qk_norm is not None:
            sizes = (config.head_dim, config.head_dim) if config.qk_norm == "head" else (q_size, kv_size)
            norms = [RMSNorm(ops, size, config.rms_norm_eps, config.norm_offset) for size in sizes]
            self._qk_norm = QKNorm(path, q_size, kv_size, *norms)
        self._o = make_linear(
            ops,
            kind="row",
            in_features=q_size,
            splits=[(f"{path}.o_proj", config.hidden_size)],
            bias=config.o_bias,
            site_index=4 * index + 1,
        )
        self.linears = (self._qkv, self._o)

    def weights(self) -> dict[str, Weight]:
        norms = {} if self._qk_norm is None else self._qk_norm.weights()
        return self._qkv.weights() | norms | self._o.weights()

    def __call__(self, batch: ForwardBatch, x: Tensor, rope: tuple[Tensor, Tensor], kv: KVCache) -> Tensor:
        """x [T, H] A -> [T, H] A; rope: `Rope.cos_sin` of the batch's positions."""
        ops = self._ops
        qkv = self._qkv(batch, x)
        if self._qk_norm is not None:
            self._qk_norm(qkv)
        q = ops.rope_and_store_kv(qkv, *rope, kv, batch.slot_mapping, self._num_heads, self._num_kv_heads)
        plan = batch.attention[self._window]
        return self._o(batch, ops.paged_attention(q, kv, plan, self._scale, self._softcap))


class GatedMLP:
    """down(activation(gate(x)) · up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, ops: Ops, index: int, path: str) -> None:
        self._activation = ops.silu_and_mul if config.activation == "silu" else ops.gelu_tanh_and_mul
        size = config.intermediate_size
        splits = [(f"{path}.gate_proj", size), (f"{path}.up_proj", size)]
        if config.fused_projections:
            splits = [(f"{path}.gate_up_proj", 2 * size)]
        self._gate_up = make_linear(
            ops,
            kind="column",
            in_features=config.hidden_size,
            splits=splits,
            bias=config.mlp_bias,
            site_index=4 * index + 2,
        )
        self._down = make_linear(
            ops,
            kind="row",
            in_features=size,
            splits=[(f"{path}.down_proj", config.hidden_size)],
            bias=config.mlp_bias,
            site_index=4 * index + 3,
        )
        self.linears = (self._gate_up, self._down)

    def weights(self) -> dict[str, Weight]:
        return self._gate_up.weights() | self._down.weights()

    def __call__(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        """x [T, H] A -> [T, H] A."""
        return self._down(batch, self._activation(self._gate_up(batch, x)))


class DecoderLayer(ABC):
    """Attention, then the MLP; each adds its result to the residual stream."""

    norm_names: ClassVar[tuple[str, ...]]

    def __init__(self, config: DecoderConfig, ops: Ops, index: int) -> None:
        path = f"model.layers.{index}"
        self._path = path
        self._ops = ops
        self._attention = Attention(config, ops, index, f"{path}.self_attn")
        self._mlp = GatedMLP(config, ops, index, f"{path}.mlp")
        self._norms = tuple(
            RMSNorm(ops, config.hidden_size, config.rms_norm_eps, config.norm_offset) for _ in self.norm_names
        )
        self.linears: tuple[Linear, ...] = (*self._attention.linears, *self._mlp.linears)

    def weights(self) -> dict[str, Weight]:
        names = [f"{self._path}.{name}.weight" for name in self.norm_names]
        norms = {name: norm.weight for name, norm in zip(names, self._norms, strict=True)}
        return norms | self._attention.weights() | self._mlp.weights()

    @abstractmethod
    def forward(
        self, batch: ForwardBatch, x: Tensor, residual: Tensor, rope: tuple[Tensor, Tensor], kv: KVCache
    ) -> Tensor:
        """x [T, H] A, what the previous layer adds to the residual stream -> what this one adds to it."""


class PreNormLayer(DecoderLayer):
    norm_names = ("input_layernorm", "post_attention_layernorm")

    def forward(
        self, batch: ForwardBatch, x: Tensor, residual: Tensor, rope: tuple[Tensor, Tensor], kv: KVCache
    ) -> Tensor:
        before_attention, before_mlp = self._norms
        x = self._attention(batch, before_attention.add(x, residual), rope, kv)
        return self._mlp(batch, before_mlp.add(x, residual))


class SandwichNormLayer(DecoderLayer):
    """Gemma 2's and 3's (arXiv 2408.00118)."""

    norm_names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def forward(
        self, batch: ForwardBatch, x: Tensor, residual: Tensor, rope: tuple[Tensor, Tensor], kv: KVCache
    ) -> Tensor:
        before_attention, after_attention, before_mlp, after_mlp = self._norms
        x = after_attention(self._attention(batch, before_attention.add(x, residual), rope, kv))
        return after_mlp(self._mlp(batch, before_mlp.add(x, residual)))


class PostNormLayer(DecoderLayer):
    """OLMo 2's (arXiv 2501.00656): what goes in is the residual stream itself."""

    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")

    def forward(
        self, batch: ForwardBatch, x: Tensor, residual: Tensor, rope: tuple[Tensor, Tensor], kv: KVCache
    ) -> Tensor:
        after_attention, after_mlp = self._norms
        self._ops.add_residual(x, residual)
        x = after_attention(self._attention(batch, residual, rope, kv))
        self._ops.add_residual(x, residual)
        return after_mlp(self._mlp(batch, residual))


LAYERS: Mapping[str, type[DecoderLayer]] = MappingProxyType(
    {"before": PreNormLayer, "around": SandwichNormLayer, "after": PostNormLayer}
)
"""By `DecoderConfig.norms`."""
