"""`Ops`: every operation that a model is made of, as one interface with one method per op.

`select_ops` returns an instance that is handed to the model, so two engines on two devices live in one
process. A model calls ops and never asks which backend it has.

Throughout: T = tokens (rows) of a step, S = sequences of a step, `-1` = padding or no adapter; D and A = the
backend's two dtypes. Tensors are row-major; a backend owns the layout of what it makes itself (packed weights, KV
caches, attention plans).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from motet.errors import ModelError

logger = logging.getLogger("motet")

Result = TypeVar("Result")

LinearWeight = Any
"""A linear's weight or an embedding's table, packed; only the backend that packed it looks inside."""

KVCache = Any
"""One layer's keys and values; only the backend that made it looks inside."""

AttentionPlan = Any
"""What a backend works out once per step for the attention of all layers."""

Replay = Callable[[Sequence[Tensor]], Tensor]
"""A recorded step: given inputs of the recorded shapes, what the step returns of them, valid until the next replay."""

Quantization = Literal["int8", "int4", "gguf"]
"""What the weights of linears and tables become at packing, as in `EngineConfig`."""

BLOCK_KINDS = ("Q4_0", "Q4_1", "Q8_0")
"""llama.cpp's names for blocks of weights: scale · (code - 8), scale · code + minimum and scale · code."""

BLOCK = 32
"""K whose weights make up a block."""


class Blocks(NamedTuple):
    """A weight [N, K] as llama.cpp has quantised it: K a multiple of 32, all scales in half precision."""

    kind: str  # one of `BLOCK_KINDS`
    inner: int  # K
    rows: Tensor  # [N, bytes of a row] uint8, each row K / 32 blocks as they lie in the file


LoRAPlan = Any
"""What a backend works out once per step for the adapters of its rows, at all sites."""


class LoRASlices(NamedTuple):
    """The P projections that one packed linear is made of (q, k and v, say), each with adapter weights of its own."""

    site: int  # which of the model's linears it is: its place in `acts` of `plan_lora`
    first: int  # its projections are those from first to first + P in the table of `plan_lora`
    in_features: int
    bounds: (
        Tensor  # [P + 1] int64 on the CPU: slice p is the columns bounds[p] to bounds[p + 1] of the output
    )


class SamplingRows(NamedTuple):
    """How to choose one token for each of R rows of logits."""

    temperature: Tensor  # [R] float64; 0 = greedy
    top_k: Tensor  # [R] int64; 0 = all
    top_p: Tensor  # [R] float32; 1 = all
    min_p: Tensor  # [R] float32; 0 = all
    uniform: Tensor  # [R] float64 in [0, 1), see `motet.kernels.philox`


class Ops(ABC):
    """One backend on one device."""

    name: str
    """What `EngineStats.backend` shows."""

    why = "it was asked for"
    """What `ModelInfo.why` shows: the reasons of `select_ops`."""

    device: torch.device

    dtype: torch.dtype
    """D: of the weights of linears and embeddings, of adapters and of the KV cache."""

    activations: torch.dtype
    """A: of what flows through the model, and of the small parameters, norms and biases. D or float32."""

    keeps_blocks: bool = False
    """Whether weights that the checkpoint holds as `Blocks` shall stay so: `pack_blocks` then comes first."""

    def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Replay | None:
        """What runs a step on other inputs, with little beside the ops themselves.

        The step is called once, to learn its ops; nothing is computed by that. inputs: every array that it reads and
        that differs from step to step; all else stays as it is: the weights, the KV caches, the number of rows. None:
        this backend records nothing, or nothing of this step.
        """
        return None

    def start(self, step: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Has the ops that a step calls computed while the caller goes on: what it returns, and what waits for it.

        Behind the steps started before. The step itself runs at once and may call ops and replays alone, since no
        tensor of theirs holds anything before the wait is over. Other ops, and recording, are for when every step
        that was started has been waited for.
        """
        return step(), lambda: None

    def arrays_of(self, plan: AttentionPlan | LoRAPlan) -> tuple[Tensor, ...]:
        """The arrays through which recorded ops see a step's plan: part of `record`'s inputs."""
        return ()

    def keep_packed(self, folder: Path, model: bytes) -> AbstractContextManager[None]:
        """While it is open, `packed` finds what it gave for this model last time in a file of the folder, or keeps it.

        model: its digest. A backend without slow packing keeps nothing.
        """
        return nullcontext()

    def packed(self, shape: tuple[int, int], pack: Callable[[], LinearWeight]) -> LinearWeight:
        """What `pack` gives: a weight of this shape, [N, K], by one of the methods below."""
        return pack()

    def packs(self, weights: Sequence[Tensor]) -> bool:
        """Whether `pack_linear` and `pack_table` take these as they are; else they are given one weight in D."""
        return len(weights) == 1 and (weights[0].dtype, weights[0].device) == (self.dtype, self.device)

    @abstractmethod
    def pack_linear(self, *weights: Tensor) -> LinearWeight:
        """Weights under each other as this backend likes them best: [sum of N, K] D, in memory of its own."""

    @abstractmethod
    def pack_table(self, *tables: Tensor) -> LinearWeight:
        """As `pack_linear`, for `embedding` and, where the output head is tied to the table, `linear`."""

    def pack_blocks(self, parts: Sequence[Blocks]) -> LinearWeight | None:
        """Weights under each other, all of one K, as one [sum of N, K] for `linear` and `embedding`: exactly these.

        None: no format of this backend holds them exactly.
        """
        return None

    def expand_blocks(self, blocks: Blocks, out: Tensor) -> bool:
        """Writes the weights' values to out [N, K] D, contiguous, rounded to D.

        False: nothing was written, since this backend is no faster than whoever read the blocks.
        """
        return False

    @abstractmethod
    def unpack_linear(self, weight: LinearWeight) -> Tensor:
        """The [N, K] D that was packed, as far as its format kept it; it may share the memory."""

    @abstractmethod
    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        """y = x · weightᵀ (+ bias). x [T, K] A, weight [N, K], bias [N] A -> [T, N] A."""

    @abstractmethod
    def embedding(self, ids: Tensor, table: LinearWeight) -> Tensor:
        """table[ids]. ids [T] int64, table [V, H] from `pack_table` -> [T, H] A."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; then y = residual / sqrt(mean(residual²) + eps) · weight (arXiv 1910.07467).

        The mean is over the last axis, in float32. x, residual [T, H] A, weight [H] A or float32 -> [T, H] A.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight, as `add_rms_norm`. x [..., N] A, weight [N] A or float32."""

    @abstractmethod
    def rms_norm_heads(self, x: Tensor, first: int, last: int, weight: Tensor, eps: float) -> None:
        """`rms_norm`, in place, of each head in the columns [first, last) of x; a head is as wide as the weight.

        x [T, N] A, weight [head_dim] A or float32; last - first is a multiple of head_dim.
        """

    @abstractmethod
    def zeros_like(self, x: Tensor) -> Tensor:
        """An empty residual stream. x [T, H] A -> [T, H] A."""

    @abstractmethod
    def scale(self, x: Tensor, by: float) -> None:
        """x *= by, in place. x [T, H] A."""

    @abstractmethod
    def add_residual(self, x: Tensor, residual: Tensor) -> None:
        """residual += x, in place. Both [T, H] A."""

    @abstractmethod
    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x[rows]. x [T, H] A, rows [R] int64 -> [R, H] A."""

    @abstractmethod
    def fill_sampled(self, ids: Tensor, sampled: Tensor, source: Tensor) -> None:
        """ids[i] = sampled[source[i]] where source[i] >= 0, in place: tokens that were chosen before.

        ids, source [n] int64, sampled [R] int64.
        """

    @abstractmethod
    def as_logits(self, y: Tensor, softcap: float | None = None) -> Tensor:
        """y in float32; with a softcap, softcap · tanh(y / softcap) (arXiv 2408.00118).

        y [R, V] A, whose memory it may take over -> [R, V] float32.
        """

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(x[:, :N]) · x[:, N:] (SwiGLU, arXiv 2002.05202). x [T, 2N] A -> [T, N] A."""

    @abstractmethod
    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        """gelu(x[:, :N]) · x[:, N:], gelu by its tanh approximation (arXiv 1606.08415, 2002.05202); as above."""

    @abstractmethod
    def new_kv_cache(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> KVCache:
        """An empty cache of one layer, in D. Slot = block_id · block_size + offset in the block."""

    @abstractmethod
    def copy_kv_blocks(self, kv: KVCache, sources: Tensor, destinations: Tensor, block_size: int) -> None:
        """Block destinations[i] of one layer's cache becomes a copy of block sources[i], in place.

        sources, destinations [n] int64; the destinations are all different, and none of them is a source.
        """

    @abstractmethod
    def rope_cos_sin(
        self, positions: Tensor, frequencies: Tensor, magnitude: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of position · frequency, times magnitude, as `rope_and_store_kv` takes them.

        Computed in float32, as transformers does. positions [T] int64; frequencies [n / 2] float32: radians per
        position of each pair of dimensions -> cos, sin [T, n] A.
        """

    @abstractmethod
    def rope_and_store_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: KVCache,
        slot_mapping: Tensor,
        num_heads: int,
        num_kv_heads: int,
    ) -> Tensor:
        """Rotates q and k (halves layout, arXiv 2104.09864) and stores k and v in their KV slots.

        qkv [T, (num_heads + 2 num_kv_heads) · head_dim] A: q, k, v side by side, rotated in place;
        cos, sin [T, n] A: each pair's angle for both of its halves, sin's first half negated; the first n
        dimensions of each head turn, the rest (all, where n = 0) stay;
        slot_mapping [T] int64, a row with -1 stores nothing.
        Returns q as [T, num_heads, head_dim] (it may share qkv's memory).
        """

    @abstractmethod
    def plan_attention(
        self,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        block_size: int,
        window: int | None = None,
    ) -> AttentionPlan:
        """Prepares `paged_attention` for one step; the plan serves all layers with this window.

        cu_seqlens_q [S + 1] int64: sequence s owns the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1], at least
        one; seq_lens [S] int64: tokens in the cache, this step's included; block_tables [S, B] int64, -1
        behind the last block. All three on the CPU. window: how many tokens a row sees, its own included and
        the latest first (arXiv 2004.05150); None: all.
        """

    @abstractmethod
    def paged_attention(
        self, q: Tensor, kv: KVCache, plan: AttentionPlan, scale: float, softcap: float | None = None
    ) -> Tensor:
        """softmax(scale · q · kᵀ) · v, causal, over each sequence's own blocks (arXiv 2309.06180).

        q [T, num_heads, head_dim] A; the i-th of a sequence's n rows sees its first seq_len - n + i + 1
        tokens, of those the plan's window; num_heads is a multiple of the cache's KV heads (GQA). softcap: the
        scores s become softcap · tanh(s / softcap) before the softmax (arXiv 2408.00118). Memory outside those
        tokens may hold anything, NaN included. Returns [T, num_heads · head_dim] A.
        """

    @abstractmethod
    def new_adapter_memory(self, numel: int) -> Tensor:
        """[numel] D, of any content, for the weights of all adapters. It takes up room only where it is written."""

    @abstractmethod
    def plan_lora(self, arena: Tensor, table: Tensor, acts: Tensor, segments: Tensor) -> LoRAPlan:
        """Prepares `add_lora` for one step, at all sites.

        arena: flat, D, the weights of all adapters. table [slots, projections, 5] int64: where those of adapter slot s
        for a projection lie, as (a, b, rank r, scale, shift), each but r an offset into the arena, in elements:
        A is `arena[a:][: r * in_features]` seen as [r, in_features];
        B is `arena[b:][: r * out]` seen as [r, out], so transposed, the adapter's scaling folded in;
        scale is `arena[scale:][: out]`, shift likewise; -1: there is none. r = 0: there are no A and B.
        acts [sites] bool on the CPU: whether an adapter of the step has anything at the site.
        segments [n, 3] int64 on the CPU: (slot, first row, last row + 1), without overlap.
        """

    @abstractmethod
    def add_lora(self, x: Tensor, slices: LoRASlices, plan: LoRAPlan, out: Tensor) -> None:
        """out[t, columns of p] = scale · out + shift + B · A · x[t], in place, all of row t's adapter for slice p.

        The mixed-adapter product (SGMV, arXiv 2310.18547), ranks of 1 to 256 side by side; scale and shift are for
        DoRA (arXiv 2402.09353) and for biases of an adapter's own. Rows in no segment cost nothing and may hold
        anything. x [T, in_features] A; or [T] int64: ids, each for a row that is 1 there and 0 elsewhere. out
        [T, N] A, its rows contiguous.
        """

    @abstractmethod
    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's largest logit, the first of equals, and whether all of the row's are finite.

        logits [R, V] float32 -> ids [R] int64, finite [R] bool. The id of a row with a NaN is some id.
        """

    @abstractmethod
    def uniform(self, seeds: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
        """What `sample` takes for each row: `motet.kernels.philox.uniform`. All [R] int64, the bits of uint64."""

    @abstractmethod
    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """One token id per row. logits [R, V] float32 -> [R] int64; logits are not kept.

        p = softmax(logits / temperature) is cut to the top_k likeliest, of those to the smallest set of the
        likeliest whose share reaches top_p, of those to p >= min_p · max p; never to fewer than one (equals
        stand in the order of their ids). The draw is the first id at which the cumulative probability, in the
        order of ids, exceeds uniform · total. A row with a NaN or an infinity above all gets some id.
        """

    @abstractmethod
    def logprobs(self, logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """log softmax(logits) of the chosen ids and of the k likeliest.

        logits [R, V] float32, chosen [R] int64 -> chosen's [R], ids [R, k] int64 and theirs [R, k] float32,
        likeliest first.
        """


def select_ops(
    device: str, dtype: str, threads: int | None = None, quantization: Quantization | None = None
) -> Ops:
    """The best backend for a device and dtype ("auto" or a name, as in `EngineConfig`), with its reasons in `why`.

    threads: of the native CPU backend; None: as many as torch uses. Without the native library it is the reference
    backend, and a warning says why; quantization is then a `ModelError`.
    """
    from motet.kernels.cpu.library import (
        ISA_VARIABLE,
        NoNativeLibrary,
        auto_dtype,
        build_is_named,
        open_library,
    )
    from motet.kernels.cpu.ops import CpuOps
    from motet.kernels.reference import ReferenceOps

    if device not in ("auto", "cpu"):
        raise ValueError(f"no backend for device {device!r}; there is one for 'cpu'")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    try:
        isa, library = open_library()
    except NoNativeLibrary as why:
        if quantization is not None:
            raise ModelError(
                f"EngineConfig.quantization is {quantization!r}, which needs the native library, but {why}: "
                "install motet where there is a compiler, or leave quantization None"
            ) from why
        # As text: whoever keeps the record would keep the error's frames, and all that its callers hold.
        logger.warning("%s: it computes with torch instead, several times slower", str(why))
        ops: Ops = ReferenceOps(torch.device("cpu"), dtypes.get(dtype, torch.float32))
        ops.why = str(why)
        return ops
    reasons = [f"{ISA_VARIABLE} names it" if build_is_named() else "the best build for this processor"]
    if dtype == "auto":
        dtype, reason = auto_dtype(isa)
        reasons.append(f"dtype auto is {dtype}: {reason}")
    ops = CpuOps(isa, library, dtypes[dtype], threads or torch.get_num_threads(), quantization)
    ops.why = "; ".join(reasons)
    return ops
