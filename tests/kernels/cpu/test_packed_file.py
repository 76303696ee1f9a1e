"""Quantised weights kept on the disk: what a start reads there is what it would have packed, and else it packs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from motet.config import EngineConfig
from motet.kernels.cpu.library import usable_isas
from motet.kernels.cpu.ops import CpuOps
from motet.kernels.ops import Ops, select_ops
from motet.lora.sites import projections
from motet.runtime.build import build_runtime
from motet.runtime.models.loader import load_model
from tests.runtime.models.tiny_models import make_hf_model, save_folder

pytestmark = pytest.mark.skipif(not usable_isas(), reason="no C++ compiler at installation")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(make_hf_model(), tmp_path / "model")


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that were packed."""
    seen: list[Tensor] = []
    pack = CpuOps._pack
    monkeypatch.setattr(
        CpuOps, "_pack", lambda ops, weight, how: seen.append(weight) or pack(ops, weight, how)
    )
    return seen


def weights_of(folder: Path, kept: Path | None, ops: Ops | None = None) -> list[Tensor]:
    """All matrices, as the loaded model has them."""
    model = load_model(folder, ops or quantising(), packed_weights=kept).model
    return [p.site.weight() for p in projections(model.lora_sites).values() if p.site.weight is not None]


def quantising(how: str = "int4", dtype: str = "float32") -> Ops:
    return select_ops("cpu", dtype, 2, how)  # type: ignore[arg-type]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("how", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_start_reads_what_the_first_one_packed(
    how: str, dtype: str, folder: Path, tmp_path: Path, packed: list[Tensor]
) -> None:
    plain = weights_of(folder, None, quantising(how, dtype))
    kept = tmp_path / "of" / "all"
    assert same(weights_of(folder, kept, quantising(how, dtype)), plain)
    assert packed
    packed.clear()
    assert same(weights_of(folder, kept, quantising(how, dtype)), plain)
    assert not packed
    assert len(list(kept.iterdir())) == 1


def cut(content: bytes) -> bytes:
    return content[:-1]


def flip(place: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        at = place % len(content)
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (cut, "cut short"),
        (flip(-1), "damaged"),
        (flip(-5000), "damaged"),
        (flip(3), "does not begin"),
        (flip(40), "does not begin"),
        (lambda content: b"", "does not begin"),
        (lambda content: b"\xff" * 9000, "does not begin"),
    ],
)
def test_a_file_that_is_not_whole_is_written_anew_with_a_warning(
    change: Callable[[bytes], bytes],
    why: str,
    folder: Path,
    tmp_path: Path,
    packed: list[Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = weights_of(folder, tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    packed.clear()
    with caplog.at_level(logging.WARNING, "motet"):
        assert same(weights_of(folder, tmp_path / "kept"), plain)
    assert packed and len(caplog.records) == 1
    assert f"{file} is not used, but written anew" in caplog.text and why in caplog.text
    assert file.read_bytes() == whole


def test_the_file_of_another_model_or_build_is_not_used(
    folder: Path, tmp_path: Path, packed: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    other = save_folder(make_hf_model(seed=1), tmp_path / "other")
    weights_of(other, tmp_path / "kept")
    (foreign,) = (tmp_path / "kept").iterdir()
    plain = weights_of(folder, tmp_path / "kept")
    (own,) = {*(tmp_path / "kept").iterdir()} - {foreign}
    own.write_bytes(foreign.read_bytes())
    packed.clear()
    assert same(weights_of(folder, tmp_path / "kept"), plain)
    assert packed and "of another model, setting or build" in caplog.text


def test_settings_have_files_of_their_own(folder: Path, tmp_path: Path) -> None:
    for how, dtype in [("int4", "float32"), ("int8", "float32"), ("int8", "bfloat16"), ("int8", "float32")]:
        weights_of(folder, tmp_path / "kept", quantising(how, dtype))
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_weights_in_floats_are_not_kept(folder: Path, tmp_path: Path) -> None:
    weights_of(folder, tmp_path / "kept", select_ops("cpu", "float32", 2))
    assert not (tmp_path / "kept").exists()


def test_a_folder_that_cannot_be_written_to_is_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert same(weights_of(folder, tmp_path / "file" / "kept"), weights_of(folder, None))
    assert "cannot be kept in" in caplog.text


def test_a_write_that_fails_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("motet.kernels.cpu.packed_file.os.replace", full)
    weights_of(folder, tmp_path / "kept")
    assert "no space left" in caplog.text
    assert not list((tmp_path / "kept").iterdir())


def test_the_engine_is_given_the_folder_by_its_config(
    folder: Path, tmp_path: Path, packed: list[Tensor]
) -> None:
    config = EngineConfig(quantization="int8", packed_weights=tmp_path / "kept", kv_cache_bytes=1 << 20)
    for _ in range(2):
        packed.clear()
        build_runtime(folder, config, lambda request: None)
    assert not packed and len(list((tmp_path / "kept").iterdir())) == 1
