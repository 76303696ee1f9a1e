from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import LLAMA3_ROPE
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from motet.errors import UnsupportedModel
from motet.kernels.reference import ReferenceOps
from motet.runtime.models.rope import Rope, inverse_frequencies, read_rope

OLD_LLAMA3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}

SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "rope_theta": {"rope_theta": 500_000.0},
    "integer theta": {"rope_theta": 10000},
    "null scaling": {"rope_theta": 1e6, "rope_scaling": None},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "parameters without a theta": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4},
    "llama3 parameters": {"rope_parameters": LLAMA3_ROPE},
    "llama3 scaling": {"rope_scaling": OLD_LLAMA3, "rope_theta": 500_000.0},
    "type, not rope_type": {"rope_scaling": {**OLD_LLAMA3, "rope_type": "llama3", "type": "llama3"}},
    "scaling before parameters": {"rope_scaling": OLD_LLAMA3, "rope_parameters": {"rope_theta": 7.0}},
    "original length from the context": {
        "rope_scaling": {
            key: v for key, v in OLD_LLAMA3.items() if key != "original_max_position_embeddings"
        },
        "max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("head_dim", [2, 64, 128])
def test_cos_and_sin_equal_those_of_transformers(spelling: str, head_dim: int) -> None:
    config = {"max_position_embeddings": 32_768, **SPELLINGS[spelling]}
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, **config))
    positions = torch.tensor([0, 1, 511, 8_000, 20_000, 131_071])
    expected = theirs(torch.empty(0), positions[None])
    ops = ReferenceOps(torch.device("cpu"), torch.float32)
    cos, signed_sin = Rope(read_rope(config), head_dim, ops).cos_sin(positions)
    sign = torch.cat((-torch.ones(head_dim // 2), torch.ones(head_dim // 2)))
    for ours, reference in zip((cos, signed_sin * sign), expected, strict=True):
        assert ours.dtype == torch.float32
        # A float32 angle at 131,071 radians is only known to 0.008; up to 20,000 to 0.001.
        torch.testing.assert_close(ours[:-1], reference[0, :-1], atol=2e-3, rtol=0)
        torch.testing.assert_close(ours[-1:], reference[0, -1:], atol=2e-2, rtol=0)
    torch.testing.assert_close(
        inverse_frequencies(read_rope(config), head_dim), theirs.inv_freq, rtol=3e-7, atol=0
    )


def test_divisors_divide_the_frequencies() -> None:
    config = {"rope_parameters": {"rope_type": "frequency_divisors", "divisors": (1.0, 2.0, 4.0, 8.0)}}
    plain = inverse_frequencies(read_rope({}), 8)
    divided = inverse_frequencies(read_rope(config), 8)
    assert torch.equal(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "longrope", "proportional"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_other_rope_types_are_refused_by_name(rope_type: str, key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{rope_type}'; supported are default, llama3"):
        read_rope({key: {"rope_type": rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    "config",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
)
def test_partial_rotation_and_ropes_per_layer_type_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel):
        read_rope(config)
