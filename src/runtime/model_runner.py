"""ModelRunner: the tensor side of a step. Owns the KV tensors; knows plans, never requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from motet.errors import RequestFailed
from motet.kernels.ops import Ops
from motet.lora.arena import AdapterArena
from motet.runtime.forward_batch import BatchBuilder, ForwardBatch
from motet.runtime.models.base import CausalLM, KVGroup
from motet.runtime.recorded_steps import RecordedSteps
from motet.runtime.sampler import Choice, choose, is_plain, prompt_logprobs, sample, samples_of
from motet.runtime.scheduler_output import Sample, SchedulerOutput, StepResult


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The handle of a step that the device computes by itself."""

    wait: Callable[[], None]
    _take: Callable[[], StepResult]
    runs = True

    def result(self) -> StepResult:
        self.wait()
        return self._take()


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """The handle of a step that is computed when its result is asked for: between its ops something is decided."""

    result: Callable[[], StepResult]
    runs = False

    def wait(self) -> None:
        pass


class ModelRunner:
    """Runs one model on one device.

    A recorded step whose tokens are chosen by ops alone is left to the device, and the next one may be submitted
    meanwhile: its input, the tokens that are being chosen, never passes through Python. Behind any other step nothing
    may be submitted until its result was asked for.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        arena: AdapterArena,
        group: KVGroup,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
    ) -> None:
        self._ops = ops
        self._block_size = block_size
        self._kv_caches = [
            ops.new_kv_cache(num_blocks, block_size, group.num_kv_heads, group.head_dim)
            for _ in range(group.num_layers)
        ]
        self._steps = RecordedSteps(ops, model, self._kv_caches)
        max_blocks = -(-model.max_model_len // block_size)
        self._batches = BatchBuilder(
            ops,
            arena,
            max_num_seqs=max_num_seqs,
            max_blocks=min(num_blocks, max_blocks),
            block_size=block_size,
            windows=group.windows,
        )

        self._sampled: dict[int, int] = {}
        """Of the latest step that was left to the device: which of its rows is whose."""
        self._token_ids = torch.empty(0, dtype=torch.int64)
        """What that step chooses, by row."""

    @torch.inference_mode()
    def submit(self, plan: SchedulerOutput) -> RunningStep | WaitingStep:
        """As `Runner`. What the model raises, here or when the result is asked for, concerns every request."""
        batch = self._batches.build(plan)
        is_free = not plan.copies and not batch.prompt_rows and is_plain(batch.sampling, batch.ruled)
        if is_free and self._steps.replays(batch):
            return self._start(batch)
        return WaitingStep(partial(self._compute, plan, batch))

    def _start(self, batch: ForwardBatch) -> RunningStep:
        source = np.full(len(batch.input_ids), -1, dtype=np.int64)
        for i, request_id in batch.awaited:
            source[i] = self._sampled[request_id]
        before = self._token_ids

        def step() -> Choice:
            self._ops.fill_sampled(batch.input_ids, before, torch.from_numpy(source))
            return choose(self._ops, self._steps(batch), batch.sampling)

        choice, wait = self._ops.start(step)
        self._sampled = {request_id: row for row, request_id in enumerate(batch.request_ids)}
        self._token_ids = choice.token_ids
        return RunningStep(wait, partial(self._take, batch, choice))

    def _take(self, batch: ForwardBatch, choice: Choice) -> StepResult:
        return self._note(batch, samples_of(choice, batch.sampling))

    @torch.inference_mode()
    def _compute(self, plan: SchedulerOutput, batch: ForwardBatch) -> StepResult:
        if plan.copies:
            sources, destinations = torch.tensor(plan.copies).unbind(1)
            for kv in self._kv_caches:
                self._ops.copy_kv_blocks(kv, sources, destinations, self._block_size)
        self._batches.fill_awaited(batch)
        logits = self._steps(batch)
        first = len(batch.request_ids)
        result = StepResult({})
        if first:
            result = self._note(batch, sample(self._ops, logits[:first], batch.sampling, batch.ruled))
        for request_id, k, token_ids in batch.prompt_rows:
            last = first + len(token_ids)
            of_prompt = prompt_logprobs(self._ops, logits[first:last], token_ids, k)
            if isinstance(of_prompt, RequestFailed):
                result.faults[request_id] = of_prompt
            else:
                result.prompt_logprobs[request_id] = of_prompt
            first = last
        return result

    def _note(self, batch: ForwardBatch, chosen: Sequence[Sample | RequestFailed]) -> StepResult:
        result = StepResult({})
        for request_id, token in zip(batch.request_ids, chosen, strict=True):
            if isinstance(token, RequestFailed):
                # A plan made meanwhile may name the token as in flight: any id will do, nobody reads on.
                self._batches.note_sampled(request_id, 0)
                result.faults[request_id] = token
            else:
                self._batches.note_sampled(request_id, token.token_id)
                result.samples[request_id] = (token,)
        return result
