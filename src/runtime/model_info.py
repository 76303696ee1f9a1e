"""What an engine says of the model that it has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet.kernels.ops import Ops
    from motet.runtime.models.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, and how it is run."""

    architecture: str
    """As `config.json` names it, such as "LlamaForCausalLM"."""
    num_parameters: int
    """Numbers in its weights; tied ones count once."""
    vocab_size: int
    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    num_layers: int
    kv_bytes_per_token: int
    """Of KV cache, over all layers."""
    adapter_targets: tuple[str, ...]
    """The modules that LoRA adapters may change, by the last part of their names."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    backend: str
    """Which kernels compute: "reference", or "cpu" with its build and the quantization, as `cpu (avx2, int8)`."""
    why: str
    """Why this backend, and this dtype if it was left to motet."""
    digest: str
    """Names this very model: a hash of its config and weights, in hexadecimal."""


def describe(loaded: LoadedModel, ops: Ops, max_model_len: int) -> ModelInfo:
    """Gathers the facts of a loaded model. Call it while the model is idle."""
    model = loaded.model
    groups = model.kv_spec()
    modules = [module for site in model.lora_sites for module in site.modules]
    return ModelInfo(
        architecture=loaded.architecture,
        num_parameters=loaded.num_parameters,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        num_layers=sum(group.num_layers for group in groups),
        kv_bytes_per_token=sum(group.bytes_per_token(ops.dtype.itemsize) for group in groups),
        adapter_targets=tuple(dict.fromkeys(module.rpartition(".")[2] for module in modules)),
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(ops.dtype).removeprefix("torch."),
        device=str(ops.device),
        backend=ops.name,
        why=ops.why,
        digest=loaded.digest.hex(),
    )
