"""What a model's own files say about generating: GenerationDefaults and the end tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from motet.errors import CorruptCheckpoint

_NOT_APPLIED = MappingProxyType(
    {
        "no_repeat_ngram_size": 0,
        "typical_p": 1.0,
        "bad_words_ids": None,
        "sequence_bias": None,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
)
"""Keys of generation_config.json that change tokens but are not applied, with their neutral values."""


class GenerationDefaults(BaseModel):
    """The defaults of `generation_config.json`. None: it says nothing."""

    model_config = ConfigDict(frozen=True, strict=True)

    do_sample: bool = False
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None


def read_generation_defaults(generation_config: Mapping[str, Any]) -> GenerationDefaults:
    """Raises `CorruptCheckpoint` for a value out of its range."""
    for name, neutral in _NOT_APPLIED.items():
        if generation_config.get(name) not in (None, neutral):
            logging.getLogger("motet").warning(
                "generation_config asks for %s=%r, which is not applied", name, generation_config[name]
            )
    known = {
        name: generation_config[name]
        for name in GenerationDefaults.model_fields
        if generation_config.get(name) is not None
    }
    try:
        return GenerationDefaults.model_validate(known)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptCheckpoint(
            f"generation_config: {first['loc'][0]}: {first['msg']} (found {first['input']!r})"
        ) from error


def read_eos_token_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end token that either file names, those of generation_config first."""
    ids: dict[int, None] = {}
    for source in (generation_config, config):
        named = source.get("eos_token_id")
        for token_id in named if isinstance(named, list) else [named] if named is not None else []:
            if not isinstance(token_id, int):
                raise CorruptCheckpoint(f"config: eos_token_id is {named!r}; token ids are needed")
            ids[token_id] = None
    return tuple(ids)
