"""A model's files from the Hugging Face hub, into huggingface-hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from motet.errors import ModelNotFound

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",
)
"""What motet reads of a repository: not the same weights again in other formats."""


def is_hub_id(name: object) -> bool:
    """Whether it is written as the hub's ids are, "owner/name"."""
    return (
        isinstance(name, str)
        and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII) is not None
        and not name.endswith(".gguf")
    )


def download_model(hub_id: str) -> Path:
    """The folder with the newest files of a hub id, fetching those that are not in the cache.

    Without a network, and under `HF_HUB_OFFLINE`, it is what the cache has. Raises `ModelNotFound`.
    """
    from huggingface_hub import snapshot_download  # 0.3 s, for hub ids alone

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(FILES), library_name="motet"))
    except Exception as error:  # the hub's errors and those of its transport share no base
        raise ModelNotFound(
            f"there is no folder {hub_id!r} here, and no model of that id could be had from the hub "
            f"({type(error).__name__}: {error}). Look at the spelling; log in (`hf auth login`) if the model is "
            f"private or gated; where there is no network, fetch it first (`hf download {hub_id}`) or copy its folder"
        ) from error
