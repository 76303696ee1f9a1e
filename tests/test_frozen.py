"""Settings are checked whenever they are made, by `model_copy` too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from motet import EngineConfig, SamplingParams, TenantPolicy
from motet.frozen import Frozen


@pytest.mark.parametrize(
    ("settings", "update"),
    [
        (SamplingParams(), {"n": 0}),
        (SamplingParams(), {"top_p": "0.5"}),
        (SamplingParams(), {"temperature": float("nan")}),
        (SamplingParams(), {"max_token": 5}),
        (SamplingParams(max_tokens=5), {"min_tokens": 6}),
        (TenantPolicy(), {"weight": 0.0}),
        (TenantPolicy(), {"burst": 5}),
        (EngineConfig(), {"block_size": 0}),
        (EngineConfig(), {"blocksize": 16}),
    ],
)
def test_a_copy_with_a_value_that_the_constructor_refuses_is_refused(
    settings: Frozen, update: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        settings.model_copy(update=update)


@pytest.mark.parametrize(
    ("kind", "given", "hint"),
    [
        (EngineConfig, {"max_seqs": 1}, "did you mean `max_num_seqs`?"),
        (SamplingParams, {"max_token": 5}, "did you mean `max_tokens`?"),
        (TenantPolicy, {"xyzzy {n}": 5}, "there is no such setting"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_nearest_one(
    kind: type[Frozen], given: dict[str, Any], hint: str
) -> None:
    makers = [
        lambda: kind(**given),
        lambda: kind.model_validate(given),
        lambda: kind.model_validate_json(json.dumps(given)),
        lambda: kind().model_copy(update=given),
    ]
    for make in makers:
        with pytest.raises(ValidationError) as raised:
            make()
        [error] = raised.value.errors()
        assert (error["type"], {error["loc"][0]: error["input"]}) == ("extra_forbidden", given)
        assert error["msg"] == f"Extra inputs are not permitted; {hint}"


def test_a_suggestion_hides_no_other_mistake() -> None:
    with pytest.raises(ValidationError) as raised:
        SamplingParams(max_token=5, temperature=-1, stop=("",), logit_bias={"a": 1.0})
    plain = {error["loc"]: error for error in raised.value.errors()}
    assert plain.keys() == {("max_token",), ("temperature",), ("stop", 0), ("logit_bias", "a", "[key]")}
    assert plain["temperature",]["ctx"] == {"ge": 0.0}
    with pytest.raises(ValidationError, match=r"min_tokens \(6\) is above max_tokens \(5\)"):
        SamplingParams(max_tokens=5, min_tokens=6)


@pytest.mark.parametrize("kind", [SamplingParams, TenantPolicy, EngineConfig])
def test_web_services_get_a_json_schema_of_all_that_json_can_say(kind: type[Frozen]) -> None:
    schema = kind.model_json_schema()
    functions = {"logits_processors", "adapter_resolver"}
    assert schema["properties"].keys() == kind.model_fields.keys() - functions
    assert schema["additionalProperties"] is False


def test_a_copy_makes_of_its_values_what_the_constructor_makes() -> None:
    params = SamplingParams(max_tokens=5, stop="a", logits_processors=lambda ids, logits: logits)
    copy = params.model_copy(update={"stop": "END", "logit_bias": {"7": 1.0}})
    assert copy.stop == ("END",)  # not the three stop strings that a tuple of its characters would be
    assert copy.logit_bias == {7: 1.0}
    assert copy == SamplingParams(
        max_tokens=5, stop="END", logit_bias={7: 1.0}, logits_processors=params.logits_processors
    )
    assert copy.model_fields_set == {"max_tokens", "stop", "logit_bias", "logits_processors"}
    assert params.model_copy() == params.model_copy(deep=True) == params
