"""The reference backend: what each op means, in plain torch. It runs anywhere and is every kernel's oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from motet.kernels import philox
from motet.kernels.ops import LoRASlices, Ops, SamplingRows


class ReferenceKV(NamedTuple):
    """Keys and values side by side, so that one op stores or gathers both.

    The last row takes what padding (slot -1) stores.
    """

    both: Tensor  # [slots + 1, 2, num_kv_heads, head_dim]
    k: Tensor  # its halves
    v: Tensor


class AttentionGroup(NamedTuple):
    """Sequences of equal q and similar context, padded to one: a batched call each, no loop over sequences."""

    rows: Tensor  # [n, Q] int64: rows of q
    slots: Tensor  # [n * L] int64: KV slots; padding repeats the sequence's last slot, so it is never foreign
    mask: Tensor  # [n, 1, Q, L] D: 0 where visible, -inf elsewhere


class ReferenceLoRA(NamedTuple):
    """The adapters of one step, as `Ops.plan_lora` is told."""

    arena: Tensor
    table: Tensor  # [slots, projections, 5] int64
    acts: list[bool]
    slots: Tensor  # [n] int64
    rows: list[slice]  # n times


class ReferenceOps(Ops):
    name = "reference"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = self.activations = dtype
        self._gathered = torch.empty(0, 0, dtype=dtype, device=device)
        """Where `paged_attention` gathers K and V. Kept: the system takes and clears new megabytes slowly."""

    def pack_linear(self, *weights: Tensor) -> Tensor:
        # The same [N, K], stored column by column: MKL's products with 4 to 63 rows run twice as fast so.
        (weight,) = weights
        return weight.t().contiguous().t()

    def pack_table(self, *tables: Tensor) -> Tensor:
        (table,) = tables
        return table.clone()

    def unpack_linear(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.is_contiguous() and 4 <= x.shape[0] < 64:
            # A tied embedding: for few rows MKL is faster on the transposed product.
            y = (weight @ x.t()).t()
            return y if bias is None else y + bias
        return F.linear(x, weight, bias)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:
            return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    def rms_norm_heads(self, x: Tensor, first: int, last: int, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        heads = x[:, first:last].view(len(x), (last - first) // size, size)
        heads.copy_(self.rms_norm(heads, weight, eps))

    def zeros_like(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def scale(self, x: Tensor, by: float) -> None:
        x *= by

    def add_residual(self, x: Tensor, residual: Tensor) -> None:
        residual += x

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows]

    def fill_sampled(self, ids: Tensor, sampled: Tensor, source: Tensor) -> None:
        is_there = source >= 0
        ids[is_there] = sampled[source[is_there]]

    def as_logits(self, y: Tensor, softcap: float | None = None) -> Tensor:
        y = y.float()
        return y if softcap is None else (y / softcap).tanh_().mul_(softcap)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def new_kv_cache(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> ReferenceKV:
        slots = num_blocks * block_size + 1
        both = torch.empty(slots, 2, num_kv_heads, head_dim, dtype=self.dtype, device=self.device)
        return ReferenceKV(both, both[:, 0], both[:, 1])

    def copy_kv_blocks(self, kv: ReferenceKV, sources: Tensor, destinations: Tensor, block_size: int) -> None:
        blocks = kv.both[:-1].view(-1, block_size, *kv.both.shape[1:])
        blocks[destinations] = blocks[sources]

    def rope_cos_sin(
        self, positions: Tensor, frequencies: Tensor, magnitude: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        if magnitude != 1.0:
            cos, sin = cos.mul_(magnitude), sin.mul_(magnitude)
        return torch.cat((cos, cos), -1).to(self.activations), torch.cat((-sin, sin), -1).to(self.activations)

    def rope_and_store_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: ReferenceKV,
        slot_mapping: Tensor,
        num_heads: int,
        num_kv_heads: int,
    ) -> Tensor:
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, kv.k.shape[-1])
        qk = heads[:, : num_heads + num_kv_heads, : cos.shape[-1]]
        swapped = qk.roll(qk.shape[-1] // 2, dims=-1)
        qk.mul_(cos[:, None]).addcmul_(swapped, sin[:, None])
        kv.both[slot_mapping] = heads[:, num_heads:].view(-1, *kv.both.shape[1:])
        return heads[:, :num_heads]

    def plan_attention(
        self,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        block_size: int,
        window: int | None = None,
    ) -> list[AttentionGroup]:
        q_lens = cu_seqlens_q.diff()
        visible = seq_lens if window is None else seq_lens.minimum(q_lens + window - 1)
        return [
            self._plan_group(
                torch.tensor(g), cu_seqlens_q, q_lens, seq_lens, visible, block_tables, block_size, window
            )
            for g in _like_shapes(q_lens.tolist(), visible.tolist())
        ]

    def _plan_group(
        self,
        group: Tensor,
        cu_seqlens_q: Tensor,
        q_lens: Tensor,
        seq_lens: Tensor,
        visible: Tensor,
        block_tables: Tensor,
        block_size: int,
        window: int | None,
    ) -> AttentionGroup:
        q_len, seq_len = q_lens[group, None], seq_lens[group, None]
        q_index = torch.arange(int(q_len[0]))  # [Q]: a group's sequences have equally many rows
        position = torch.arange(int(visible[group].max()))[None]
        if window is not None:
            position = position + seq_len - visible[group, None]
        own = position.clamp(max=seq_len - 1)  # [n, L]
        slots = block_tables[group].gather(1, own // block_size) * block_size + own % block_size
        last_seen = (seq_len - q_len + q_index)[..., None]  # [n, Q, 1]
        hidden = position[:, None] > last_seen  # [n, Q, L]
        if window is not None:
            hidden |= position[:, None] <= last_seen - window
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        rows = cu_seqlens_q[:-1][group, None] + q_index
        return AttentionGroup(rows, slots.flatten(), mask[:, None])

    def paged_attention(
        self,
        q: Tensor,
        kv: ReferenceKV,
        plan: list[AttentionGroup],
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        if len(plan) == 1 and len(plan[0].rows) == 1:  # a single sequence owns all rows: nothing to sort out
            _, slots, mask = plan[0]
            k, v = self._gather(kv, slots)[None].transpose(1, 3).unbind(2)
            return _attend(q[None], k, v, mask, scale, softcap).flatten(2)[0]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, slots, mask in plan:
            k, v = self._gather(kv, slots).view(len(rows), -1, *kv.both.shape[1:]).transpose(1, 3).unbind(2)
            out[rows] = _attend(q[rows], k, v, mask, scale, softcap)
        return out.flatten(1)

    def _gather(self, kv: ReferenceKV, slots: Tensor) -> Tensor:
        """kv.both[slots], valid until the next call."""
        cache = kv.both.flatten(1)
        num_slots = slots.shape[0]
        if self._gathered.shape[0] < num_slots or self._gathered.shape[1] != cache.shape[1]:
            self._gathered = cache.new_empty(num_slots, cache.shape[1])
        gathered = torch.index_select(cache, 0, slots, out=self._gathered[:num_slots])
        return gathered.view(-1, *kv.both.shape[1:])

    def new_adapter_memory(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def plan_lora(self, arena: Tensor, table: Tensor, acts: Tensor, segments: Tensor) -> ReferenceLoRA:
        slots = segments[:, 0]
        rows = [slice(first, last) for _, first, last in segments.tolist()]
        return ReferenceLoRA(arena, table, acts.tolist(), slots, rows)

    def add_lora(self, x: Tensor, slices: LoRASlices, plan: ReferenceLoRA, out: Tensor) -> None:
        if not plan.acts[slices.site]:
            return
        bounds = slices.bounds.tolist()
        entries = plan.table[plan.slots, slices.first : slices.first + len(bounds) - 1].tolist()
        for rows, of_slices in zip(plan.rows, entries, strict=True):
            for (left, right), entry in zip(pairwise(bounds), of_slices, strict=True):
                _add_delta(x[rows], slices.in_features, plan.arena, entry, out[rows, left:right])

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        # A sum meets every NaN and Inf of its row, several times cheaper than a look at each number.
        finite = logits.sum(-1).isfinite()
        if not finite.all():
            finite = logits.isfinite().all(-1)
        return logits.argmax(-1), finite

    def uniform(self, seeds: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
        words = (x.numpy(force=True).view(np.uint64) for x in (seeds, positions, choices))
        return torch.from_numpy(philox.uniform(*words)).to(seeds.device)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        chosen = logits.argmax(-1)
        drawn = rows.temperature > 0
        if drawn.any():
            chosen[drawn] = _draw(logits[drawn], SamplingRows(*(x[drawn] for x in rows)))
        return chosen

    def logprobs(self, logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        all_logprobs = logits.log_softmax(-1)
        top, ids = all_logprobs.topk(k, dim=-1)
        return all_logprobs.gather(-1, chosen[:, None])[:, 0], ids, top


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """q [n, Q, heads, d], k and v [n, KV heads, L, d] -> [n, Q, heads, d]."""
    n, q_len, num_heads, head_dim = q.shape
    if softcap is not None:
        return _attend_capped(q, k, v, mask, scale, softcap)
    if q_len == 1:  # the query heads of one KV head become rows of one product
        q = q.reshape(n, k.shape[1], -1, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return y.reshape(n, 1, num_heads, head_dim)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """`_attend` in plain products: torch's own attention caps no scores."""
    n, q_len, _, head_dim = q.shape
    q = q.transpose(1, 2).reshape(n, k.shape[1], -1, q_len, head_dim)
    scores = (q @ k[:, :, None].mT).mul_(scale / softcap).tanh_().mul_(softcap)
    p = (scores + mask[:, None]).softmax(-1, dtype=torch.float32).to(v.dtype)
    return (p @ v[:, :, None]).flatten(1, 2).transpose(1, 2)


def _like_shapes(q_lens: list[int], seq_lens: list[int]) -> list[list[int]]:
    """Indices of the sequences in groups that waste little when padded to their largest member."""
    order = sorted(range(len(q_lens)), key=lambda i: (q_lens[i], seq_lens[i]))
    groups: list[list[int]] = []
    smallest = 0
    for i in order:
        # A call costs about as much as gathering a few hundred tokens: short sequences may as well share it.
        fits = bool(groups) and q_lens[i] == q_lens[groups[-1][0]] and seq_lens[i] <= 1.3 * smallest + 32
        if not fits:
            groups.append([])
            smallest = seq_lens[i]
        groups[-1].append(i)
    return groups


def _add_delta(x: Tensor, in_features: int, arena: Tensor, entry: list[int], out: Tensor) -> None:
    """`Ops.add_lora` of one adapter and one projection: x [n, in_features] or ids [n], out [n, its columns]."""
    a, b, rank, scale, shift = entry
    n = out.shape[1]
    if scale >= 0:
        out *= arena[scale : scale + n]
    if shift >= 0:
        out += arena[shift : shift + n]
    if rank:
        down = arena[a : a + rank * in_features].view(rank, in_features)
        up = arena[b : b + rank * n].view(rank, n)
        out.addmm_(x @ down.t() if x.ndim == 2 else down[:, x].t(), up)


def _draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    """`Ops.sample` for rows with a temperature above 0."""
    p = (logits.double() / rows.temperature[:, None]).softmax(-1)  # in double: temperatures may be tiny
    vocab_size = p.shape[-1]
    if bool(((rows.top_k > 0) | (rows.top_p < 1)).any()):
        # By logit, as unequal ones may round to one probability: a cut to one token is the greedy choice.
        ids = logits.argsort(dim=-1, descending=True, stable=True)
        ranked = p.gather(-1, ids)
        rank = torch.arange(vocab_size, device=p.device)
        top_k = torch.where(rows.top_k > 0, rows.top_k, vocab_size)[:, None]
        ranked = ranked.masked_fill(rank >= top_k, 0.0)
        share_before = (ranked.cumsum(-1) - ranked) / ranked.sum(-1, keepdim=True)
        cut = (share_before >= rows.top_p[:, None]) & (rows.top_p[:, None] < 1) & (rank > 0)
        p = torch.zeros_like(p).scatter_(-1, ids, ranked.masked_fill(cut, 0.0))
    p = p.masked_fill(p < rows.min_p[:, None] * p.max(-1, keepdim=True).values, 0.0)
    cumulative = p.cumsum(-1)
    target = rows.uniform[:, None] * cumulative[:, -1:]
    # Where nothing at all is possible there is no sum to search in: any id is as wrong as another.
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=vocab_size - 1)
