"""Models that compute on a GGUF file's own codes, against transformers holding the values of these."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import QuantisationType, pack, unpack, write_gguf
from test_peft_families import save_strong
from tiny_models import hf_logits, make_hf_model, make_ids, motet_logits, save_folder

from motet.errors import UnsupportedModel
from motet.kernels.cpu.library import usable_isas
from motet.kernels.ops import Ops, select_ops
from motet.lora.adapter import read_adapter
from motet.lora.arena import AdapterArena
from motet.lora.batch import LoRABatch
from motet.lora.sites import projections
from motet.runtime.models.base import CausalLM
from motet.runtime.models.gguf_file import GGUFFile
from motet.runtime.models.loader import load_model

pytestmark = [
    pytest.mark.skipif(not usable_isas(), reason="no C++ compiler at installation"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
ERROR = 0.04
"""Of logits, from activations in 8 bits; int8 or int4 weights rounded anew add 0.01 or more."""

MIXED = {
    "token_embd": QuantisationType.Q8_0,
    "attn_k": QuantisationType.Q4_0,
    "ffn_down": QuantisationType.Q8_0,
    "attn_output": QuantisationType.F16,
    "ffn_up": QuantisationType.Q8_0,  # beside a gate in Q4_1: no format for both
}


def gguf_ops(dtype: str = "float32") -> Ops:
    return select_ops("cpu", dtype, threads=2, quantization="gguf")


def quantised(hf_model: Any, kind: QuantisationType, types: dict[str, QuantisationType]) -> Any:
    """The model with the values that `write_gguf` leaves it."""
    ends = {"token_embd": "embed_tokens", "attn_k": "k_proj", "ffn_down": "down_proj", "ffn_up": "up_proj"}
    ends |= {"attn_output": "o_proj"}
    kinds = {f"{ends[end]}.weight": kind for end, kind in types.items()}
    for name, parameter in hf_model.named_parameters():
        if parameter.ndim == 2:
            own = next((k for end, k in kinds.items() if name.endswith(end)), kind)
            parameter.data = unpack(pack(parameter.detach(), own), own)
    return hf_model


def weight_of(model: CausalLM, name: str) -> torch.Tensor:
    projection = projections(model.lora_sites)[name.removesuffix(".weight")]
    assert projection.site.weight is not None
    weight = projection.site.weight()
    return weight if projection.site.role == "embedding" else weight[projection.rows]


GEMMA3 = {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6}
"""What its GGUF form implies."""

CASES: list[tuple[str, str, dict[str, Any], dict[str, QuantisationType]]] = [
    ("llama", "Q4_0", {}, {}),
    ("llama", "Q4_1", {"num_key_value_heads": 1, "tie_word_embeddings": True}, {}),
    ("llama", "Q4_1", {"tie_word_embeddings": True}, MIXED),
    ("qwen2", "Q8_0", {"tie_word_embeddings": True}, {}),
    ("phi3", "Q4_0", {}, {}),
    ("gemma3", "Q4_1", GEMMA3, {"token_embd": QuantisationType.F32}),
]


@pytest.mark.parametrize(("family", "kind", "changes", "types"), CASES)
def test_the_weights_are_the_files_and_the_logits_those_of_transformers(
    family: str, kind: str, changes: dict[str, Any], types: dict[str, QuantisationType], tmp_path: Path
) -> None:
    weight_type = QuantisationType[kind]
    path = write_gguf(
        tmp_path / "model.gguf",
        make_hf_model(family, **SHAPE, **changes),
        weight_type=weight_type,
        types=types,
    )
    hf_model = quantised(make_hf_model(family, **SHAPE, **changes), weight_type, types)
    ops = gguf_ops()
    model = load_model(path, ops).model
    for name, parameter in hf_model.named_parameters():
        if parameter.ndim == 2:
            assert torch.equal(weight_of(model, name), parameter), name
    logits = motet_logits(model, ops, make_ids(20), range(20))
    expected = hf_logits(hf_model, make_ids(20), range(20))
    assert 0 < (logits - expected).norm() <= ERROR * expected.norm()


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_an_adapter_acts_on_a_model_in_blocks_as_in_peft(dora: bool, tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", make_hf_model(**SHAPE), weight_type=QuantisationType.Q4_1, types=MIXED
    )
    base = quantised(make_hf_model(**SHAPE), QuantisationType.Q4_1, MIXED)
    names = "|".join(["[qkvo]_proj", "(gate|up|down)_proj", "lm_head", *([] if dora else ["embed_tokens"])])
    peer = save_strong(base, tmp_path / "adapter", target_modules=rf"(.*\.)?({names})", r=4, use_dora=dora)
    ops = gguf_ops()
    model = load_model(path, ops).model
    arena = AdapterArena(model.lora_sites, ops.new_adapter_memory(1 << 20))
    slot = arena.place(arena.pack(read_adapter(tmp_path / "adapter", model.lora_sites)))
    ids = make_ids(20)
    with torch.inference_mode():
        theirs = peer(ids[None]).logits[0]
    ours = motet_logits(model, ops, ids, range(20), lora=LoRABatch(ops, arena, [slot] * 20))
    assert (
        ours - theirs
    ).norm() <= 1.5 * ERROR * theirs.norm()  # the adapter makes the logits' spread, and errors, larger


def test_what_stays_in_blocks_is_never_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_hf_model(**SHAPE), weight_type=QuantisationType.Q4_0)
    expanded = []
    monkeypatch.setattr(
        "motet.runtime.models.gguf_tensors.READERS",
        {"Q4_0": expanded.append, "F32": lambda raw: torch.from_numpy(raw).view(torch.float32)},
    )
    load_model(path, gguf_ops())
    assert not expanded


def test_what_does_not_stay_in_blocks_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", make_hf_model(**SHAPE), weight_type=QuantisationType.Q4_1, types=MIXED
    )
    with caplog.at_level(logging.INFO, "motet"):
        load_model(path, gguf_ops())
    messages = [record.getMessage() for record in caplog.records]
    assert "2 of 16 matrices (F16) become torch.float32" in messages
    assert messages.count("a matrix in Q8_0 becomes torch.float32") == 2  # up, in both layers
    assert messages.count("a matrix in Q4_1 becomes torch.float32") == 2  # and the gates beside


@pytest.mark.parametrize("kind", ["Q4_K", "BF16"])
def test_a_gguf_of_other_types_is_refused(kind: str, tmp_path: Path) -> None:
    hf_model = make_hf_model(hidden_size=256, intermediate_size=256)
    path = write_gguf(tmp_path / "model.gguf", hf_model, weight_type=QuantisationType[kind])
    with pytest.raises(
        UnsupportedModel, match=rf"{path}: .*quantization is 'gguf', but .* stored as {kind}; "
    ):
        load_model(path, gguf_ops())


def test_a_folder_is_refused(tmp_path: Path) -> None:
    folder = save_folder(make_hf_model(), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"stored as F32; .*a \.gguf file is Q4_0, Q4_1, Q8_0"):
        load_model(folder, gguf_ops())


def test_the_demo_computes_on_its_own_codes(demo_gguf: Path) -> None:
    ops, checkpoint = gguf_ops("bfloat16"), GGUFFile(demo_gguf)
    model = load_model(demo_gguf, ops).model
    for module in ("embed_tokens", "layers.7.self_attn.k_proj", "layers.29.mlp.down_proj"):
        name = f"model.{module}.weight"
        stored = checkpoint.tensors[name]
        assert stored.dtype in ("Q8_0", "Q4_1")
        assert torch.equal(weight_of(model, name), stored.read().to(torch.bfloat16)), name
