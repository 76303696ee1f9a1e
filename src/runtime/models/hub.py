"""A model's files from the Hugging Face hub, into huggingface-hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from motet.errors import ModelNotFound, UnsupportedModel

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

MOST_NAMES = 10
"""Of files that one message lists."""


def is_hub_id(name: object) -> bool:
    """Whether it is written as the hub's ids are, "owner/name"."""
    return (
        isinstance(name, str)
        and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII) is not None
        and not name.endswith(".gguf")
    )


def download_model(hub_id: str) -> Path:
    """The folder with the newest files of a hub id, fetching those that are not in the cache.

    Without a network, and under `HF_HUB_OFFLINE`, it is what the cache has. Raises `ModelNotFound`, and
    `UnsupportedModel` for a repository of GGUF files: which of them is meant, an id does not say.
    """
    from huggingface_hub import snapshot_download  # 0.3 s, for hub ids alone

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(FILES), library_name="motet"))
    except Exception as error:  # the hub's errors and those of its transport share no base
        raise ModelNotFound(
            f"there is no folder {hub_id!r} here, and no model of that id could be had from the hub "
            f"({type(error).__name__}: {error}). Look at the spelling; log in (`hf auth login`) if the model is "
            f"private or gated; where there is no network, fetch it first (`hf download {hub_id}`) or copy its folder"
        ) from error
    if not any(folder.glob("*.safetensors")) and (found := _gguf_files(hub_id, folder)):
        _explain_gguf(hub_id, found)
    return folder


def _gguf_files(hub_id: str, folder: Path) -> list[str]:
    """Those of the repository, or of what the cache has of it if the hub cannot be asked."""
    from huggingface_hub import list_repo_files

    try:
        names = list_repo_files(hub_id)
    except Exception:  # as above; and it has just been asked, so that no mistake of the caller's is hidden
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    return sorted(name for name in names if name.endswith(".gguf"))


def _explain_gguf(hub_id: str, found: list[str]) -> NoReturn:
    shown = ", ".join(found[:MOST_NAMES]) + (
        f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    )
    split = any(re.search(r"-\d{5}-of-\d{5}\.gguf$", name) for name in found)
    raise UnsupportedModel(
        f"{hub_id!r} on the hub has no safetensors, but GGUF files ({shown}). Fetch the one that you want, "
        f"`hf download {hub_id} FILE.gguf`, and pass the path that this prints instead of the id"
        + (
            "; a model split into files -00001-of-... must be merged first, by llama-gguf-split"
            if split
            else ""
        )
    )
