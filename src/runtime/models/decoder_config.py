"""DecoderConfig: a decoder in the terms that `decoder.py` computes it in, whatever its family calls them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from motet.runtime.models.rope import RopeConfig

Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]


class Shape(BaseModel):
    """What every decoder has, in the names of `config.json`."""

    model_config = ConfigDict(frozen=True, strict=True)

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    max_position_embeddings: Count
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False


class LayerAttention(BaseModel):
    """How one layer attends."""

    model_config = ConfigDict(frozen=True, strict=True)

    window: Count | None
    """How many tokens a token sees, its own included. None: all."""

    rope: RopeConfig


class DecoderConfig(Shape):
    """Everything besides the weights that changes what a decoder computes."""

    layers: tuple[LayerAttention, ...]
    attention_scale: Positive
    attention_softcap: Positive | None = None
    qk_norm: Literal["head", "projection"] | None = None
    """RMS norms of q and k: of each head, or of all heads together."""

    norms: Literal["before", "around", "after"] = "before"
    """Where the norms stand: before attention and MLP, after them, or both."""

    norm_offset: Literal[0, 1] = 0
    """What is added to the norms' stored weights. With 1 they stay in float32, as 1 + w in bfloat16 loses w."""

    activation: Literal["silu", "gelu_tanh"] = "silu"
    fused_projections: bool = False
    """Whether the checkpoint holds qkv_proj and gate_up_proj in place of q, k, v and gate, up."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: Positive = 1.0
    logit_softcap: Positive | None = None

    @property
    def max_model_len(self) -> int:
        """Longest sequence that is computed as it should be, in tokens."""
        limits = [layer.rope.max_length for layer in self.layers if layer.rope.max_length is not None]
        return min([self.max_position_embeddings, *limits])
