"""Frozen: settings that are checked when they are made, copies included, and never change. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

Self = TypeVar("Self", bound="Frozen")


class Frozen(BaseModel):
    """Base of `SamplingParams`, `TenantPolicy` and `EngineConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _suggest_names(cls: type[Self], given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Adds to the errors of unknown names which one may have been meant."""
        try:
            return handler(given)
        except ValidationError as error:
            details = [_with_suggestion(each, cls.model_fields) for each in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(error.title, details) from None

    def model_copy(self: Self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """The same with other values for some fields, checked like any: an unknown key, a value of a wrong kind
        or out of range is a `pydantic.ValidationError`. (pydantic's own would take what it is given.)"""
        copy = super().model_copy(deep=deep)
        if not update:
            return copy
        given = {name: getattr(copy, name) for name in copy.model_fields_set}
        return type(self).model_validate({**given, **update})


def _with_suggestion(error: ErrorDetails, known: Iterable[str]) -> InitErrorDetails:
    details = InitErrorDetails(
        type=error["type"], loc=error["loc"], input=error["input"], ctx=error.get("ctx", {})
    )
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else "there is no such setting"
        details["type"] = PydanticCustomError("extra_forbidden", f"{error['msg']}; {hint}")
    return details
