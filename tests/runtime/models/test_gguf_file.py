"""GGUF files against transformers holding the same dequantised weights."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_models import K_SCALES, QuantisationType, round_trip, smollm2_from_gguf, write_gguf
from tiny_models import (
    LLAMA3_ROPE,
    float32_ops,
    hf_logits,
    make_hf_model,
    make_ids,
    motet_logits,
    relative_error,
)

from motet.errors import CorruptCheckpoint, ModelError, UnsupportedModel
from motet.runtime.models.gguf_file import GGUFFile
from motet.runtime.models.gguf_tensors import READERS
from motet.runtime.models.loader import find_model, load_model

BLOCKS = {"hidden_size": 64, "intermediate_size": 96}  # multiples of a block's 32 weights
K_BLOCKS = {"hidden_size": 256, "intermediate_size": 256}  # of a K type's 256


def logits_of(path: Path, rows: range = range(20)) -> torch.Tensor:
    ops = float32_ops()
    return motet_logits(load_model(path, ops).model, ops, make_ids(20), rows)


def write(tmp_path: Path, family: str = "llama", **options: Any) -> Path:
    return write_gguf(tmp_path / "model.gguf", make_hf_model(family, **BLOCKS), **options)


@pytest.mark.parametrize(
    "weight_type",
    ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_each_type_gives_the_logits_of_its_dequantised_weights(
    family: str, weight_type: str, tmp_path: Path
) -> None:
    kind = QuantisationType[weight_type]
    shape = K_BLOCKS if kind in K_SCALES else BLOCKS
    path = write_gguf(tmp_path / "model.gguf", make_hf_model(family, **shape), weight_type=kind)
    hf_model = round_trip(make_hf_model(family, **shape), kind)
    assert relative_error(logits_of(path), hf_logits(hf_model, make_ids(20), range(20))) <= 1e-4


def test_blocks_written_by_hand_hold_what_llama_cpp_says_they_do() -> None:
    """One block of each five-bit type, spelled out from ggml's structures: scale, (least,) fifth bits, nibbles."""
    low, fifth = np.arange(32) * 7 % 11, np.arange(32) % 3 == 0
    nibbles = (low[:16] | low[16:] << 4).astype(np.uint8)
    head, bits = np.array([0.5], np.float16).view(np.uint8), np.packbits(fifth, bitorder="little")
    least = np.array([-3.0], np.float16).view(np.uint8)
    q5_0 = READERS["Q5_0"](np.concatenate([head, bits, nibbles]))
    q5_1 = READERS["Q5_1"](np.concatenate([head, least, bits, nibbles]))
    assert q5_0.flatten().tolist() == (0.5 * (low + 16 * fifth - 16.0)).tolist()
    assert q5_1.flatten().tolist() == (0.5 * (low + 16 * fifth) - 3.0).tolist()


@pytest.mark.parametrize("weight_type", ["BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_more_blocks_than_are_read_at_a_time_are_dequantised_as_upstream_does(
    weight_type: str, tmp_path: Path
) -> None:
    hf_model = make_hf_model(vocab_size=9_000, **BLOCKS)
    path = write_gguf(tmp_path / "large.gguf", hf_model, weight_type=QuantisationType[weight_type])
    checkpoint = GGUFFile(path)
    upstream = next(t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(upstream.data, upstream.tensor_type))
    assert torch.equal(checkpoint.tensors["model.embed_tokens.weight"].read().float(), expected)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_each_variant_gives_the_logits_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    hf_model = make_hf_model(family, **changes)
    path = write_gguf(tmp_path / "model.gguf", hf_model)
    assert relative_error(logits_of(path), hf_logits(hf_model, make_ids(20), range(20))) <= 1e-4


FAMILY_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "mistral_without_a_window": ("mistral", {"sliding_window": None}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3_partial_rope": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "gemma2": ("gemma2", {"num_hidden_layers": 3, "query_pre_attn_scalar": 20}),
    "gemma3": ("gemma3", {"num_hidden_layers": 7, "query_pre_attn_scalar": 20, "sliding_window_pattern": 6}),
    "olmo2": ("olmo2", {}),
}


@pytest.mark.parametrize("variant", FAMILY_VARIANTS)
def test_each_family_gives_the_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = FAMILY_VARIANTS[variant]
    hf_model = make_hf_model(family, **changes)
    path = write_gguf(tmp_path / "model.gguf", hf_model)
    expected = hf_logits(hf_model, make_ids(20), range(20))
    assert relative_error(logits_of(path), expected) <= 1e-4


def test_a_head_size_of_its_own_is_read_from_key_length(tmp_path: Path) -> None:
    hf_model = make_hf_model(head_dim=20)
    sizes = {f"llama.{key}": 20 for key in ("attention.key_length", "attention.value_length")}
    path = write_gguf(tmp_path / "model.gguf", hf_model, metadata=sizes | {"llama.rope.dimension_count": 20})
    assert relative_error(logits_of(path), hf_logits(hf_model, make_ids(20), range(20))) <= 1e-4


@pytest.mark.parametrize("first_position", [0, 20_000])
def test_rope_freqs_carry_llama3_scaling(first_position: int, tmp_path: Path) -> None:
    hf_model = make_hf_model(rope_parameters=LLAMA3_ROPE)
    rotary = hf_model.model.rotary_emb
    plain = make_hf_model(rope_parameters={"rope_type": "default", "rope_theta": LLAMA3_ROPE["rope_theta"]})
    divisors = plain.model.rotary_emb.inv_freq / rotary.inv_freq
    assert divisors.max() > 2
    ops = float32_ops()
    model = load_model(
        write_gguf(tmp_path / "model.gguf", hf_model, more_tensors={"rope_freqs.weight": divisors}), ops
    ).model
    actual = motet_logits(model, ops, make_ids(20), range(20), first_position=first_position)
    assert relative_error(actual, hf_logits(hf_model, make_ids(20), range(20), first_position)) <= 1e-4


def rope(kind: str, **more: float) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, **more}


SCALINGS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "linear": ("llama", rope("linear"), {"llama.rope.scaling.type": "linear"}),
    "linear_by_its_factor_alone": ("qwen2", rope("linear"), {}),
    "yarn": (
        "qwen3",
        rope("yarn", original_max_position_embeddings=64),
        {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.original_context_length": 64},
    ),
    "linear_of_full_layers_alone": (
        "gemma3",
        {
            "full_attention": rope("linear") | {"rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        },
        {"gemma3.rope.scaling.type": "linear", "gemma3.rope.freq_base_swa": 20_000.0},
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scaling_of_the_metadata_is_that_of_transformers(scaling: str, tmp_path: Path) -> None:
    family, parameters, metadata = SCALINGS[scaling]
    changes = {"num_hidden_layers": 6, "sliding_window_pattern": 6, "query_pre_attn_scalar": 20}
    hf_model = make_hf_model(family, rope_parameters=parameters, **(changes if family == "gemma3" else {}))
    path = write_gguf(
        tmp_path / "model.gguf", hf_model, metadata={f"{family}.rope.scaling.factor": 4.0, **metadata}
    )
    ops = float32_ops()
    actual = motet_logits(load_model(path, ops).model, ops, make_ids(20), range(20), first_position=5_000)
    assert relative_error(actual, hf_logits(hf_model, make_ids(20), range(20), 5_000)) <= 1e-4


def test_longrope_comes_in_tensors_of_its_own(tmp_path: Path) -> None:
    short, long = ([1.0 + i / scale for i in range(6)] for scale in (10, 2))
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}
    hf_model = make_hf_model("phi3", rope_parameters=scaling, original_max_position_embeddings=64)
    tensors = {
        "rope_factors_short.weight": torch.tensor(short),
        "rope_factors_long.weight": torch.tensor(long),
    }
    magnitude = (1 + math.log(32_768 / 64) / math.log(64)) ** 0.5
    path = write_gguf(
        tmp_path / "model.gguf",
        hf_model,
        more_tensors=tensors,
        metadata={"phi3.rope.scaling.attn_factor": magnitude},
    )
    assert relative_error(logits_of(path), hf_logits(hf_model, make_ids(20), range(20))) <= 1e-4
    with pytest.raises(UnsupportedModel, match=r"rope_factors_short\.weight; only a Phi-3"):
        load_model(write(tmp_path, more_tensors={"rope_factors_short.weight": torch.ones(6)}), float32_ops())


def test_the_largest_gemma_scales_attention_by_its_width(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    hf_model = make_hf_model("gemma2", num_hidden_layers=46, query_pre_attn_scalar=16, **small)
    path = write_gguf(tmp_path / "model.gguf", hf_model)
    assert relative_error(logits_of(path), hf_logits(hf_model, make_ids(20), range(20))) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"])
def test_a_file_gives_the_logits_that_transformers_own_reading_of_it_gives(
    family: str, tmp_path: Path
) -> None:
    # What transformers does not read of a file has its default here.
    gemma = {"num_hidden_layers": 6, "query_pre_attn_scalar": 256, "head_dim": 256}
    changes: dict[str, Any] = gemma if family.startswith("gemma") else {"head_dim": 64}
    changes |= {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 128}}.get(family, {})
    hf_model = make_hf_model(family, hidden_size=256, intermediate_size=256, **changes)
    path = write_gguf(
        tmp_path / "model.gguf",
        hf_model,
        weight_type=QuantisationType.Q4_K,
        metadata={"tokenizer.ggml.padding_token_id": 0},
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
    assert relative_error(logits_of(path), hf_logits(theirs, make_ids(20), range(20))) <= 1e-4


def test_end_tokens_and_context_length_come_from_the_metadata(tmp_path: Path) -> None:
    loaded = load_model(write(tmp_path, metadata={"tokenizer.ggml.eot_token_id": 9}), float32_ops())
    assert loaded.eos_token_ids == (2, 9)
    assert loaded.model.max_model_len == 32_768
    assert not loaded.generation_defaults.do_sample


def test_an_unsupported_tensor_type_is_named_with_those_that_are_supported(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_hf_model(**K_BLOCKS), weight_type=QuantisationType.TQ1_0)
    with pytest.raises(UnsupportedModel, match="stored as TQ1_0; supported are F32, F16, BF16, Q8_0, Q4_0"):
        load_model(path, float32_ops())


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.expert_count": 8},
        {"llama.rope.scaling.type": "longrope"},
        {"llama.rope.scaling.attn_factor": 1.2},
        {"llama.rope.dimension_count": 8},
        {"llama.attention.value_length": 8},
        {"llama.attention.causal": False},
        {"llama.logit_scale": 0.5},
        {"general.type": "adapter"},
        {"split.count": 2},
    ],
)
def test_a_hyperparameter_that_is_not_computed_is_refused_by_name(
    metadata: dict[str, object], tmp_path: Path
) -> None:
    (key,) = metadata
    with pytest.raises(
        UnsupportedModel, match={"general.type": "adapter", "split.count": "split"}.get(key, key)
    ):
        load_model(write(tmp_path, metadata=metadata), float32_ops())


def test_each_file_of_a_split_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=1)
    for name in ("token_embd.weight", "output_norm.weight"):
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.glob("*-of-00002.gguf"))
    assert len(paths) == 2
    for path in paths:
        with pytest.raises(
            UnsupportedModel, match=rf"{path.name}: one of 2 files .*llama-gguf-split --merge"
        ):
            load_model(path, float32_ops())


def test_hyperparameters_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    neutral = {
        "llama.expert_count": 0,
        "llama.rope.scaling.type": "none",
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 96,
        "llama.tensor_data_layout": "Meta AI original pth",
    }
    assert torch.equal(logits_of(write(tmp_path, metadata=neutral)), logits_of(write(tmp_path)))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"'mamba'; supported are models of llama, qwen2"):
        load_model(path, float32_ops())


def test_a_file_of_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="byte order"):
        load_model(path, float32_ops())


def test_case_29_missing_short_and_unused_tensors_are_named(tmp_path: Path) -> None:
    def missing(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["blk.1.attn_k.weight"]

    def short(tensors: dict[str, torch.Tensor]) -> None:
        tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"][:-1]

    def unused(tensors: dict[str, torch.Tensor]) -> None:
        tensors["blk.0.attn_q_norm.weight"] = torch.ones(16)

    faults = {
        missing: r"layers\.1\.self_attn\.k_proj",
        short: r"layers\.1\.mlp\.up_proj",
        unused: "attn_q_norm",
    }
    for change, name in faults.items():
        with pytest.raises(CorruptCheckpoint, match=name):
            load_model(write(tmp_path, change=change), float32_ops())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.999])
def test_case_29_a_file_cut_short_is_corrupt_and_named(share: float, tmp_path: Path) -> None:
    path = write(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CorruptCheckpoint, match=r"model\.gguf: .*cut short"):
        load_model(path, float32_ops())


def test_a_file_that_is_no_gguf_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptCheckpoint, match="not a GGUF file"):
        load_model(tmp_path / "model.gguf", float32_ops())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # weights of another type are NaN as likely as not
def test_no_flipped_bit_of_the_header_raises_anything_but_a_model_error(seed: int, tmp_path: Path) -> None:
    path = write(tmp_path)
    content = path.read_bytes()
    header = gguf.GGUFReader(path).data_offset
    generator = torch.Generator().manual_seed(seed)
    for _ in range(150):
        at = int(torch.randint(header, (1,), generator=generator))
        flipped = content[at] ^ (1 << int(torch.randint(8, (1,), generator=generator)))
        path.write_bytes(content[:at] + bytes([flipped]) + content[at + 1 :])
        with contextlib.suppress(ModelError):  # loading is fine too: a letter of a token, say
            load_model(path, float32_ops())


def assert_demo_equals(hf_model: Any) -> None:
    ops = float32_ops()
    loaded = load_model("demo", ops)
    ids = make_ids(64, vocab_size=loaded.model.vocab_size)
    actual = motet_logits(loaded.model, ops, ids, range(64), chunk=24)
    assert relative_error(actual, hf_logits(hf_model, ids, range(64))) <= 1e-4
    assert loaded.eos_token_ids == (2,)
    assert loaded.model.max_model_len == 8192


def test_the_demo_model_gives_the_logits_of_transformers_with_upstreams_dequantised_weights() -> None:
    assert_demo_equals(smollm2_from_gguf(find_model("demo")))


@pytest.mark.slow
def test_the_demo_model_gives_the_logits_of_transformers_own_gguf_loading() -> None:
    path = find_model("demo")
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    assert_demo_equals(hf_model.eval())
