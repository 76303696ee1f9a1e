"""Puts an engine's runtime together: weights, KV cache, adapters, scheduler, runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

import psutil
import torch

from motet.config import EngineConfig
from motet.errors import ModelError
from motet.kernels.ops import select_ops
from motet.lora.arena import AdapterArena
from motet.lora.loader import AdapterLoader
from motet.lora.pool import AdapterPool
from motet.runtime.admission import Admission
from motet.runtime.block_pool import BlockPool
from motet.runtime.chat_template import ChatTemplate
from motet.runtime.engine_core import EngineCore
from motet.runtime.intake import Intake
from motet.runtime.kv_cache_manager import KVCacheManager
from motet.runtime.model_info import ModelInfo, describe
from motet.runtime.model_runner import ModelRunner
from motet.runtime.models.base import KVGroup
from motet.runtime.models.loader import load_model
from motet.runtime.policy import POLICIES
from motet.runtime.request import Request
from motet.runtime.scheduler import Scheduler
from motet.runtime.tokenizer import Tokenizer

logger = logging.getLogger("motet")

CPU_BATCHED_TOKENS = 128
"""Default token budget of a step on a CPU: long enough for full products, short enough for steady streams."""

KV_SHARE = 0.25
"""Largest share of the free memory that the KV cache takes by default."""


@dataclass(frozen=True)
class Runtime:
    """A loaded engine, as its thread drives it. `intake`, `admission` and `adapters` may be used from any thread."""

    core: EngineCore
    intake: Intake
    admission: Admission
    adapters: AdapterPool
    adapter_loader: AdapterLoader
    """Not started yet."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_info: ModelInfo


def build_runtime(
    model: str | PathLike[str], config: EngineConfig, on_release: Callable[[Request], None], *, depth: int = 2
) -> Runtime:
    """Loads the model and makes everything around it, for the calling thread to drive.

    Raises the model errors of `load_model`. `on_release` is called once for each request that has ended. `depth`:
    of `EngineCore`.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    ops = select_ops(config.device, config.dtype, config.threads, config.quantization)
    loaded = load_model(model, ops, config.max_model_len, config.packed_weights)
    lm = loaded.model
    if config.max_model_len is not None and config.max_model_len > lm.max_model_len:
        raise ModelError(
            f"EngineConfig.max_model_len is {config.max_model_len}, "
            f"but the model's context has {lm.max_model_len} tokens: lower it, or leave it None"
        )
    max_model_len = config.max_model_len or lm.max_model_len
    (group,) = lm.kv_spec()
    assert group.kind == "full", "one block table of all tokens serves every layer"
    num_blocks = _num_blocks(group, config, max_model_len, ops.dtype.itemsize)
    try:
        adapter_memory = ops.new_adapter_memory(config.adapter_bytes // ops.dtype.itemsize)
        arena = AdapterArena(lm.lora_sites, adapter_memory)
        runner = ModelRunner(
            lm,
            ops,
            arena,
            group,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
        )
    except (RuntimeError, OSError) as error:  # torch has no narrower one for the CPU; mmap's is an OSError
        raise ModelError(
            f"there is not enough memory: lower EngineConfig.kv_cache_bytes (now {config.kv_cache_bytes}) "
            f"or adapter_bytes (now {config.adapter_bytes}): {error}"
        ) from error
    adapters = AdapterPool(arena, config.adapter_host_bytes, resolving=config.adapter_resolver is not None)
    adapter_loader = AdapterLoader(
        adapters, arena, lm.lora_sites, root=config.adapter_root, resolver=config.adapter_resolver
    )
    kv = KVCacheManager(
        BlockPool(num_blocks), config.block_size, enable_prefix_caching=config.enable_prefix_caching
    )
    scheduler = Scheduler(
        kv,
        POLICIES[config.policy],
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or CPU_BATCHED_TOKENS,
        itl_target=config.itl_target,
        on_release=on_release,
    )
    intake = Intake(
        vocab_size=lm.vocab_size,
        max_model_len=max_model_len,
        kv_capacity=num_blocks * config.block_size,
        eos_token_ids=loaded.eos_token_ids,
        defaults=loaded.generation_defaults,
        model_digest=loaded.digest,
        kv_format=(str(ops.dtype), f"{ops.name}:{config.block_size}"),
        seed=config.seed,
    )
    admission = Admission(
        intake.tenants,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        clock=intake.clock,
    )
    return Runtime(
        EngineCore(scheduler, runner, depth=depth),
        intake,
        admission,
        adapters,
        adapter_loader,
        loaded.tokenizer,
        loaded.chat_template,
        describe(loaded, ops, max_model_len),
    )


def _num_blocks(group: KVGroup, config: EngineConfig, max_model_len: int, itemsize: int) -> int:
    """How many KV blocks to make. Memory is taken from the system only as blocks are first used."""
    block_bytes = group.bytes_per_token(itemsize) * config.block_size
    if config.kv_cache_bytes is not None:
        if config.kv_cache_bytes < block_bytes:
            raise ModelError(
                f"EngineConfig.kv_cache_bytes is {config.kv_cache_bytes}, "
                f"but one KV block of this model takes {block_bytes}: raise it, or leave it None"
            )
        return config.kv_cache_bytes // block_bytes
    most_useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    affordable = int(psutil.virtual_memory().available * KV_SHARE) // block_bytes
    num_blocks = max(1, min(most_useful, affordable))
    logger.info(
        "KV cache: %d blocks of %d tokens, %.0f MiB (set EngineConfig.kv_cache_bytes to change it)",
        num_blocks,
        config.block_size,
        num_blocks * block_bytes / (1 << 20),
    )
    return num_blocks
