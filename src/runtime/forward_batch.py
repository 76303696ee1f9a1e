"""ForwardBatch: one plan as the arrays that travel through every layer as arguments. Tensors begin here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet.kernels.ops import AttentionPlan, Ops
from motet.lora.arena import AdapterArena
from motet.lora.batch import LoRABatch
from motet.runtime.logits_rules import RequestRules
from motet.runtime.scheduler_output import IN_FLIGHT, Chunk, NewRequest, SamplingSpec, SchedulerOutput


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's arrays. T tokens; R of them have their logits computed."""

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, from 0 in each request."""
    slot_mapping: Tensor
    """[T] int64: the KV slot that each token's K and V go to."""
    attention: Mapping[int | None, AttentionPlan]
    """A plan for each window that the model's layers have."""
    lora: LoRABatch | None
    """None: no row has an adapter."""
    logits_lora: LoRABatch | None
    """The same of `logits_rows`."""
    logits_rows: Tensor
    """[R + P] int64: the rows behind which a token is sampled, then those whose next token is a prompt's, wanted
    with its log-probability."""
    request_ids: tuple[int, ...]
    """R times: for whom."""
    sampling: tuple[tuple[SamplingSpec, int], ...]
    """R times (how to choose, which output token of its request it is)."""
    ruled: tuple[tuple[int, RequestRules], ...]
    """(which of the R rows, the rules for its logits), of those that have some."""
    awaited: tuple[tuple[int, int], ...] = ()
    """(which of the T tokens, the request whose token it is), of those that the step before this one samples."""
    prompt_rows: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """(request id, how many of the likeliest, the next tokens of that many rows of the P), in their order."""

    def arrays(self, ops: Ops) -> list[Tensor]:
        """Every array that the model's ops read and that differs between two steps of one shape."""
        loras = (lora.plan for lora in (self.lora, self.logits_lora) if lora is not None)
        plans = [array for plan in (*self.attention.values(), *loras) for array in ops.arrays_of(plan)]
        return [self.input_ids, self.positions, self.slot_mapping, self.logits_rows, *plans]


@dataclass(slots=True)
class _Row:
    """What is kept of a request between steps."""

    index: int
    """Its row in the block-table buffer."""
    adapter_slot: int
    sampling: SamplingSpec
    rules: RequestRules | None
    num_blocks: int = 0
    last_token_id: int = -1


class BatchBuilder:
    """Turns plans into batches, over one persistent block-table buffer."""

    def __init__(
        self,
        ops: Ops,
        arena: AdapterArena,
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self._ops = ops
        self._arena = arena
        self._windows = windows
        self._block_size = block_size
        self._block_tables = np.full((max_num_seqs, max_blocks), -1, dtype=np.int64)
        self._free_rows = list(range(max_num_seqs))
        self._rows: dict[int, _Row] = {}

    def build(self, plan: SchedulerOutput) -> ForwardBatch:
        for request_id in plan.dropped:
            self._free_rows.append(self._rows.pop(request_id).index)
        for new in plan.new:
            self._rows[new.request_id] = self._new_row(new)
        # Rows of one adapter stand together: the fewest segments for the mixed-adapter product.
        chunks = sorted(plan.chunks, key=lambda chunk: self._rows[chunk.request_id].adapter_slot)
        rows = [self._rows[chunk.request_id] for chunk in chunks]
        for row, chunk in zip(rows, chunks, strict=True):
            self._append_blocks(row, chunk)

        row_index = np.array([row.index for row in rows])
        q_lens = np.array([len(chunk.token_ids) for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        cu_seqlens_q = np.concatenate(([0], q_lens.cumsum()))
        positions = np.arange(cu_seqlens_q[-1]) + np.repeat(starts - cu_seqlens_q[:-1], q_lens)
        blocks = self._block_tables[np.repeat(row_index, q_lens), positions // self._block_size]
        widest = max(row.num_blocks for row in rows)
        sequences = (
            torch.from_numpy(cu_seqlens_q),
            torch.from_numpy(starts + q_lens),
            torch.from_numpy(self._block_tables[row_index, :widest]),
            self._block_size,
        )
        slots = np.repeat([row.adapter_slot for row in rows], q_lens)
        sampled = [i for i, chunk in enumerate(chunks) if chunk.output_index >= 0]
        rules = [rows[i].rules for i in sampled]
        logits_rows = cu_seqlens_q[1:][sampled] - 1
        asking = [i for i, chunk in enumerate(chunks) if chunk.next_prompt_ids]
        if asking:
            ranges = [np.arange(len(chunks[i].next_prompt_ids)) + cu_seqlens_q[i] for i in asking]
            logits_rows = np.concatenate([logits_rows, *ranges])
        awaited = [i for i, chunk in enumerate(chunks) if chunk.token_ids[-1] == IN_FLIGHT]
        lora = LoRABatch(self._ops, self._arena, slots) if slots.max() >= 0 else None
        return ForwardBatch(
            input_ids=torch.tensor([token_id for chunk in chunks for token_id in chunk.token_ids]),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(blocks * self._block_size + positions % self._block_size),
            attention={w: self._ops.plan_attention(*sequences, window=w) for w in self._windows},
            lora=lora,
            logits_lora=None if lora is None else lora.of_rows(logits_rows),
            logits_rows=torch.from_numpy(logits_rows),
            request_ids=tuple(chunks[i].request_id for i in sampled),
            sampling=tuple((rows[i].sampling, chunks[i].output_index) for i in sampled),
            ruled=tuple((r, own) for r, own in enumerate(rules) if own is not None),
            awaited=tuple((int(cu_seqlens_q[i + 1]) - 1, chunks[i].request_id) for i in awaited),
            prompt_rows=tuple(
                (chunks[i].request_id, rows[i].sampling.prompt_logprobs or 0, chunks[i].next_prompt_ids)
                for i in asking
            ),
        )

    def fill_awaited(self, batch: ForwardBatch) -> None:
        """Puts the tokens in that the step before has sampled, once they are noted."""
        for i, request_id in batch.awaited:
            batch.input_ids[i] = self._rows[request_id].last_token_id

    def note_sampled(self, request_id: int, token_id: int) -> None:
        """Remembers a request's newest token: a plan may name it only as in flight, and rules look at it."""
        row = self._rows[request_id]
        row.last_token_id = token_id
        if row.rules is not None:
            row.rules.note(token_id)

    def _new_row(self, new: NewRequest) -> _Row:
        spec = new.sampling
        rules = None
        if spec.rules is not None:
            rules = RequestRules(spec.rules, new.token_ids, new.num_prompt_tokens)
        row = _Row(self._free_rows.pop(), new.adapter_slot, spec, rules)
        self._block_tables[row.index] = -1
        return row

    def _append_blocks(self, row: _Row, chunk: Chunk) -> None:
        (new_ids,) = chunk.new_block_ids
        self._block_tables[row.index, row.num_blocks : row.num_blocks + len(new_ids)] = new_ids
        row.num_blocks += len(new_ids)
