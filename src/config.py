"""EngineConfig: everything about an engine that is fixed once it runs. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from motet.frozen import Frozen
from motet.params import NonEmptyStr

MiB = 1 << 20


class EngineConfig(Frozen):
    """How an engine runs. Frozen; an unknown key is an error (`pydantic.ValidationError`)."""

    name: NonEmptyStr | None = None
    """The label `engine` of its metrics. None: `engine-1`, or the first such name that no other has."""

    device: Literal["auto", "cpu"] = "auto"
    """Where the model computes. "auto" is the best device that motet has a backend for: the CPU today."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights, adapters and KV cache; the native library computes in float32 between them. float32: greedy output
    is exact. bfloat16: half the memory, outside the exactness promise. "auto" is bfloat16 on a processor with units
    for it (AVX-512 BF16), whose linears take activations in bfloat16, too, and float32 on others."""

    quantization: Literal["int8", "int4", "gguf"] | None = None
    """Weights of linears and tables in fewer bits, and activations in 8 where they meet them: less memory and faster,
    at some cost in quality. "int8": a scale for each output (W8A8); "int4": a scale and a minimum for each 32 weights
    (W4A8), tables in 8 bits; both rounded as the model is loaded. "gguf": what a `.gguf` file holds in Q4_0, Q4_1 or
    Q8_0 stays exactly so, the rest is as `dtype`; a model without such weights is `UnsupportedModel`. Outside the
    exactness promise, yet a request's tokens depend on no other's. Needs the native library (`ModelError` without).
    None: as `dtype`."""

    packed_weights: Path | None = Field(default=None, strict=False)
    """A folder for weights that "int8" or "int4" has rounded: the next start of the same model reads them there and is
    sooner. A file for each model and setting, of the size of its weights in memory; what is damaged, or of another
    build of motet, is written anew. Whoever can write to the folder can change what the model computes. None: they
    are rounded at every start."""

    threads: int | None = Field(default=None, ge=1, le=1024)
    """Compute threads of the engine, and of torch in the whole process. None: torch's own choice (the physical
    cores)."""

    max_model_len: int | None = Field(default=None, ge=1, le=1 << 30)
    """Longest prompt and answer together, in tokens. None: the model's own context length, with LongRoPE
    the original one: asked for more, such a model turns all sequences as long ones, short ones then not exactly."""

    max_num_seqs: int = Field(default=64, ge=1, le=1 << 16)
    """Most requests that run in one step."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    """Token budget of one step, prefill chunks and decodes together. None: 128 on a CPU.
    At least `max_num_seqs` is needed so that every running request can advance in each step."""

    itl_target: float | None = Field(default=None, gt=0.0)
    """Seconds that a step should take at most while requests wait for their next token: prompts get so much less of
    each step, down to 16 tokens, as that takes. The budget of a step is learnt from the time of those before it. None:
    `max_num_batched_tokens` always."""

    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in a KV block."""

    kv_cache_bytes: int | None = Field(default=None, ge=1, le=1 << 60)
    """Memory for the KV cache. None: what `max_num_seqs` full contexts need, at most a quarter of the
    free memory (logged once)."""

    enable_prefix_caching: bool = True
    """Whether full KV blocks are kept after use and shared by equal prefixes of one tenant and adapter."""

    policy: Literal["priority", "fcfs"] = "priority"
    """Order of service: "priority" is larger `priority` first, then arrival; "fcfs" is arrival alone."""

    max_waiting: int | None = Field(default=None, ge=0)
    """Most live requests beyond `max_num_seqs`, those that a quota delays included; one more raises `QueueFull`. Each
    of a request's n outputs counts, but the last that is let in may have any number. None: no limit."""

    max_waiting_tokens: int | None = Field(default=None, ge=1)
    """Most prompt tokens of requests that have not begun to run; a prompt with more than there is place for raises
    `QueueFull`, from the first `__anext__` if it is text. Where none waits there is place for any. None: no limit."""

    adapter_bytes: int = Field(default=512 * MiB, ge=0, le=1 << 60)
    """Memory for adapter weights on the device. Taken from the system only as adapters fill it."""

    adapter_host_bytes: int = Field(default=2048 * MiB, ge=0, le=1 << 60)
    """Memory for adapters that the device has no room for. What does not fit is read from its folder again."""

    adapter_root: Path | None = Field(default=None, strict=False)
    """The folder that adapters are loaded from: sources are relative to it and may not leave it, by `..`, as
    absolute paths or through symbolic links. None: the application's paths are trusted."""

    adapter_resolver: SkipJsonSchema[Callable[[str], str | PathLike[str] | None] | None] = None
    """Finds the PEFT folder of an adapter that is not loaded when a request names it. Called on a thread of its
    own, once for all that ask for the same name meanwhile; it may take its time, or load the adapter itself. If the
    name is still unknown then, None is `AdapterNotFound`, an exception `AdapterLoadError`, raised by the first
    `__anext__`."""

    max_metric_adapters: int = Field(default=100, ge=0)
    """Adapters, and tenants, with metrics of their own: those that come first; the rest share "other"."""

    seed: int = Field(default=0, ge=0, lt=1 << 64)
    """Where the seeds of sampled requests without a `seed` of their own come from, in order of arrival."""
