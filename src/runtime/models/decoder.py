"""The decoder of Llama and the many families that vary it. One model, told apart by its config alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motet.kernels.ops import KVCache, Ops
from motet.lora.sites import LoRASite
from motet.runtime.models.base import KVGroup, Weight
from motet.runtime.models.decoder_config import DecoderConfig
from motet.runtime.models.decoder_layer import LAYERS
from motet.runtime.models.families import read_decoder_config
from motet.runtime.models.layers import RMSNorm
from motet.runtime.models.rope import Rope
from motet.runtime.models.vocabulary import Embedding, OutputHead

if TYPE_CHECKING:
    from motet.runtime.forward_batch import ForwardBatch


class Decoder:
    """`CausalLM` for every architecture of `FAMILIES`."""

    def __init__(self, config: DecoderConfig, ops: Ops) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_model_len
        self._ops = ops
        self._embedding_scale = torch.tensor(
            config.embedding_scale, dtype=ops.activations
        ).item()  # rounded as A is
        self._layers = [LAYERS[config.norms](config, ops, i) for i in range(config.num_hidden_layers)]
        self._linears = [linear for layer in self._layers for linear in layer.linears]
        num_sites = len(self._linears)
        self._embedding = Embedding(
            ops, "model.embed_tokens", config.vocab_size, config.hidden_size, site_index=num_sites
        )
        self._lm_head = OutputHead(
            ops, "lm_head", self._embedding, tied=config.tie_word_embeddings, site_index=num_sites + 1
        )
        self._norm = RMSNorm(ops, config.hidden_size, config.rms_norm_eps, config.norm_offset)
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        self._ropes = [Rope(rope, ops) for rope in ropes]
        self._rope_of_layer = [ropes.index(layer.rope) for layer in config.layers]

    @property
    def lora_sites(self) -> tuple[LoRASite, ...]:
        sites = [linear.site for linear in self._linears if linear.site is not None]
        return (*sites, self._embedding.site, self._lm_head.site)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], ops: Ops) -> Decoder:
        return cls(read_decoder_config(config), ops)

    def kv_spec(self) -> list[KVGroup]:
        config = self.config
        windows = tuple(dict.fromkeys(layer.window for layer in config.layers))
        return [
            KVGroup("full", config.num_hidden_layers, config.num_key_value_heads, config.head_dim, windows)
        ]

    def weights(self) -> dict[str, Weight]:
        bound = self._embedding.weights()
        for layer in self._layers:
            bound |= layer.weights()
        bound["model.norm.weight"] = self._norm.weight
        return bound | self._lm_head.weights()

    def tied_weights(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def finish_loading(self) -> None:
        for linear in self._linears:
            linear.pack()
        self._embedding.pack()
        self._lm_head.pack()

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[KVCache]) -> Tensor:
        ops = self._ops
        x = self._embedding(batch)
        if self._embedding_scale != 1.0:
            ops.scale(x, self._embedding_scale)
        residual = ops.zeros_like(x)
        ropes = [rope.cos_sin(batch.positions) for rope in self._ropes]
        for layer, rope, kv in zip(self._layers, self._rope_of_layer, kv_caches, strict=True):
            x = layer.forward(batch, x, residual, ropes[rope], kv)
        rows = batch.logits_rows
        x = self._norm.add(ops.take_rows(x, rows), ops.take_rows(residual, rows))
        return ops.as_logits(self._lm_head(batch, x), self.config.logit_softcap)
