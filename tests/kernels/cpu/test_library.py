"""Which build of the native library is opened, and what happens without one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from motet.errors import BackendUnavailable
from motet.kernels.cpu import library
from motet.kernels.cpu.library import (
    BF16_UNITS,
    ISA_VARIABLE,
    ISAS,
    NATIVE_BF16,
    cpu_features,
    open_library,
    usable_isas,
)
from motet.kernels.cpu.ops import CpuOps
from motet.kernels.ops import SamplingRows, select_ops
from tests.lora_cases import lora_case

needs_library = pytest.mark.skipif(not usable_isas(), reason="no C++ compiler at installation")


@needs_library
def test_the_portable_build_can_always_be_used_and_is_the_last_choice() -> None:
    usable = usable_isas()
    assert usable[-1] == "portable"
    assert usable == [isa for isa in ISAS if isa in usable], "not in the order of preference"


@needs_library
def test_the_best_usable_build_is_taken_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert open_library()[0] == usable_isas()[0]
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    assert open_library()[0] == "portable"
    assert select_ops("cpu", "float32").name == "cpu (portable)"


@pytest.mark.skipif(not {"avx512", "avx512_vnni"} <= {*usable_isas()}, reason="not both builds are usable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_two_builds_for_avx512_give_the_same_bits_where_no_bytes_are_multiplied(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    x, weight, table = torch.randn(130, 77), torch.randn(99, 77).to(dtype), torch.randn(50, 70).to(dtype)
    norm, frequencies, segments = torch.rand(33), torch.rand(4), [(0, 0, 40), (1, 50, 130)]
    lora = lora_case([[16, 5], [1, 256]], 77, [60, 39], dtype, extras=True)
    plan_of = (torch.tensor([0, 100, 130]), torch.tensor([100, 30]), torch.arange(32).view(2, 16))
    rows = SamplingRows(
        torch.rand(130).double(),
        torch.arange(130) % 40,
        torch.rand(130),
        torch.rand(130) / 50,
        torch.rand(130).double(),
    )

    def compute(isa: str) -> list[Tensor]:
        ops = CpuOps(*open_library(isa), dtype, 2)
        y = ops.linear(x, ops.pack_linear(weight))
        ops.add_lora(x, lora.slices, lora.plan(ops, segments), y)
        ops.rms_norm_heads(y, 33, 99, norm, 1e-6)
        cos, sin = ops.rope_cos_sin(torch.arange(130), frequencies, 1.1)
        kv = ops.new_kv_cache(32, 16, 2, 9)
        slots = torch.cat((torch.arange(100), torch.arange(256, 286)))
        q = ops.rope_and_store_kv(y[:, :90].contiguous(), cos, sin, kv, slots, 6, 2)
        attended = ops.paged_attention(q, kv, ops.plan_attention(*plan_of, 16, 50), 0.3, 20.0)
        logits = ops.as_logits(
            ops.linear(attended, ops.pack_linear(torch.ones(300, 54).to(dtype).tril())), 9.0
        )
        return [
            y,
            attended,
            logits,
            *ops.greedy(logits),
            ops.sample(logits, rows),
            *ops.logprobs(logits, torch.arange(130), 7),
            ops.silu_and_mul(ops.embedding(torch.arange(50), ops.pack_table(table))),
            ops.gelu_tanh_and_mul(attended),
        ]

    for one, other in zip(compute("avx512"), compute("avx512_vnni"), strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@needs_library
def test_a_name_that_no_build_has_is_refused_with_those_that_run_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx9000")
    with pytest.raises(BackendUnavailable, match=r"'avx9000', no build.* avx2.*: name one.*\(.*portable\)"):
        open_library()


@needs_library
def test_a_build_that_was_not_made_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = library._file
    monkeypatch.setattr(library, "_file", lambda isa: tmp_path / isa if isa == "avx512" else file(isa))
    monkeypatch.setenv(ISA_VARIABLE, "avx512")
    with pytest.raises(BackendUnavailable, match=r"'avx512'.*not there.*: name one that runs here"):
        open_library()


@needs_library
@pytest.mark.parametrize(
    "use", [library.cpu_backend, lambda: select_ops("cpu", "float32")], ids=["info", "engine"]
)
def test_a_build_of_older_sources_is_refused_with_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[], object]
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    monkeypatch.setattr(library, "_OPS", {**library._OPS, "op_of_tomorrow": "p"})
    lacks = (
        r"_portable.*\.so was built from other sources.*has no motet_op_of_tomorrow\. .*`pip install -e \.`"
    )
    with pytest.raises(BackendUnavailable, match=lacks):
        use()


@needs_library
@pytest.mark.parametrize("content", [b"", b"\n" * 5000], ids=["empty", "overwritten"])
def test_a_file_that_is_no_library_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    build = tmp_path / "portable.so"
    build.write_bytes(content)
    monkeypatch.setattr(library, "_file", lambda isa: build if isa == "portable" else tmp_path / "none")
    with pytest.raises(BackendUnavailable, match="'portable' of the native library cannot be opened"):
        open_library()


def test_no_build_can_be_named_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_file", lambda isa: tmp_path / isa)
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    with pytest.raises(BackendUnavailable, match=r"'portable'.*not there.*: none runs here.*unset"):
        select_ops("cpu", "float32")


@needs_library
def test_a_processor_without_the_features_is_given_what_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    portable = library._file("portable")
    monkeypatch.setattr(library, "_file", lambda isa: portable)  # every build is there
    monkeypatch.setattr(library, "ISAS", {"avx2": 1 << 20, "portable": 0})
    assert usable_isas() == ["portable"]
    monkeypatch.setenv(ISA_VARIABLE, "avx2")
    with pytest.raises(BackendUnavailable, match=r"'avx2'.*processor does not have"):
        open_library()


@pytest.mark.parametrize(
    ("features", "built", "isa", "dtype", "why"),
    [
        (15, True, "avx512_bf16", torch.bfloat16, "has units for it"),
        (7, True, "avx512_vnni", torch.float32, "has no bfloat16 units"),
        (15, False, "avx512_vnni", torch.float32, "leaves the processor's bfloat16 units unused"),
        (8, True, "portable", torch.float32, "leaves"),
    ],
)
@needs_library
def test_auto_is_bfloat16_where_the_processor_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, features: int, built: bool, isa: str, dtype: torch.dtype, why: str
) -> None:
    missing = Path("not built")
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    monkeypatch.setattr(library, "cpu_features", lambda: features)
    # Nothing is computed, so that any build can stand for any other.
    portable = library._file("portable")
    monkeypatch.setattr(library, "_file", lambda name: portable if built or name != NATIVE_BF16 else missing)
    ops = select_ops("cpu", "auto")
    assert (ops.name, ops.dtype) == (f"cpu ({isa})", dtype)
    assert why in ops.why
    assert select_ops("cpu", "float32").dtype == torch.float32
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    assert select_ops("cpu", "auto").dtype == torch.float32


@needs_library
def test_the_processor_is_asked_for_bf16_as_the_system_reports_it() -> None:
    flags = Path("/proc/cpuinfo")
    if not flags.exists():
        pytest.skip("no /proc/cpuinfo")
    assert bool(cpu_features() & BF16_UNITS) == ("avx512_bf16" in flags.read_text().split())


def test_without_a_library_the_reference_computes_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    monkeypatch.setattr(library, "_file", lambda isa: tmp_path / isa)
    with caplog.at_level(logging.WARNING, "motet"):
        ops = select_ops("cpu", "bfloat16")
    assert (ops.name, ops.dtype) == ("reference", torch.bfloat16)
    (record,) = caplog.records
    assert "without a C++ compiler" in record.getMessage()
