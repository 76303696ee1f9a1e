"""read_adapter, AdapterArena and LoRABatch together compute what PEFT's own LoRA layers compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_factories import num_bytes
from peft import PeftModel
from torch import Tensor

from motet.kernels.ops import select_ops
from motet.lora.adapter import read_adapter
from motet.lora.arena import AdapterArena
from motet.lora.batch import LoRABatch
from motet.lora.sites import LoRASite

MiB = 1 << 20
OPS = select_ops("cpu", "float32")

STRONG = [
    {"r": 1, "lora_alpha": 3},
    {"r": 5, "lora_alpha": 7, "target_modules": ["q_proj"]},
    {"r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "down_proj"], "use_rslora": True},
    {"r": 16, "lora_alpha": 16, "target_modules": ["k_proj", "o_proj", "up_proj"]},
    {"r": 64, "lora_alpha": 8, "use_rslora": True},
    {"r": 256, "lora_alpha": 512, "target_modules": "all-linear"},
    {"r": 4, "lora_alpha": 0.5, "target_modules": r".*\.1\.mlp\.(gate|up)_proj"},
    {"r": 3, "target_modules": ["q_proj", "layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"]},
]


def peft_delta(model: PeftModel, site: LoRASite, x: Tensor) -> Tensor:
    """What PEFT's layers add to the site's projections, side by side."""
    deltas = []
    for module in site.modules:
        layer = model.base_model.model.get_submodule(module)
        base = getattr(layer, "base_layer", layer)
        deltas.append(layer(x) - base(x))
    return torch.cat(deltas, dim=-1)


def assert_close(actual: Tensor, expected: Tensor, of: Tensor) -> None:
    """1e-4 of the largest value involved; `expected` is a difference of two outputs that are as large as `of`."""
    scale = max(expected.abs().max().item(), of.abs().max().item())
    assert (actual - expected).abs().max().item() <= 1e-4 * scale


@pytest.mark.parametrize("config", STRONG, ids=lambda config: f"r{config['r']}")
def test_each_module_gets_pefts_own_delta(
    config: dict[str, Any],
    make_peft: Callable[..., PeftModel],
    sites: tuple[LoRASite, ...],
    tmp_path: Path,
) -> None:
    model = make_peft(**config)
    model.save_pretrained(tmp_path)
    arena = AdapterArena(sites, OPS.new_adapter_memory(4 * MiB))
    batch = LoRABatch(OPS, arena, [arena.place(arena.pack(read_adapter(tmp_path, sites)))] * 9)
    adapted = 0
    for site in sites:
        x = torch.randn(9, site.in_features)
        out = torch.zeros(9, sum(site.out_features))
        batch.add_delta(site, x, out)
        with torch.no_grad():
            expected = peft_delta(model, site, x)
        assert_close(out, expected, x)
        adapted += bool(expected.any())
    assert adapted


def test_case_13_rows_of_a_mixed_batch_get_their_own_adapters_delta_and_base_rows_none(
    make_peft: Callable[..., PeftModel], sites: tuple[LoRASite, ...], tmp_path: Path
) -> None:
    arena = AdapterArena(sites, OPS.new_adapter_memory(16 * MiB))
    arena.data.fill_(float("nan"))  # nothing but an adapter's own memory may be read
    models: dict[int, PeftModel] = {}
    for i, config in enumerate(STRONG):
        model = make_peft(seed=i, **config)
        model.save_pretrained(tmp_path / str(i))
        models[arena.place(arena.pack(read_adapter(tmp_path / str(i), sites)))] = model
    slots = list(models)
    row_slot = [-1, *slots, -1, -1, *reversed(slots), *(3 * [slots[5]]), *(2 * [slots[1]]), -1]
    batch = LoRABatch(OPS, arena, row_slot)
    rows = torch.tensor(row_slot)
    for site in sites:
        x = torch.randn(len(row_slot), site.in_features)
        base = torch.randn(len(row_slot), sum(site.out_features))
        out = base.clone()
        batch.add_delta(site, x, out)
        assert torch.equal(out[rows < 0], base[rows < 0])
        for slot, model in models.items():
            own = rows == slot
            with torch.no_grad():
                assert_close(out[own] - base[own], peft_delta(model, site, x[own]), x)


def test_weights_are_cast_to_the_arenas_dtype(
    make_adapter: Callable[..., Path], sites: tuple[LoRASite, ...]
) -> None:
    weights = read_adapter(make_adapter(r=5), sites)
    ops = select_ops("cpu", "bfloat16")
    arena = AdapterArena(sites, ops.new_adapter_memory(MiB // 2))
    slot = arena.place(arena.pack(weights))
    assert arena.used_bytes == arena.nbytes(slot) == num_bytes(weights) // 2
    x = torch.randn(3, sites[1].in_features).to(ops.activations)
    out = torch.zeros(3, sum(sites[1].out_features), dtype=ops.activations)
    LoRABatch(ops, arena, [slot, -1, slot]).add_delta(sites[1], x, out)
    a, b, *_ = weights.modules[sites[1].modules[0]]
    expected = x.float() @ a.t() @ b.t()
    assert (out[[0, 2]] - expected[[0, 2]]).abs().max() <= 0.02 * expected.abs().max()
    assert not out[1].any()
