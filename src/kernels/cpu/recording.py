"""Record and replay: the ops of one step as a program that the library runs with a single call.

A step of few rows is hundreds of ops of a few microseconds each; between them lie torch's allocations, ctypes and
Python, which cost as much again. All of that depends on the shapes alone, so a step is recorded as a list of calls
and made again on the next step's arrays (what a CUDA graph is to a GPU).
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from motet.kernels.cpu.memory import ALIGNMENT

Argument = Tensor | int | float | None
Words = NDArray[np.int64]


class NotRecordable(Exception):
    """The step computed something outside of the library; the message says what."""


@dataclass
class Recording:
    """What one step calls and makes. It keeps every tensor that it meets, so that no address means two."""

    calls: list[tuple[str, tuple[Argument, ...]]] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    """The tensors between ops: whatever was allocated meanwhile."""
    _reader: int = 0
    """Which call was the last that reads weights."""

    def reads_weights(self, weights: Tensor) -> None:
        """The call that is noted next does, these: threads that are done with the last such call may fetch them."""
        self.calls.insert(self._reader, ("expect", (weights, weights.nbytes)))
        self._reader = len(self.calls)


class _Notes:
    """What `Watch` does, which torch must not find in its class: it would import its whole compiler, a second's
    work in the midst of serving, only to say that none of this is to be compiled."""

    _recording: Recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS:
            self._recording.made.append(result)
        elif not func.is_view:
            raise NotRecordable(f"{func} is computed by torch")
        return result


class Watch(_Notes, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch allocates for a recording; refuses what it computes, which a replay would leave out."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording


class Readers(TorchFunctionMode):
    """Refuses what a step reads of a tensor past torch's dispatch: a replay would go on with what stood there once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.tolist):
            raise NotRecordable(f"Tensor.{func.__name__} is read by Python")
        return func(*args, **(kwargs or {}))


_ALLOCATIONS = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided)


class Program:
    """A recorded step. Its tensors between ops lie in an arena that other programs use as well, one at a time."""

    def __init__(
        self, library: ctypes.CDLL, recording: Recording, inputs: Sequence[Tensor], output: Tensor
    ) -> None:
        """inputs: what differs from step to step. output: of what was made, the step's result."""
        self.num_calls = len(recording.calls)
        self._output = output.dtype, output.shape
        self._kept: list[Tensor] = []
        """What was there before the step, or was made of Python's numbers in it: nobody else may hold on to it."""
        owners = _Owners(recording.made, inputs)
        words: list[int] = []
        places: dict[str, list[tuple[int, int, int]]] = {"made": [], "input": []}  # word, which, offset
        lifetimes: dict[int, tuple[int, int]] = {}
        for i, (op, arguments) in enumerate(recording.calls):
            words += [_entry(library, op), len(arguments)]
            for argument in arguments:
                if isinstance(argument, Tensor):
                    kind, which, offset = owners.find(argument)
                    if kind is not None:
                        places[kind].append((len(words), which, offset))
                    else:
                        self._kept.append(argument)
                    if kind == "made":
                        lifetimes[which] = (lifetimes.get(which, (i, i))[0], i)
                words.append(_word(argument))
        kind, last, offset = owners.find(output)
        if output.numel():
            if kind != "made":
                raise NotRecordable("what it returns was there before it")
            lifetimes[last] = (lifetimes[last][0], self.num_calls)
        starts, self.arena_bytes = _lay_out(lifetimes, [owners.nbytes(tensor) for tensor in recording.made])
        self._words = np.array(words, dtype=np.int64)
        self._made = np.array([(word, starts[i] + at) for word, i, at in places["made"]]).reshape(-1, 2).T
        self._inputs = np.array(places["input"], dtype=np.int64).reshape(-1, 3).T
        self._output_start = starts.get(last, 0) + offset
        self._arena_address = 0

    def on(self, inputs: Sequence[Tensor], arena: Tensor) -> tuple[Words, Tensor]:
        """The step's calls on other inputs of the same shapes; its result, which lies in the arena when they are made.

        arena [at least arena_bytes] uint8.
        """
        if arena.data_ptr() != self._arena_address:
            self._arena_address = arena.data_ptr()
            word, start = self._made
            self._words[word] = self._arena_address + start
        addresses = np.array([tensor.data_ptr() for tensor in inputs], dtype=np.int64)
        word, which, offset = self._inputs
        words = self._words.copy()  # the step before may still be at its own
        words[word] = addresses[which] + offset
        dtype, shape = self._output
        end = self._output_start + shape.numel() * dtype.itemsize
        return words, arena[self._output_start : end].view(dtype).view(shape)


class Deferred:
    """Calls that are to be made later, and what they must find: a program of the library's queue."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._words: list[Words] = []
        self._kept: list[object] = []
        self.num_calls = 0

    def call(self, op: str, arguments: Sequence[Argument]) -> None:
        words = [_entry(self._library, op), len(arguments), *map(_word, arguments)]
        self.add(np.array(words, dtype=np.int64), 1, arguments)

    def add(self, words: Words, num_calls: int, kept: object) -> None:
        """kept: what they read and write."""
        self._words.append(words)
        self._kept.append(kept)
        self.num_calls += num_calls

    def program(self) -> Words:
        return np.concatenate(self._words)


class _Owners:
    """Whose memory an address lies in."""

    def __init__(self, made: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        spans = [(*self._span(tensor), "made", i) for i, tensor in enumerate(made)]
        spans += [(*self._span(tensor), "input", i) for i, tensor in enumerate(inputs)]
        self._spans = sorted(spans)

    def find(self, tensor: Tensor) -> tuple[str | None, int, int]:
        """(made or input, which of them, bytes behind its first); None: it was there before and will be."""
        address = tensor.data_ptr()
        i = bisect_right(self._spans, address, key=lambda span: span[0]) - 1
        if i >= 0 and tensor.numel():
            start, end, kind, which = self._spans[i]
            if address < end:
                return kind, which, address - start
        return None, 0, 0

    def nbytes(self, tensor: Tensor) -> int:
        start, end = self._span(tensor)
        return end - start

    @staticmethod
    def _span(tensor: Tensor) -> tuple[int, int]:
        start = tensor.data_ptr()
        return start, start + tensor.numel() * tensor.itemsize


def _lay_out(lifetimes: dict[int, tuple[int, int]], sizes: Sequence[int]) -> tuple[dict[int, int], int]:
    """Where each tensor begins in an arena, such that no two that live at once overlap; and the arena's size."""
    starts: dict[int, int] = {}
    living: list[tuple[int, int, int]] = []  # (start, end, last call), by start
    size = 0
    for which, (first, last) in sorted(lifetimes.items(), key=lambda item: item[1]):
        living = [span for span in living if span[2] >= first]
        needed = -(-sizes[which] // ALIGNMENT) * ALIGNMENT
        start = 0
        for other_start, other_end, _ in living:
            if other_start - start >= needed:
                break
            start = other_end
        starts[which] = start
        living = sorted([*living, (start, start + needed, last)])
        size = max(size, start + needed)
    return starts, size


def _entry(library: ctypes.CDLL, op: str) -> int:
    """The address of an op's entry for recorded calls."""
    return ctypes.cast(getattr(library, f"motet_{op}_recorded"), ctypes.c_void_p).value or 0


def _word(argument: Argument) -> int:
    """An argument as an int64, as `argument` in abi.h reads it."""
    if argument is None:
        return 0
    if isinstance(argument, float):
        return int.from_bytes(struct.pack("<fxxxx", argument), "little")
    return argument.data_ptr() if isinstance(argument, Tensor) else argument
