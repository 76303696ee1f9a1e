from __future__ import annotations

from types import SimpleNamespace

import torch
from tiny_models import float32_ops

from motet.lora.sites import LoRASite
from motet.runtime.models.layers import make_linear

NO_ADAPTERS = SimpleNamespace(lora=None)


def test_projections_with_one_input_share_one_product_and_stand_side_by_side() -> None:
    linear = make_linear(
        float32_ops(), kind="column", in_features=4, splits=[("a.q", 3), ("a.k", 2), ("a.v", 1)], bias=True
    )
    parts = {name: torch.randn(weight.shape) for name, weight in linear.weights().items()}
    assert set(parts) == {f"a.{x}.{kind}" for x in "qkv" for kind in ("weight", "bias")}
    for name, weight in linear.weights().items():
        weight.load(parts[name])
    linear.pack()
    x = torch.randn(5, 4)
    expected = [torch.nn.functional.linear(x, parts[f"a.{p}.weight"], parts[f"a.{p}.bias"]) for p in "qkv"]
    torch.testing.assert_close(linear(NO_ADAPTERS, x), torch.cat(expected, dim=1))  # type: ignore[arg-type]


def test_a_linear_with_an_index_is_a_lora_site_and_one_without_is_none() -> None:
    splits = [("mlp.gate_proj", 6), ("mlp.up_proj", 6)]
    linear = make_linear(float32_ops(), kind="column", in_features=4, splits=splits, site_index=7)
    assert linear.site == LoRASite(7, 4, ("mlp.gate_proj", "mlp.up_proj"), (6, 6))
    assert linear.bias is None
    assert make_linear(float32_ops(), kind="column", in_features=4, splits=[("lm_head", 9)]).site is None


def test_loading_casts_to_the_dtype_of_the_ops() -> None:
    linear = make_linear(float32_ops(), kind="row", in_features=2, splits=[("o", 2)])
    linear.weights()["o.weight"].load(torch.tensor([[1, 2], [3, 4]], dtype=torch.bfloat16))
    linear.pack()
    assert torch.equal(linear.weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
