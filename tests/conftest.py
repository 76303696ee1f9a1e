"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from motet.kernels.cpu.library import ISA_VARIABLE, NATIVE_BF16, usable_isas
from tests.tiny import save_adapter, save_tiny_model

# Most tests compare with transformers in float32: what `dtype` "auto" is on every build but one. Tests of the builds
# name theirs.
best, *others = usable_isas() or [None]
if best == NATIVE_BF16:
    os.environ.setdefault(ISA_VARIABLE, others[0])


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every async test runs on both."""
    return request.param


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> LlamaForCausalLM:
    """transformers' instance of `tiny_folder`."""
    return LlamaForCausalLM.from_pretrained(tiny_folder).eval()


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, Path]:
    """Six strong adapters of the tiny model, of ranks 1 to 256 and different targets."""
    folder = tmp_path_factory.mktemp("adapters")
    base = LlamaForCausalLM.from_pretrained(tiny_folder)
    kinds: dict[str, dict] = {
        "r1": {"rank": 1, "targets": ("q_proj",)},
        "r5": {"rank": 5},
        "r8": {"rank": 8, "targets": ("q_proj", "v_proj"), "use_rslora": True},
        "r16": {"rank": 16, "targets": ("gate_proj", "up_proj", "down_proj")},
        "r64": {"rank": 64},
        "r256": {"rank": 256, "targets": ("o_proj", "down_proj", "k_proj")},
    }
    return {
        name: save_adapter(base, folder / name, seed=seed, strength=2.0, **kind)
        for seed, (name, kind) in enumerate(kinds.items())
    }
