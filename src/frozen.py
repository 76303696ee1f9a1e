"""Frozen: settings that are checked when they are made, copies included, and never change. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

Self = TypeVar("Self", bound="Frozen")


class Frozen(BaseModel):
    """Base of `SamplingParams`, `TenantPolicy` and `EngineConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    def model_copy(self: Self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """The same with other values for some fields, checked like any: an unknown key, a value of a wrong kind
        or out of range is a `pydantic.ValidationError`. (pydantic's own would take what it is given.)"""
        copy = super().model_copy(deep=deep)
        if not update:
            return copy
        given = {name: getattr(copy, name) for name in copy.model_fields_set}
        return type(self).model_validate({**given, **update})
