"""What read_adapter takes, and what it refuses with which words."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_factories import num_bytes
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from motet.errors import AdapterLoadError, UnsupportedAdapter
from motet.lora.adapter import LoRAWeights, ModuleLoRA, read_adapter
from motet.lora.sites import LoRASite

Sites = tuple[LoRASite, ...]
MakeAdapter = Callable[..., Path]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(edit(tensors), path)
    return folder


def rename(folder: Path, new_name: Callable[[str], str]) -> Path:
    return edit_tensors(folder, lambda tensors: {new_name(name): x for name, x in tensors.items()})


def same(a: LoRAWeights, b: LoRAWeights) -> bool:
    return a.modules.keys() == b.modules.keys() and all(
        torch.equal(x, y)
        for m in a.modules
        for x, y in zip(a.modules[m].tensors(), b.modules[m].tensors(), strict=True)
    )


# --- what is taken


def test_every_tensor_is_read_with_the_scaling_in_b(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = make_adapter(r=8, lora_alpha=20)
    weights = read_adapter(folder, sites)
    saved = load_file(folder / "adapter_model.safetensors")
    assert 2 * len(weights.modules) == len(saved)
    assert (weights.rank, num_bytes(weights)) == (8, 4 * sum(x.numel() for x in saved.values()))
    for module, (a, b, scale, shift) in weights.modules.items():
        assert scale is shift is None
        assert torch.equal(a, saved[f"base_model.model.{module}.lora_A.weight"])
        torch.testing.assert_close(b, saved[f"base_model.model.{module}.lora_B.weight"] * 20 / 8)


def test_rslora_scales_by_the_root_of_the_rank(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = make_adapter(r=16, lora_alpha=24)
    plain = read_adapter(folder, sites).modules
    rslora = read_adapter(edit_config(folder, use_rslora=True), sites).modules
    for module in plain:
        torch.testing.assert_close(rslora[module][1], plain[module][1] * math.sqrt(16))


@pytest.mark.parametrize(
    "new_name",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.removeprefix("base_model.model.model."),
        lambda key: "base_model.model." + key,
        lambda key: key.replace("base_model.model.model.", "base_model.model."),
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.replace(".weight", ".my-adapter.weight"),
        lambda key: key.replace(".lora_", ".base_layer.lora_"),
    ],
    ids=[
        "none",
        "bare layers",
        "doubled",
        "headless model",
        "adapter name",
        "odd adapter name",
        "base_layer",
    ],
)
def test_harmless_variants_of_the_keys_bind_to_the_same_modules(
    new_name: Callable[[str], str], make_adapter: MakeAdapter, sites: Sites
) -> None:
    folder = make_adapter()
    before = read_adapter(folder, sites)
    after = read_adapter(rename(folder, new_name), sites)
    assert same(before, after)
    assert before.digest == after.digest


def test_settings_without_effect_on_the_result_are_taken(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = make_adapter()
    before = read_adapter(folder, sites)
    edit_config(
        folder,
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
        base_model_name_or_path="somewhere/else",
        init_lora_weights="gaussian",
        exclude_modules=["lm_head"],
        feature_to_come=None,
        another_to_come=False,
    )
    assert read_adapter(folder, sites).digest == before.digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_float_dtypes_become_float32(
    dtype: torch.dtype, make_adapter: MakeAdapter, sites: Sites
) -> None:
    folder = edit_tensors(make_adapter(), lambda ts: {k: t.to(dtype) for k, t in ts.items()})
    cast = load_file(folder / "adapter_model.safetensors")
    a, b, *_ = read_adapter(folder, sites).modules["model.layers.0.self_attn.q_proj"]
    assert a.dtype == b.dtype == torch.float32
    assert torch.equal(a, cast[f"{Q0}.lora_A.weight"].float())


def test_path_may_be_text_and_weights_do_not_follow_the_file(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = make_adapter()
    weights = read_adapter(str(folder), sites)
    copies = {module: ModuleLoRA(a.clone(), b.clone()) for module, (a, b, *_) in weights.modules.items()}
    path = folder / "adapter_model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:  # in place: the same file
        file.seek(size // 2)
        file.write(b"\x00" * (size - size // 2))
    assert same(weights, LoRAWeights(weights.digest, copies))


# --- the digest


def test_equal_weights_have_one_digest_whatever_the_order_and_dtype_in_the_file(
    make_adapter: MakeAdapter, sites: Sites
) -> None:
    folder = edit_tensors(make_adapter(), lambda ts: {k: t.half() for k, t in ts.items()})
    before = read_adapter(folder, sites).digest
    assert len(before) == 32
    edit_tensors(folder, lambda ts: {k: t.float() for k, t in reversed(ts.items())})
    assert read_adapter(folder, sites).digest == before


def test_digest_changes_with_all_that_changes_the_result(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = edit_config(make_adapter(target_modules=["q_proj"], r=4), target_modules=None)

    def one_bit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = tensors[f"{Q0}.lora_A.weight"].view(-1)
        flat[7] = torch.nextafter(flat[7], torch.tensor(9.0))
        return tensors

    def without_one_module(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: t for k, t in tensors.items() if ".layers.0." not in k}

    def elsewhere(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k.replace("q_proj", "o_proj"): t for k, t in tensors.items()}

    digests = [
        read_adapter(folder, sites).digest,
        read_adapter(edit_config(folder, lora_alpha=9), sites).digest,
        read_adapter(edit_config(folder, use_rslora=True), sites).digest,
    ]
    edits = (one_bit, elsewhere, without_one_module)
    digests += [read_adapter(edit_tensors(folder, edit), sites).digest for edit in edits]
    assert len(set(digests)) == len(digests)


# --- case 15: no tensor is left out


@pytest.mark.parametrize(
    "stray",
    [
        "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.qk_proj.lora_A.weight",
        "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.weight",
        "base_model.model.model.layers.0.self_attn.q_proj",
        "something",
    ],
)
def test_case_15_a_tensor_that_binds_to_nothing_is_an_error_listing_it(
    stray: str, make_adapter: MakeAdapter, sites: Sites
) -> None:
    folder = edit_tensors(make_adapter(), lambda ts: {**ts, stray: torch.zeros(8, 48), "zz": torch.zeros(1)})
    with pytest.raises(AdapterLoadError, match="bind to nothing") as caught:
        read_adapter(folder, sites)
    assert stray in str(caught.value)
    assert "zz" in str(caught.value)
    assert "q_proj" in str(caught.value)  # and what there would be


def test_case_15_a_module_bound_twice_is_an_error(make_adapter: MakeAdapter, sites: Sites) -> None:
    def add(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, f"{Q0}.lora_A.other.weight": tensors[f"{Q0}.lora_A.weight"].clone()}

    with pytest.raises(AdapterLoadError, match="bind already"):
        read_adapter(edit_tensors(make_adapter(), add), sites)


@pytest.mark.parametrize("side", "AB")
def test_case_15_half_a_lora_is_an_error(side: str, make_adapter: MakeAdapter, sites: Sites) -> None:
    def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: t for k, t in tensors.items() if k != f"{Q0}.lora_{side}.weight"}

    with pytest.raises(AdapterLoadError, match=r"lacks what .* promises") as caught:
        read_adapter(edit_tensors(make_adapter(), cut), sites)
    assert f"lora_{side} of model.layers.0.self_attn.q_proj" in str(caught.value)


def test_case_15_a_target_without_a_tensor_is_an_error(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = edit_tensors(make_adapter(), lambda ts: {k: t for k, t in ts.items() if "down_proj" not in k})
    with pytest.raises(AdapterLoadError, match=r"lacks .*: lora_A of .*down_proj"):
        read_adapter(folder, sites)


def test_case_15_an_empty_file_of_tensors_is_an_error(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = edit_config(edit_tensors(make_adapter(), lambda ts: {}), target_modules=None)
    with pytest.raises(AdapterLoadError, match="holds no tensor"):
        read_adapter(folder, sites)


# --- case 16: damaged and foreign files


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_case_16_truncated_safetensors(kept: float, make_adapter: MakeAdapter, sites: Sites) -> None:
    path = make_adapter() / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(AdapterLoadError, match="damaged"):
        read_adapter(path.parent, sites)


def test_case_16_an_adapter_of_another_model_is_refused(make_adapter: MakeAdapter, sites: Sites) -> None:
    wider = tuple(
        LoRASite(s.index, 2 * s.in_features, s.modules, tuple(2 * n for n in s.out_features)) for s in sites
    )
    with pytest.raises(AdapterLoadError, match="another model"):
        read_adapter(make_adapter(), wider)


@pytest.mark.parametrize("shape", [(), (8,), (8, 47), (48, 8), (0, 48), (7, 48), (8, 48, 1)])
def test_case_16_wrong_shapes(shape: tuple[int, ...], make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = edit_tensors(make_adapter(r=8), lambda ts: {**ts, f"{Q0}.lora_A.weight": torch.ones(shape)})
    with pytest.raises(AdapterLoadError, match=r"q_proj\.lora_A.* has the shape .* need \[8, 48\]"):
        read_adapter(folder, sites)


@pytest.mark.parametrize("side", "AB")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_case_16_nan_and_infinity(value: float, side: str, make_adapter: MakeAdapter, sites: Sites) -> None:
    def poison(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[f"{Q0}.lora_{side}.weight"][-1, -1] = value
        return tensors

    with pytest.raises(AdapterLoadError, match="NaN or infinite") as caught:
        read_adapter(edit_tensors(make_adapter(), poison), sites)
    assert "model.layers.0.self_attn.q_proj" in str(caught.value)


def test_case_16_values_that_overflow_once_scaled(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = edit_config(make_adapter(), lora_alpha=1e29)
    edit_tensors(folder, lambda ts: {k: t * 1e12 for k, t in ts.items()})
    with pytest.raises(AdapterLoadError, match="NaN or infinite"):
        read_adapter(folder, sites)


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, int]]:
        return os.mkdir, (str(self.mark), 0o700)


def test_case_16_a_pickle_is_refused_unopened_with_the_way_to_convert_it(
    make_adapter: MakeAdapter, sites: Sites, tmp_path: Path
) -> None:
    folder = make_adapter()
    (folder / "adapter_model.safetensors").unlink()
    bomb, mark = folder / "adapter_model.bin", tmp_path / "executed"
    bomb.write_bytes(pickle.dumps(_Bomb(mark)))
    opened: list[str] = []
    watching = True

    def watch(event: str, args: tuple[Any, ...]) -> None:  # an audit hook cannot be taken away again
        if watching and event == "open":
            opened.append(str(args[0]))

    sys.addaudithook(watch)
    with pytest.raises(AdapterLoadError, match="pickle") as caught:
        read_adapter(folder, sites)
    watching = False
    assert "save_pretrained" in str(caught.value)
    assert any(name.endswith("adapter_config.json") for name in opened)  # the watch works
    assert not any(name.endswith(".bin") for name in opened)
    assert not mark.exists()


def test_case_16_beside_safetensors_a_pickle_is_ignored(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = make_adapter()
    os.mkfifo(folder / "adapter_model.bin")  # to open it would wait for ever
    assert read_adapter(folder, sites).modules


def test_case_16_a_pickle_under_the_name_of_safetensors(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = make_adapter()
    buffer = io.BytesIO()
    torch.save(load_file(folder / "adapter_model.safetensors"), buffer)
    (folder / "adapter_model.safetensors").write_bytes(buffer.getvalue())
    with pytest.raises(AdapterLoadError, match="damaged"):
        read_adapter(folder, sites)


def test_case_16_a_missing_folder_file_or_config(
    make_adapter: MakeAdapter, sites: Sites, tmp_path: Path
) -> None:
    with pytest.raises(AdapterLoadError, match="no folder"):
        read_adapter(tmp_path / "nowhere", sites)
    with pytest.raises(AdapterLoadError, match="too long"):
        read_adapter(tmp_path / ("x" * 5000), sites)
    folder = make_adapter()
    with pytest.raises(AdapterLoadError, match="no folder"):
        read_adapter(folder / "adapter_config.json", sites)
    (folder / "adapter_model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(AdapterLoadError, match="save_pretrained"):
        read_adapter(folder, sites)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterLoadError, match=r"no .*adapter_config\.json"):
        read_adapter(folder, sites)
    (folder / "adapter_config.json").mkdir()
    with pytest.raises(AdapterLoadError, match=r"no .*adapter_config\.json"):
        read_adapter(folder, sites)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"r": ' + "9" * 5000 + "}", "not JSON"),
        (b"\xff\xfe\xff", "not JSON"),
        ("[]", "no JSON object"),
        ('"LORA"', "no JSON object"),
        ("null", "no JSON object"),
        (" " * (1 << 20) + "{}", "larger"),
        ("{}", "lacks 'peft_type'"),
        ('{"peft_type": "LORA", "lora_alpha": 8}', "lacks 'r'"),
        ('{"peft_type": "LORA", "r": 8}', "lacks 'lora_alpha'"),
    ],
)
def test_case_16_a_config_that_is_none(
    text: str | bytes, words: str, make_adapter: MakeAdapter, sites: Sites
) -> None:
    folder = make_adapter()
    (folder / "adapter_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(AdapterLoadError, match=words):
        read_adapter(folder, sites)


@pytest.mark.parametrize(
    "change",
    [
        *({"r": value} for value in (0, -1, 8.0, "8", True, None, [8])),
        *({"lora_alpha": value} for value in (math.nan, math.inf, "16", True, None, 10**400)),
        {"use_rslora": "yes"},
        *({"target_modules": value} for value in (7, [7], {"q_proj": 1})),
        {"r": 16},
    ],
)
def test_case_16_config_values_that_make_no_sense(
    change: dict[str, Any], make_adapter: MakeAdapter, sites: Sites
) -> None:
    with pytest.raises(AdapterLoadError) as caught:
        read_adapter(edit_config(make_adapter(), **change), sites)
    assert str(caught.value).count(next(iter(change))) >= 1


# --- sound adapters that motet does not compute


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": ["LORA"]}, "peft_type"),
        ({"bias": "vera_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*lm_head"),
        ({"modules_to_save": ["norm"]}, "modules_to_save.*norm"),
        ({"r": 257}, "rank 257"),
        ({"rank_pattern": {"k_proj": 300}}, "rank 300 of model.layers.0.self_attn.k_proj"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"use_qalora": True}, "use_qalora"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "corda"}, "init_lora_weights"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"velora_config": {"a": 1}}, "velora_config"),
        ({"monteclora_config": {"a": 1}}, "monteclora_config"),
        ({"use_bdlora": {"a": 1}}, "use_bdlora"),
        ({"arrow_config": {"a": 1}}, "arrow_config"),
        ({"kasa_config": {"a": 1}}, "kasa_config"),
        ({"init_lora_weights": {"a": 1}}, "init_lora_weights"),
        ({"feature_to_come": True}, "feature_to_come"),
        ({"feature_to_come": "x" * 1000}, "feature_to_come"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_feature_that_is_not_computed_is_named(
    change: dict[str, Any], feature: str, make_adapter: MakeAdapter, sites: Sites
) -> None:
    with pytest.raises(UnsupportedAdapter, match=feature) as caught:
        read_adapter(edit_config(make_adapter(), **change), sites)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embedding"),  # these sites have no such ends
        ({"target_modules": ["q_proj", "lm_head"]}, "output head"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"rank_pattern": {"k_proj": 257}}, "rank 257"),
        ({"r": 300}, "rank 300"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_that_peft_saves_with_other_features_are_refused(
    config: dict[str, Any], feature: str, make_adapter: MakeAdapter, sites: Sites
) -> None:
    with pytest.raises(UnsupportedAdapter, match=feature):
        read_adapter(make_adapter(**config), sites)


@pytest.mark.parametrize(
    ("key", "feature"),
    [
        ("base_model.model.lm_head.lora_A.weight", "output head"),
        ("base_model.model.lm_head.weight", "output head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding"),
        ("base_model.model.model.embed_tokens.weight", "embedding"),
        ("base_model.model.score.modules_to_save.weight", "modules_to_save"),
    ],
)
def test_tensors_of_other_features_are_refused_even_if_the_config_hides_them(
    key: str, feature: str, make_adapter: MakeAdapter, sites: Sites
) -> None:
    folder = edit_tensors(make_adapter(), lambda ts: {**ts, key: torch.zeros(8, 48)})
    with pytest.raises(UnsupportedAdapter, match=feature):
        read_adapter(folder, sites)


def test_a_dtype_that_is_not_a_plain_float_is_refused(make_adapter: MakeAdapter, sites: Sites) -> None:
    folder = edit_tensors(make_adapter(), lambda ts: {k: t.to(torch.int8) for k, t in ts.items()})
    with pytest.raises(UnsupportedAdapter, match="int8"):
        read_adapter(folder, sites)


def test_every_setting_of_this_pefts_lora_config_is_known_or_off_by_default(
    make_adapter: MakeAdapter, sites: Sites
) -> None:
    """So a new PEFT whose defaults motet would refuse is noticed here."""
    saved = json.loads((make_adapter() / "adapter_config.json").read_text())
    assert saved.keys() >= LoraConfig().to_dict().keys() - {"runtime_config"}


# --- what the config promises and what the file holds


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        (f"{Q0}.lora_magnitude_vector", (48,)),
        (f"{Q0}.lora_magnitude_vector.default.weight", (48,)),
        (f"{Q0}.lora_B.bias", (48,)),
        (f"{Q0}.base_layer.bias", (48,)),
    ],
)
def test_case_15_a_tensor_of_a_feature_that_the_config_leaves_off_is_an_error(
    key: str, shape: tuple[int, ...], make_adapter: MakeAdapter, sites: Sites
) -> None:
    folder = edit_tensors(make_adapter(), lambda ts: {**ts, key: torch.ones(shape)})
    with pytest.raises(AdapterLoadError, match="would be left out") as caught:
        read_adapter(folder, sites)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"layers_to_transform": [1]},
        {"layers_to_transform": 1, "layers_pattern": "layers"},
        {"exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"exclude_modules": r".*\.0\..*"},
        {"target_modules": r"model\.layers\.1\..*"},
    ],
    ids=str,
)
def test_case_15_a_tensor_outside_of_what_the_config_targets_is_an_error(
    change: dict[str, Any], make_adapter: MakeAdapter, sites: Sites
) -> None:
    with pytest.raises(AdapterLoadError, match="would be left out") as caught:
        read_adapter(edit_config(make_adapter(), **change), sites)
    assert f"{Q0}.lora_A.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "promised"),
    [
        ({"target_modules": "all-linear"}, "lora_A of model.layers.0.mlp.down_proj"),
        ({"target_modules": ".*"}, "lora_A of model.layers.0.mlp.down_proj"),
        ({"target_modules": ["q_proj", "v_proj"]}, "lora_A of model.layers.0.self_attn.v_proj"),
        ({"use_dora": True}, "lora_magnitude_vector of model.layers.0.self_attn.q_proj"),
        ({"lora_bias": True}, "lora_B.bias of model.layers.0.self_attn.q_proj"),
    ],
    ids=str,
)
def test_case_15_what_the_config_promises_and_the_file_lacks_is_an_error(
    change: dict[str, Any], promised: str, make_adapter: MakeAdapter, sites: Sites
) -> None:
    with pytest.raises(AdapterLoadError, match="lacks what") as caught:
        read_adapter(edit_config(make_adapter(target_modules=["q_proj"]), **change), sites)
    assert promised in str(caught.value)


def test_case_15_a_target_that_the_model_does_not_have_is_an_error(
    make_adapter: MakeAdapter, sites: Sites
) -> None:
    folder = edit_config(make_adapter(target_modules=["q_proj"]), target_modules=["q_proj", "w1"])
    with pytest.raises(AdapterLoadError, match="target_modules names w1"):
        read_adapter(folder, sites)


@pytest.mark.parametrize("targets", ["nothing", []])
def test_targets_that_fit_nothing_are_an_error(
    targets: object, make_adapter: MakeAdapter, sites: Sites
) -> None:
    with pytest.raises(AdapterLoadError, match="target_modules fits no module"):
        read_adapter(edit_config(make_adapter(), target_modules=targets), sites)


def test_a_pattern_of_alphas_changes_exactly_the_modules_that_it_fits(
    make_adapter: MakeAdapter, sites: Sites
) -> None:
    folder = make_adapter(
        alpha_pattern={"layers.1.*q_proj": 24, "o_proj": 4}, target_modules=["q_proj", "o_proj"]
    )
    with_pattern = read_adapter(folder, sites).modules
    without = read_adapter(edit_config(folder, alpha_pattern={}), sites).modules
    factors = {module: (with_pattern[module].b / without[module].b).mean().item() for module in without}
    expected = {"0.self_attn.q": 1.0, "1.self_attn.q": 3.0, "0.self_attn.o": 0.5, "1.self_attn.o": 0.5}
    assert factors == pytest.approx({f"model.layers.{m}_proj": x for m, x in expected.items()})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("self_attn.qkv_proj", "q_proj, k_proj, v_proj"), ("mlp.gate_up_proj", "gate_proj, up_proj")],
)
def test_a_fused_projection_is_refused_where_the_model_has_its_parts(
    theirs: str, ours: str, make_adapter: MakeAdapter, sites: Sites
) -> None:
    key = f"base_model.model.model.layers.0.{theirs}.lora_A.weight"
    folder = edit_tensors(make_adapter(), lambda ts: {**ts, key: torch.zeros(8, 48)})
    with pytest.raises(
        UnsupportedAdapter, match=f"adapts {theirs.partition('.')[2]}, where this model has {ours}"
    ) as caught:
        read_adapter(folder, sites)
    assert key in str(caught.value)


def test_parts_of_a_projection_that_the_model_has_fused_are_refused(
    make_adapter: MakeAdapter, sites: Sites
) -> None:
    qkv, *others = sites
    path = "model.layers.0.self_attn.qkv_proj"
    fused = LoRASite(qkv.index, qkv.in_features, (path,), (sum(qkv.out_features),))
    with pytest.raises(UnsupportedAdapter, match="adapts q_proj, where this model has qkv_proj"):
        read_adapter(make_adapter(target_modules=["q_proj"], layers_to_transform=[0]), (fused, *others))


# --- hostile expressions


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": "model.(("},
        {"exclude_modules": "*"},
        {"rank_pattern": {"[": 4}},
        {"alpha_pattern": {"(?P<": 4}},
        {"layers_to_transform": [0], "layers_pattern": ["("]},
    ],
    ids=str,
)
def test_case_16_an_expression_that_is_none(
    change: dict[str, Any], make_adapter: MakeAdapter, sites: Sites
) -> None:
    with pytest.raises(AdapterLoadError, match="is no regular expression") as caught:
        read_adapter(edit_config(make_adapter(), **change), sites)
    assert list(change)[-1] in str(caught.value)


def test_case_16_an_expression_that_would_take_for_ever_is_stopped_and_holds_up_no_thread(
    make_adapter: MakeAdapter, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.lora.targets.TIME_LIMIT", 0.3)
    folder = edit_config(make_adapter(), rank_pattern={r"(?:(?:.|..)+)+[ !]": 4})
    turns, done = 0, threading.Event()

    def turn() -> None:
        nonlocal turns
        while not done.wait(0.01):
            turns += 1

    other = threading.Thread(target=turn)
    other.start()
    try:
        with pytest.raises(
            AdapterLoadError, match=r"rank_pattern: matching .* takes longer than 0\.3 seconds"
        ):
            read_adapter(folder, sites)
    finally:
        done.set()
        other.join()
    assert turns >= 5


@pytest.mark.parametrize(
    ("expression", "feature"),
    [
        (r"(?:.*q_proj){2000}", "repeats more than 1000 times"),
        (r".{1001,}", "repeats more than 1000 times"),
        (r"((a{100}){100}){100}", "repeats more than 1000 times"),
        (r"(?x) a { 2000 }", "verbose"),
        (r"a|(?ix:b{2#\n000})", "verbose"),
    ],
)
def test_an_expression_that_would_take_memory_without_bound_is_never_compiled(
    expression: str, feature: str, make_adapter: MakeAdapter, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regex.compile", lambda *_: pytest.fail("compiled"))
    for change in ({"target_modules": expression}, {"rank_pattern": {expression: 4}}):
        with pytest.raises(UnsupportedAdapter, match=f"{next(iter(change))}: .*{feature}"):
            read_adapter(edit_config(make_adapter(), **change), sites)


def test_an_expression_may_repeat_what_a_path_can_hold(make_adapter: MakeAdapter, sites: Sites) -> None:
    weights = read_adapter(edit_config(make_adapter(), target_modules=r"(?:[^.]{1,20}\.){4}q_proj|.*"), sites)
    assert weights.modules
