"""Hub ids, without a network: huggingface-hub's own cache and a stand-in for its download."""

from __future__ import annotations

import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from tiny_models import float32_ops, make_hf_model, save_folder

from motet.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from motet.runtime.models.hub import is_hub_id
from motet.runtime.models.loader import find_model, load_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of huggingface-hub's, in a process that HF_HUB_OFFLINE keeps from the network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def save_snapshot(cache: Path, hub_id: str) -> Path:
    """A model in the cache, laid out as huggingface-hub does: blobs, links in a snapshot, a named revision."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(save_folder(make_hf_model(), cache / "made").iterdir())):
        shutil.move(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(repository / "blobs" / str(number))
    return snapshot


def test_offline_a_hub_id_is_loaded_from_the_cache(cache: Path, tmp_path: Path) -> None:
    snapshot = save_snapshot(cache, "acme/tiny")
    assert find_model("acme/tiny") == snapshot
    expected = load_model(save_folder(make_hf_model(), tmp_path / "plain"), float32_ops())
    assert load_model("acme/tiny", float32_ops()).digest == expected.digest


def test_a_snapshot_that_was_fetched_in_part_is_named_with_what_it_lacks(cache: Path) -> None:
    (save_snapshot(cache, "acme/tiny") / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"models--acme--tiny.*neither model\.safetensors nor"):
        load_model("acme/tiny", float32_ops())


def test_offline_and_not_in_the_cache_the_message_says_what_to_do(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no folder 'acme/other' here.*`hf download acme/other`"):
        load_model("acme/other", float32_ops())


def test_a_path_that_exists_goes_before_the_hub(cache: Path, tmp_path: Path) -> None:
    save_snapshot(cache, "acme/tiny")
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert find_model("acme/tiny") == Path("acme/tiny")


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("bad id"), RuntimeError("transport")])
def test_whatever_the_hub_raises_is_a_model_not_found(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFound, match=f"{error}.*spelling.*hf auth login") as raised:
        find_model("acme/tiny")
    assert raised.value.__cause__ is error


def test_only_the_files_that_are_read_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_model("acme/tiny") == tmp_path
    assert asked["repo_id"] == "acme/tiny"

    def fetched(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in asked["allow_patterns"])

    wanted = ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json"]
    wanted += ["model.safetensors", "model-00001-of-00002.safetensors", "tokenizer_config.json"]
    wanted += ["chat_template.jinja", "additional_chat_templates/rag.jinja"]
    others = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/model.pth",
        "model.onnx",
        "README.md",
    ]
    assert [name for name in wanted + others if fetched(name)] == wanted


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["README.md", "config.json", "tiny-Q4_0.gguf", "tiny-Q8_0.gguf"],
            r"'acme/tiny' on the hub has no safetensors, but GGUF files \(tiny-Q4_0\.gguf, tiny-Q8_0\.gguf\)"
            r".*`hf download acme/tiny FILE\.gguf`, and pass the path that this prints instead of the id$",
        ),
        (
            [f"BF16/tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)],
            r"BF16/tiny-00001-of-00003\.gguf, .*must be merged first, by llama-gguf-split$",
        ),
        ([f"{i:02}.gguf" for i in range(30)], r"08\.gguf, 09\.gguf and 20 more\)"),
    ],
    ids=["whole", "split", "many"],
)
def test_a_repository_of_gguf_files_is_refused_with_their_names_and_what_to_do(
    names: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        for name in names:
            if any(fnmatch(name, pattern) for pattern in options["allow_patterns"]):
                (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo_id: names)
    with pytest.raises(UnsupportedModel, match=message):
        find_model("acme/tiny")


def test_offline_a_cached_gguf_file_is_named(cache: Path) -> None:
    snapshot = save_snapshot(cache, "acme/tiny")
    for file in snapshot.iterdir():
        file.unlink()
    (snapshot / "tiny-Q8_0.gguf").touch()
    with pytest.raises(UnsupportedModel, match=r"GGUF files \(tiny-Q8_0\.gguf\)"):
        find_model("acme/tiny")


@pytest.mark.parametrize("name", ["acme/tiny", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b_c.d-e"])
def test_what_is_written_as_owner_and_name_is_a_hub_id(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name",
    ["tiny", "./tiny", "../tiny", "/models/tiny", "a/b/c", "~/tiny", "models/tiny.gguf", "a b/c", 7, None],
)
def test_what_can_only_be_a_path_is_none(name: object) -> None:
    assert not is_hub_id(name)


def test_huggingface_hub_is_loaded_for_hub_ids_alone() -> None:
    code = (
        "import sys; from motet.runtime.models.loader import find_model; before = 'huggingface_hub' in sys.modules\n"
        "find_model('.'); print(before, 'huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
