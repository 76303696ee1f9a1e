"""GGUF_ARCHITECTURES: how llama.cpp's converter writes each family that motet runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType

import gguf
from gguf import MODEL_ARCH
from torch import Tensor

_MODULES = ("model.embed_tokens", "model.norm", "lm_head")

_LAYER_MODULES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_FUSED = MappingProxyType({"self_attn.q_proj": "self_attn.qkv_proj", "mlp.up_proj": "mlp.gate_up_proj"})


@dataclass(frozen=True)
class GGUFArchitecture:
    """One `general.architecture`, against the folder that it was converted from."""

    model_arch: MODEL_ARCH
    hf_class: str

    keys: Mapping[str, str] = field(default_factory=dict)
    """Hyperparameters that only some families have -> their names in `config.json`."""

    rotates_neighbours: bool = False
    """Whether the rope turns dimensions 2i and 2i + 1 together: rows of q and k were permuted so that it may."""

    adds_one_to_norms: bool = False
    fused: bool = False
    """Whether q, k and v, and gate and up, are one tensor each."""

    @cached_property
    def _modules(self) -> Mapping[str, str]:
        """The stem of a tensor's name, without its layer -> the module's path in transformers."""
        names = gguf.get_tensor_name_map(self.model_arch, 1)
        modules = [_FUSED.get(module, module) if self.fused else module for module in _LAYER_MODULES]
        paths = {names.get_name(path): path for path in _MODULES}
        paths |= {names.get_name(f"model.layers.0.{module}"): module for module in modules}
        return {stem.removeprefix("blk.0."): path for stem, path in paths.items() if stem is not None}

    def hf_name(self, name: str) -> str:
        """ "blk.0.attn_q.weight" -> "model.layers.0.self_attn.q_proj.weight"; an unknown name stays as it is."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if match is None or match[2] not in self._modules:
            return name
        layer = "" if match[1] is None else f"model.layers.{match[1]}."
        return f"{layer}{self._modules[match[2]]}.{match[3]}"

    def restore(self, name: str, heads: int, kv_heads: int) -> Callable[[Tensor], Tensor] | None:
        """What undoes the converter's change to the values of the tensor of that GGUF name."""
        if self.rotates_neighbours and (match := re.search(r"\.attn_([qk])\.", name)):
            return partial(_restore_halves, heads=heads if match[1] == "q" else kv_heads)
        if self.adds_one_to_norms and name.endswith("norm.weight"):
            return _subtract_one
        return None


def _restore_halves(values: Tensor, heads: int) -> Tensor:
    """A head's dimensions 2i and 2i + 1 go back to i and i + head_dim / 2."""
    pairs = values.view(heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def _subtract_one(values: Tensor) -> Tensor:
    return values - 1


_WINDOW = {"attention.sliding_window": "sliding_window"}
_GEMMA = {
    **_WINDOW,
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

GGUF_ARCHITECTURES: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        "llama": GGUFArchitecture(
            MODEL_ARCH.LLAMA, "LlamaForCausalLM", keys=_WINDOW, rotates_neighbours=True
        ),
        "qwen2": GGUFArchitecture(MODEL_ARCH.QWEN2, "Qwen2ForCausalLM"),
        "qwen3": GGUFArchitecture(MODEL_ARCH.QWEN3, "Qwen3ForCausalLM"),
        "smollm3": GGUFArchitecture(MODEL_ARCH.SMOLLM3, "SmolLM3ForCausalLM", rotates_neighbours=True),
        "phi3": GGUFArchitecture(MODEL_ARCH.PHI3, "Phi3ForCausalLM", keys=_WINDOW, fused=True),
        "gemma2": GGUFArchitecture(
            MODEL_ARCH.GEMMA2, "Gemma2ForCausalLM", keys=_GEMMA, adds_one_to_norms=True
        ),
        "gemma3": GGUFArchitecture(
            MODEL_ARCH.GEMMA3,
            "Gemma3ForCausalLM",
            keys={**_GEMMA, "rope.freq_base_swa": "rope_local_base_freq"},
            adds_one_to_norms=True,
        ),
        "olmo2": GGUFArchitecture(MODEL_ARCH.OLMO2, "Olmo2ForCausalLM"),
    }
)
"""By `general.architecture`. Mistral is llama's, with or without a sliding window."""
