"""The native library: which of its builds this processor runs, opened by ctypes with every function declared.

One set of C++ sources is compiled once for each instruction set (see setup.py); each build has the same plain
C functions. A machine without a compiler has no build at all, and the engine then runs on the reference backend.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import finalize

from motet.errors import BackendUnavailable

ISA_VARIABLE = "MOTET_CPU_ISA"

NATIVE_BF16 = "avx512_bf16"
"""The build for processors that multiply pairs of bf16; its linears round activations to bf16 where weights are."""

BF16_UNITS = 8
"""The bit of `motet_cpu_features` for such a processor."""

ISAS: Mapping[str, int] = MappingProxyType(
    {NATIVE_BF16: BF16_UNITS | 4, "avx512_vnni": 4, "avx512": 2, "avx2": 1, "portable": 0}
)
"""The builds, best first, and the bits of `motet_cpu_features` that each needs."""

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}

_OPS: Mapping[str, str] = MappingProxyType(
    {
        "ceiling_read": "pip",
        "ceiling_f32": "iipp",
        "ceiling_bf16": "iipp",
        "ceiling_int8": "iipp",
        "expect": "pi",
        "linear_f32": "piiippp",
        "linear_bf16": "piiippp",
        "linear_bf16_pairs": "piiipppp",
        "pack_f32_f32": "piip",
        "pack_f32_bf16": "piip",
        "pack_bf16_f32": "piip",
        "pack_bf16_bf16": "piip",
        "unpack_f32": "piip",
        "unpack_bf16": "piip",
        "gather_f32": "pipip",
        "gather_bf16": "pipip",
        "rms_norm": "ppiifp",
        "add_rms_norm": "pppiifp",
        "rms_norm_heads": "piiiipif",
        "silu_and_mul": "piip",
        "gelu_tanh_and_mul": "piip",
        "zero": "pi",
        "scale": "pif",
        "add_residual": "ppi",
        "take_rows": "pipip",
        "fill_sampled": "pppi",
        "softcap": "pif",
        "greedy": "piipp",
        "uniform": "pppiip",
        "sample": "piipppppp",
        "logprobs": "piipippp",
        "linear_int8": "piiiippppp",
        "pack_int8_f32": "piipp",
        "pack_int8_bf16": "piipp",
        "unpack_int8_f32": "ppiip",
        "unpack_int8_bf16": "ppiip",
        "gather_int8": "pippip",
        "linear_int8_grouped": "piiiippppp",
        "unpack_int8_grouped_f32": "ppiiip",
        "unpack_int8_grouped_bf16": "ppiiip",
        "gather_int8_grouped": "pippiip",
        "add_lora_f32": "ppipiiippi",
        "add_lora_bf16": "ppipiiippi",
        "rope_cos_sin": "pipifpp",
        "rope_and_store_kv_f32": "pippippiiii",
        "rope_and_store_kv_bf16": "pippippiiii",
        "paged_attention_f32": "pippiiiffp",
        "paged_attention_bf16": "pippiiiffp",
        "copy_kv_blocks": "pppii",
        "linear_int4": "piiiipppp",
        "pack_int4_f32": "piiip",
        "pack_int4_bf16": "piiip",
        "unpack_int4_f32": "piiip",
        "unpack_int4_bf16": "piiip",
        "gather_int4": "pipiip",
        "pack_q4_0": "piiip",
        "pack_q4_1": "piiip",
        "pack_q8_0": "piiipp",
        "expand_q4_0_f32": "pip",
        "expand_q4_0_bf16": "pip",
        "expand_q4_1_f32": "pip",
        "expand_q4_1_bf16": "pip",
        "expand_q8_0_f32": "pip",
        "expand_q8_0_bf16": "pip",
    }
)
"""What each op takes behind the threads, as the C++ sources have it: p an address, i an int64, f a float."""


class NoNativeLibrary(Exception):
    """Why there is no build that can be used: what the warning says."""


def usable_isas() -> list[str]:
    """The builds that are there and that this processor runs, best first."""
    if not _file("portable").exists():
        return []
    features = cpu_features()
    return [isa for isa, needed in ISAS.items() if features & needed == needed and _file(isa).exists()]


def cpu_features() -> int:
    """What this processor and its operating system can run: see `features.cpp`. Needs the portable build."""
    return int(_function(_open("portable"), "cpu_features")())


def auto_dtype(isa: str) -> tuple[str, str]:
    """What `EngineConfig.dtype` "auto" is on this build, and why."""
    if isa == NATIVE_BF16:
        return "bfloat16", "the processor has units for it"
    if cpu_features() & BF16_UNITS:
        return "float32", f"the build {isa} leaves the processor's bfloat16 units unused"
    return "float32", "the processor has no bfloat16 units"


def cpu_backend() -> str:
    """Which backend an engine has on this machine's CPU, and why: a line for people.

    Raises what `open_library` raises of BackendUnavailable.
    """
    try:
        isa, _ = open_library()
    except NoNativeLibrary as why:
        return f"reference (torch): {why}"
    named = f", as {ISA_VARIABLE} says" if build_is_named() else ""
    return f"cpu ({isa}){named}; usable here: {', '.join(usable_isas())}"


def build_is_named() -> bool:
    """Whether MOTET_CPU_ISA, not the processor, decides which build `choose` takes."""
    return bool(os.environ.get(ISA_VARIABLE))


def choose(isa: str | None = None) -> str:
    """The build `isa`, or else what MOTET_CPU_ISA names, or else the best usable one.

    Raises NoNativeLibrary if there is none, BackendUnavailable if the one that is named cannot be used.
    """
    usable = usable_isas()
    isa = isa or os.environ.get(ISA_VARIABLE) or (usable[0] if usable else None)
    if isa is None:
        raise NoNativeLibrary("motet was installed without a C++ compiler, so it has no native library")
    if isa in usable:
        return isa
    if isa not in ISAS:
        why = f"no build of the native library (those are {', '.join(ISAS)})"
    elif _file(isa).exists() and usable:
        why = "a build for instructions that this processor does not have"
    else:
        why = "a build that is not there: motet was installed without a C++ compiler, or the compiler failed on it"
    usable_text = f"name one that runs here ({', '.join(usable)})" if usable else "none runs here"
    raise BackendUnavailable(f"{ISA_VARIABLE} is {isa!r}, {why}: {usable_text}, or leave the variable unset")


def open_library(isa: str | None = None) -> tuple[str, ctypes.CDLL]:
    """The build that `choose` takes; its name and its functions.

    Raises what that raises, and BackendUnavailable for a build that cannot be opened or lacks one of the functions.
    """
    isa = choose(isa)
    library = _open(isa)
    handle = ctypes.c_void_p
    _declare(library, "panel_columns", (), ctypes.c_int64)
    _declare(library, "threads_new", (ctypes.c_int,), handle)
    _declare(library, "threads_delete", (handle,))
    for name, parameters in _OPS.items():
        _declare(library, name, (handle, *(_KINDS[p] for p in parameters)))
    number = ctypes.c_int64
    _declare(library, "replay", (handle, handle, number))
    _declare(library, "queue_new", (handle,), handle)
    _declare(library, "queue_delete", (handle,))
    _declare(library, "queue_push", (handle, handle, number), number)
    _declare(library, "queue_wait", (handle, number))
    return isa, library


def _declare(
    library: ctypes.CDLL, name: str, parameters: tuple[type, ...], result: type | None = None
) -> None:
    function = _function(library, name)
    function.argtypes, function.restype = parameters, result


def _function(library: ctypes.CDLL, name: str) -> Any:
    try:
        return getattr(library, f"motet_{name}")
    except AttributeError:
        raise BackendUnavailable(
            f"{library._name} was built from other sources than this version of motet: it has no motet_{name}. "
            "Build it anew by installing motet again: `pip install -e .` where its sources are"
        ) from None


class Threads:
    """The threads that share the work of each op, one of them the caller. They end with this object."""

    def __init__(self, library: ctypes.CDLL, count: int) -> None:
        """count: the caller included."""
        self.handle: int = library.motet_threads_new(count)
        self.queue: int = library.motet_queue_new(self.handle)
        """A caller beside Python: see replay.cpp."""
        finalize(self, _end_threads, library, self.handle, self.queue, os.getpid())


def _end_threads(library: ctypes.CDLL, threads: int, queue: int, process: int) -> None:
    if process != os.getpid():  # a forked child has none of them, and would wait for their ends for ever
        return
    library.motet_queue_delete(queue)
    library.motet_threads_delete(threads)


def _open(isa: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_file(isa)))
    except OSError as error:
        raise BackendUnavailable(
            f"the build {isa!r} of the native library cannot be opened: {error}: install motet again"
        ) from error


def _file(isa: str) -> Path:
    return Path(__file__).with_name(f"_{isa}.abi3.so")
