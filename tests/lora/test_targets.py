"""find_targets beside the functions by which PEFT itself picks modules, ranks and alphas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from motet.lora.peft_config import PeftConfig
from motet.lora.targets import Target, find_targets

LINEARS = [
    f"model.layers.{i}.{name}"
    for i in (0, 1, 10)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
]
ENDS = ["model.embed_tokens", "lm_head"]
NAMES = [
    "q_proj",
    "o_proj",
    "mlp.up_proj",
    "layers.1.mlp.down_proj",
    "lm_head",
    "model.layers.0.self_attn.q_proj",
]
EXPRESSIONS = [
    *(
        r".*_proj",
        r".*\.1\..*",
        r"model\.layers\.(0|10)\.mlp\.\w+",
        r"(?!lm_head).*(?<!up_proj)",
        r"(?i).*Q_PROJ",
    ),
    *("lm_head", "proj", "model.*", r"(model\.)?(.*\.)?(o|up)_proj", ""),
]
ENDINGS = [
    *NAMES,
    "up_proj",
    "(q|o)_proj",
    r"layers\.1.*",
    "^model.layers.0.*",
    "proj",
    r"layers\.\d\.mlp.down_proj",
    "mlp",
]
numbers = st.integers(1, 9)


@settings(max_examples=200, deadline=None)
@given(
    targets=st.lists(st.sampled_from(NAMES), min_size=1, unique=True) | st.sampled_from(EXPRESSIONS),
    excluded=st.none() | st.lists(st.sampled_from([*NAMES, "mlp"])) | st.sampled_from(EXPRESSIONS),
    layers=st.none() | st.lists(st.sampled_from([0, 1, 7, 10])),
    lists=st.lists(st.sampled_from(["layers", "h", "lay.*", r"self_attn"]), max_size=2),
    ranks=st.dictionaries(st.sampled_from(ENDINGS), numbers, max_size=4),
    alphas=st.dictionaries(st.sampled_from(ENDINGS), numbers, max_size=4),
    rslora=st.booleans(),
)
def test_case_14_modules_ranks_and_scalings_are_those_that_peft_picks(
    targets: Any, excluded: Any, layers: Any, lists: list[str], ranks: Any, alphas: Any, rslora: bool
) -> None:
    if isinstance(targets, str) or not layers:
        layers, lists = None, []
    theirs = LoraConfig(
        target_modules=targets,
        exclude_modules=excluded,
        layers_to_transform=layers,
        layers_pattern=lists or None,
    )
    expected = {}
    for path in (*LINEARS, *ENDS):
        if check_target_module_exists(theirs, path):
            r = ranks.get(get_pattern_key(ranks.keys(), path), 8)
            alpha = alphas.get(get_pattern_key(alphas.keys(), path), 16)
            expected[path] = Target(r, alpha / (math.sqrt(r) if rslora else r))
    ours = PeftConfig(
        path=Path("adapter_config.json"),
        rank=8,
        alpha=16,
        rslora=rslora,
        dora=False,
        lora_bias=False,
        tied=False,
        bias="none",
        rank_pattern=ranks,
        alpha_pattern=alphas,
        targets=targets if isinstance(targets, str) else tuple(targets),
        excluded=excluded if isinstance(excluded, str) else tuple(excluded or ()),
        layers=None if layers is None else tuple(layers),
        layer_lists=tuple(lists),
    )
    assert find_targets(ours, LINEARS, ENDS, held=[]) == expected
