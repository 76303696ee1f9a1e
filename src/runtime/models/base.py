"""What the runtime knows of a model: `CausalLM`, and the nouns its methods speak of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from motet.kernels.ops import KVCache, Ops
from motet.lora.sites import LoRASite
from motet.runtime.models.checkpoint import StoredTensor

if TYPE_CHECKING:
    from motet.runtime.forward_batch import ForwardBatch


@dataclass(frozen=True)
class KVGroup:
    """Layers whose keys and values are kept alike; a request has one block table per group."""

    kind: str
    """"full": every token is kept, whichever see it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = (None,)
    """How many tokens a token sees, its own included, in one layer or another; each once. None: all."""

    def bytes_per_token(self, itemsize: int) -> int:
        """Of keys and values over the group's layers, at `itemsize` bytes a number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class Weight:
    """Where one tensor of the checkpoint goes: a parameter, or its slice of a packed one."""

    target: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.target.shape)

    def load(self, tensor: Tensor) -> None:
        """Copies the tensor, of the same shape, into its place, cast to the parameter's dtype."""
        self.target.copy_(tensor)

    def take(self, stored: StoredTensor) -> None:
        """Loads what a checkpoint holds."""
        self.load(stored.read())


class CausalLM(Protocol):
    """A decoder-only language model bound to one `Ops`. Loaded once, then only read."""

    vocab_size: int

    max_model_len: int
    """Longest sequence the model was made for, in tokens."""

    @property
    def lora_sites(self) -> tuple[LoRASite, ...]:
        """Where adapters may act, in the order of their index. From `finish_loading` on."""

    @property
    def config(self) -> object:
        """Everything besides the weights that changes what the model computes; its `repr` says it in full."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], ops: Ops) -> CausalLM:
        """The model that a `config.json` describes, its parameters still empty.

        `max_model_len` beside its keys is how long sequences shall become, in tokens; None: as the model likes.
        Raises `UnsupportedModel` for a feature that it does not compute, `CorruptCheckpoint` for a config
        that makes no sense.
        """

    def kv_spec(self) -> list[KVGroup]:
        """The groups of layers, in the order of the KV caches that `forward` is given."""

    def weights(self) -> dict[str, Weight]:
        """Every tensor that the checkpoint must hold, by its Hugging Face name. Until `finish_loading`."""

    def tied_weights(self) -> dict[str, str]:
        """Tensors that the checkpoint may hold too: name -> the one whose copy it then is."""

    def finish_loading(self) -> None:
        """Packs the linears for `Ops.linear`; called once, after every weight was loaded."""

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[KVCache]) -> Tensor:
        """One step over the batch's T rows; their keys and values are stored on the way.

        Returns logits [R, V] float32 for `batch.logits_rows`.

        A forward pass that only calls ops may be recorded, and its ops be called again, without it, for other batches
        of as many rows: what it chooses in Python may depend on the numbers of rows, and on whether some have an
        adapter, but on nothing else of the batch.
        """
