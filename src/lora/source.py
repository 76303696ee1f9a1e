"""Where an adapter's files may lie."""

from __future__ import annotations

import os
from pathlib import Path

from motet.errors import AdapterLoadError
from motet.lora.adapter import WEIGHTS_NAME
from motet.lora.peft_config import CONFIG_NAME


def folder_of(source: str | os.PathLike[str], root: Path | None) -> Path:
    """The absolute path that `source` is now: relative ones begin at `root`, or else where the process is."""
    return Path(root or "").absolute() / os.fsdecode(source)


def check_inside(folder: Path, root: Path | None) -> None:
    """Raises `AdapterLoadError` if the folder or a file to be read in it lies outside of `root`.

    Be it by `..`, as an absolute path or through a symbolic link. Opens nothing.
    """
    if root is None:
        return
    try:
        real_root = root.resolve()
        for path in (folder, folder / CONFIG_NAME, folder / WEIGHTS_NAME):
            if not path.resolve().is_relative_to(real_root):
                raise AdapterLoadError(
                    f"{path} leads out of EngineConfig.adapter_root = {root}: adapters are loaded from there only"
                )
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null character
        raise AdapterLoadError(f"cannot find the adapter {folder}: {error}") from error
