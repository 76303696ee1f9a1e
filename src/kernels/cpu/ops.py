"""The CPU backend: `Ops` on the native library."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import local
from typing import TypeVar

import torch
from torch import Tensor

from motet.kernels import philox
from motet.kernels.cpu.attention import PagedAttentionPlan, PagedKV
from motet.kernels.cpu.library import NATIVE_BF16, Threads
from motet.kernels.cpu.lora import CpuLoRA
from motet.kernels.cpu.memory import HugePages
from motet.kernels.cpu.packed_file import PackedFile
from motet.kernels.cpu.recording import Argument, Deferred, NotRecordable, Program, Readers, Recording, Watch
from motet.kernels.cpu.weights import FORMATS, INT4_GROUP, INT8_GROUP, PackedWeight, Panels, fits_int4
from motet.kernels.ops import BLOCK, Blocks, LoRASlices, Ops, Quantization, Replay, SamplingRows

logger = logging.getLogger("motet")

Result = TypeVar("Result")


FEW_ROWS = 4
"""With so many, a linear waits for its weights; with many more it computes, and fetching them early is in its way."""


class _Calls(local):
    """What becomes of a thread's calls besides being made, or instead. A loader's, on a thread of its own, are made."""

    recording: Recording | None = None
    deferred: Deferred | None = None


class CpuOps(Ops):
    """Weights of 32, 16, 8 or 4 bits, KV cache and adapters in float32 or bf16; activations always in float32."""

    def __init__(
        self,
        isa: str,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        threads: int,
        quantization: Quantization | None = None,
    ) -> None:
        self.device, self.dtype = torch.device("cpu"), dtype
        self.name = f"cpu ({isa}{'' if quantization is None else ', ' + quantization})"
        self._quantization = quantization
        self.keeps_blocks = quantization == "gguf"
        self._rounds_to_bf16 = isa == NATIVE_BF16
        self.activations = torch.float32
        self._library = library
        self._threads = Threads(library, threads)
        self._memory = HugePages()
        self._panels = Panels(library.motet_panel_columns(), self._memory)
        self._packed_file: PackedFile | None = None
        self._calls = _Calls()
        self._queued: deque[tuple[int, object]] = deque()
        """What the queue may be at, by number: it must find all that it reads and writes, whoever lets go of it."""
        self._arena = torch.empty(0, dtype=torch.uint8)
        """Where programs keep their tensors between ops; only one runs at a time."""

    def _run(self, op: str, *arguments: Argument) -> None:
        """Calls an op of the library; a tensor, contiguous, stands for its address, None for no address.

        Within `record` and `start` the call is noted only.
        """
        if self._calls.deferred is not None:
            self._calls.deferred.call(op, arguments)
            return
        if self._calls.recording is not None:
            self._calls.recording.calls.append((op, arguments))
            return
        function = getattr(self._library, f"motet_{op}")
        function(self._threads.handle, *[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments])

    def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Replay | None:
        recording = Recording()
        self._calls.recording = recording
        try:
            with Readers(), Watch(recording):
                output = step()
            program = Program(self._library, recording, inputs, output)
        except NotRecordable as why:
            logger.info("steps are not recorded: %s", str(why))  # a kept record would keep the frames
            return None
        finally:
            self._calls.recording = None
        if program.arena_bytes > len(self._arena):
            self._arena = torch.empty(program.arena_bytes, dtype=torch.uint8)
        return partial(self._replay, program)

    def _replay(self, program: Program, inputs: Sequence[Tensor]) -> Tensor:
        words, result = program.on(inputs, self._arena)
        if self._calls.deferred is not None:
            self._calls.deferred.add(words, program.num_calls, (inputs, result))
        else:
            self._library.motet_replay(self._threads.handle, words.ctypes.data, program.num_calls)
        return result

    def start(self, step: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        deferred = self._calls.deferred = Deferred(self._library)
        try:
            result = step()
        finally:
            self._calls.deferred = None
        program = deferred.program()
        number = self._library.motet_queue_push(self._threads.queue, program.ctypes.data, deferred.num_calls)
        self._queued.append((number, (program, deferred, step)))
        return result, partial(self._wait, number)

    def _wait(self, number: int) -> None:
        self._library.motet_queue_wait(self._threads.queue, number)
        while self._queued and self._queued[0][0] <= number:
            self._queued.popleft()

    def arrays_of(self, plan: PagedAttentionPlan | CpuLoRA) -> tuple[Tensor, ...]:
        return (plan.header,)

    @contextmanager
    def keep_packed(self, folder: Path, model: bytes) -> Iterator[None]:
        if self._quantization not in ("int8", "int4"):  # to read the others takes as long as to pack them
            yield
            return
        name = f"{model.hex()[:32]}-{self._quantization}-{FORMATS[self.dtype]}"
        library = hashlib.blake2b(Path(self._library._name).read_bytes()).hexdigest()
        self._packed_file = PackedFile(folder / name, f"{model.hex()} {name} {library}", self._panels)
        try:
            yield
            self._packed_file.write()
        finally:
            self._packed_file = None

    def packed(self, shape: tuple[int, int], pack: Callable[[], PackedWeight]) -> PackedWeight:
        return pack() if self._packed_file is None else self._packed_file.packed(shape, pack)

    def packs(self, weights: Sequence[Tensor]) -> bool:
        whole = all(len(weight) % self._panels.columns == 0 for weight in weights[:-1])  # no panel is of two
        return whole and all(weight.dtype in FORMATS and weight.device == self.device for weight in weights)

    def pack_linear(self, *weights: Tensor) -> PackedWeight:
        return self._pack(weights, self._quantization)

    def pack_table(self, *tables: Tensor) -> PackedWeight:
        # 8 bits in int4, too: errors of the table, and of the head that is tied to it, meet no later layer.
        return self._pack(tables, "int8" if self._quantization == "int4" else self._quantization)

    def _pack(self, weights: Sequence[Tensor], quantization: Quantization | None) -> PackedWeight:
        columns, inner = sum(map(len, weights)), weights[0].shape[1]
        if quantization == "int8":
            packed = self._panels.int8(columns, inner, INT8_GROUP)
        elif quantization == "int4":
            packed = self._panels.int4(columns, inner, INT4_GROUP)
        else:
            packed = self._panels.floats(columns, inner, self.dtype)
        first = 0
        for weight in weights:
            op, memory = (
                f"pack_{packed.format}_{FORMATS[weight.dtype]}",
                self._panels.memory_from(first, packed),
            )
            self._run(op, weight.contiguous(), *weight.shape, *packed.grouping, *memory)
            first += len(weight)
        return packed

    def pack_blocks(self, parts: Sequence[Blocks]) -> PackedWeight | None:
        kinds = {part.kind for part in parts}
        columns, inner = sum(len(part.rows) for part in parts), parts[0].inner
        if kinds == {"Q8_0"}:
            packed = self._panels.int8_grouped(columns, inner, BLOCK)
        elif kinds <= {"Q4_0", "Q4_1"} and all(map(fits_int4, parts)):
            packed = self._panels.int4(columns, inner, BLOCK)
        else:
            return None
        first = 0
        for part in parts:
            rows = part.rows.contiguous()
            self._run(f"pack_{part.kind.lower()}", rows, len(rows), inner, first, *packed.memory)
            first += len(rows)
        return packed

    def expand_blocks(self, blocks: Blocks, out: Tensor) -> bool:
        op = f"expand_{blocks.kind.lower()}_{FORMATS[out.dtype]}"
        self._run(op, blocks.rows.contiguous(), out.numel() // BLOCK, out)
        return True

    def unpack_linear(self, weight: PackedWeight) -> Tensor:
        out = torch.empty(weight.columns, weight.inner, dtype=self.dtype)
        op = f"unpack_{weight.format}" + (f"_{FORMATS[self.dtype]}" if weight.group else "")
        self._run(op, *weight.memory, *out.shape, *weight.grouping, out)
        return out

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        y = torch.empty(len(x), weight.columns)
        x = x.contiguous()
        if self._calls.recording is not None and len(x) <= FEW_ROWS:
            self._calls.recording.reads_weights(weight.data)
        sizes = (len(x), weight.inner, weight.columns)
        if weight.group:
            quantised = (weight.group, *weight.memory, bias, weight.scratch(len(x)))
            self._run(f"linear_{weight.format}", x, *sizes, *quantised, y)
        elif weight.format == "bf16" and self._rounds_to_bf16:
            self._run("linear_bf16_pairs", x, *sizes, *weight.memory, bias, weight.scratch(len(x)), y)
        else:
            self._run(f"linear_{weight.format}", x, *sizes, *weight.memory, bias, y)
        return y

    def embedding(self, ids: Tensor, table: PackedWeight) -> Tensor:
        out = torch.empty(len(ids), table.inner)
        self._run(f"gather_{table.format}", ids, len(ids), *table.memory, table.inner, *table.grouping, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty(x.shape)
        self._run("add_rms_norm", x.contiguous(), residual, _of_norm(weight), *x.shape, eps, y)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty(x.shape)
        size = len(weight)
        self._run("rms_norm", x.contiguous(), _of_norm(weight), y.numel() // size, size, eps, y)
        return y

    def rms_norm_heads(self, x: Tensor, first: int, last: int, weight: Tensor, eps: float) -> None:
        self._run("rms_norm_heads", x, *x.shape, first, last, _of_norm(weight), len(weight), eps)

    def zeros_like(self, x: Tensor) -> Tensor:
        y = torch.empty(x.shape)
        self._run("zero", y, y.numel())
        return y

    def scale(self, x: Tensor, by: float) -> None:
        self._run("scale", x, x.numel(), float(by))

    def add_residual(self, x: Tensor, residual: Tensor) -> None:
        self._run("add_residual", x.contiguous(), residual, residual.numel())

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        y = torch.empty(len(rows), x.shape[1])
        self._run("take_rows", x.contiguous(), x.shape[1], rows, len(rows), y)
        return y

    def fill_sampled(self, ids: Tensor, sampled: Tensor, source: Tensor) -> None:
        self._run("fill_sampled", ids, sampled, source, len(ids))

    def as_logits(self, y: Tensor, softcap: float | None = None) -> Tensor:
        if softcap is not None:
            self._run("softcap", y, y.numel(), float(softcap))
        return y

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate("silu_and_mul", x)

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        return self._gate("gelu_tanh_and_mul", x)

    def _gate(self, op: str, x: Tensor) -> Tensor:
        rows, size = x.shape[0], x.shape[1] // 2
        y = torch.empty(rows, size)
        self._run(op, x.contiguous(), rows, size, y)
        return y

    def new_kv_cache(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> PagedKV:
        return PagedKV.empty(num_blocks, block_size, num_kv_heads, head_dim, self.dtype, self._memory)

    def copy_kv_blocks(self, kv: PagedKV, sources: Tensor, destinations: Tensor, block_size: int) -> None:
        ids = sources.contiguous(), destinations.contiguous()
        self._run("copy_kv_blocks", kv.data, *ids, len(sources), kv.block_bytes)

    def rope_cos_sin(
        self, positions: Tensor, frequencies: Tensor, magnitude: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        rows, pairs = len(positions), len(frequencies)
        cos, sin = torch.empty(rows, 2 * pairs), torch.empty(rows, 2 * pairs)
        self._run("rope_cos_sin", positions, rows, frequencies, pairs, float(magnitude), cos, sin)
        return cos, sin

    def rope_and_store_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: PagedKV,
        slot_mapping: Tensor,
        num_heads: int,
        num_kv_heads: int,
    ) -> Tensor:
        sizes = (num_heads, num_kv_heads, kv.head_dim, kv.block_size)
        rows, turning = cos.shape
        self._run(
            f"rope_and_store_kv_{kv.format}", qkv, rows, cos, sin, turning, kv.data, slot_mapping, *sizes
        )
        return qkv.view(rows, num_heads + 2 * num_kv_heads, kv.head_dim)[:, :num_heads]

    def plan_attention(
        self,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        block_size: int,
        window: int | None = None,
    ) -> PagedAttentionPlan:
        return PagedAttentionPlan.of(cu_seqlens_q, seq_lens, block_tables, block_size, window)

    def paged_attention(
        self,
        q: Tensor,
        kv: PagedKV,
        plan: PagedAttentionPlan,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        rows, num_heads, head_dim = q.shape
        out = torch.empty(rows, num_heads * head_dim)
        sizes = (num_heads, kv.num_kv_heads, head_dim)
        numbers = (float(scale), float(softcap or 0.0))
        self._run(f"paged_attention_{kv.format}", q, q.stride(0), kv.data, plan.header, *sizes, *numbers, out)
        return out

    def new_adapter_memory(self, numel: int) -> Tensor:
        return self._memory.empty(numel, self.dtype)

    def plan_lora(self, arena: Tensor, table: Tensor, acts: Tensor, segments: Tensor) -> CpuLoRA:
        return CpuLoRA.of(arena, table, acts, segments)

    def add_lora(self, x: Tensor, slices: LoRASlices, plan: CpuLoRA, out: Tensor) -> None:
        assert out.dtype == torch.float32 and out.stride(1) == 1
        x = x.contiguous()
        rows, ids = (x, None) if x.ndim == 2 else (None, x)
        projections = (slices.first, len(slices.bounds) - 1, slices.bounds)
        target = (out, out.stride(0))
        self._run(
            f"add_lora_{plan.format}",
            rows,
            ids,
            slices.in_features,
            plan.header,
            slices.site,
            *projections,
            *target,
        )

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.empty(len(logits), dtype=torch.int64)
        finite = torch.empty(len(logits), dtype=torch.bool)
        self._run("greedy", logits.contiguous(), *logits.shape, ids, finite)
        return ids, finite

    def uniform(self, seeds: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
        numbers = torch.empty(len(seeds), dtype=torch.float64)
        self._run("uniform", seeds, positions, choices, philox.CHOOSE_TOKEN, len(seeds), numbers)
        return numbers

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        assert rows.temperature.dtype == rows.uniform.dtype == torch.float64
        ids = torch.empty(len(logits), dtype=torch.int64)
        self._run("sample", logits.contiguous(), *logits.shape, *rows, ids)
        return ids

    def logprobs(self, logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        of_chosen, top = torch.empty(len(logits)), torch.empty(len(logits), k)
        ids = torch.empty(len(logits), k, dtype=torch.int64)
        self._run("logprobs", logits.contiguous(), *logits.shape, chosen, k, of_chosen, ids, top)
        return of_chosen, ids, top


def _of_norm(weight: Tensor) -> Tensor:
    """A model of the application's own may have made it in the dtype of its linears."""
    if weight.dtype != torch.float32:
        raise TypeError(f"a norm's weight is {weight.dtype}; make it in Ops.activations, here torch.float32")
    return weight
