"""Which build of the native library is opened, and what happens without one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from motet.kernels.cpu import library
from motet.kernels.cpu.library import ISA_VARIABLE, ISAS, open_library, usable_isas
from motet.kernels.ops import select_ops

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


@needs_library
def test_a_build_that_cannot_be_used_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx9000")
    with pytest.raises(ValueError, match=r"MOTET_CPU_ISA is 'avx9000'.*portable"):
        open_library()


@needs_library
def test_a_processor_without_the_features_is_given_what_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ISAS", {"newer": 1 << 20, "portable": 0})
    assert usable_isas() == ["portable"]


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
