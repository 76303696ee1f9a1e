"""ModelRunner: the tensor side of a step. Owns the KV tensors; knows plans, never requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from motet.errors import RequestFailed
from motet.kernels.ops import Ops
from motet.lora.arena import AdapterArena
from motet.runtime.forward_batch import BatchBuilder
from motet.runtime.models.base import CausalLM, KVGroup
from motet.runtime.recorded_steps import RecordedSteps
from motet.runtime.sampler import prompt_logprobs, sample
from motet.runtime.scheduler_output import Sample, SchedulerOutput, StepResult


@dataclass(frozen=True, slots=True)
class DoneStep:
    """The handle of a step that was computed when it was submitted."""

    _result: StepResult

    def result(self) -> StepResult:
        return self._result


class ModelRunner:
    """Runs one model on one device."""

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

    @torch.inference_mode()
    def submit(self, plan: SchedulerOutput) -> DoneStep:
        """Computes the plan. Raises whatever the model raises: such a fault concerns every request."""
        if plan.copies:
            sources, destinations = torch.tensor(plan.copies).unbind(1)
            for kv in self._kv_caches:
                self._ops.copy_kv_blocks(kv, sources, destinations, self._block_size)
        batch = self._batches.build(plan)
        logits = self._steps(batch)
        samples: dict[int, tuple[Sample, ...]] = {}
        faults: dict[int, RequestFailed] = {}
        if batch.request_ids:
            chosen = sample(self._ops, logits[: len(batch.request_ids)], batch.sampling, batch.ruled)
            for request_id, token in zip(batch.request_ids, chosen, strict=True):
                if isinstance(token, RequestFailed):
                    # A plan made meanwhile may name the token as in flight: any id will do, nobody reads on.
                    self._batches.note_sampled(request_id, 0)
                    faults[request_id] = token
                else:
                    samples[request_id] = (token,)
                    self._batches.note_sampled(request_id, token.token_id)
        of_prompts: dict[int, tuple[dict[int, float], ...]] = {}
        first = len(batch.request_ids)
        for request_id, k, token_ids in batch.prompt_rows:
            last = first + len(token_ids)
            of_prompt = prompt_logprobs(self._ops, logits[first:last], token_ids, k)
            if isinstance(of_prompt, RequestFailed):
                faults[request_id] = of_prompt
            else:
                of_prompts[request_id] = of_prompt
            first = last
        return DoneStep(StepResult(samples, faults, of_prompts))
