"""What a model of your own is made of.

A class that satisfies `CausalLM` runs an architecture that motet does not know, with everything else as ever:
batching, paged KV cache, adapters. `motet.register_model` names it to this process; an entry point of the group
`motet.models` names it to every process of an environment that the package is installed in::

    [project.entry-points."motet.models"]
    GraniteForCausalLM = "motet_granite:Granite"

`forward` gets a `ForwardBatch` and one `KVCache` for each layer of `kv_spec()` (groups of `KVGroup`), and computes
with the `Ops` that `from_config` was given. `make_linear` is the only way to a linear layer: adapters act there.
`weights()` says by a `Weight` where each tensor of the checkpoint goes. A complete one:
`examples/own_model_plugin/`.
"""

from __future__ import annotations

from motet.kernels.ops import KVCache, Ops
from motet.lora.sites import LoRASite
from motet.runtime.forward_batch import ForwardBatch
from motet.runtime.models.base import CausalLM, KVGroup, Weight
from motet.runtime.models.layers import Linear, make_linear

__all__ = [
    "CausalLM",
    "ForwardBatch",
    "KVCache",
    "KVGroup",
    "Linear",
    "LoRASite",
    "Ops",
    "Weight",
    "make_linear",
]
