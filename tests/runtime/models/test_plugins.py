"""Models of others: registered by an application, or brought by an installed package."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import float32_ops, make_hf_model, save_folder

from motet import ModelError, UnsupportedModel, register_model
from motet.runtime.models import plugins
from motet.runtime.models.decoder import Decoder
from motet.runtime.models.loader import load_model
from motet.runtime.models.registry import MODELS, find_model_class

PLUGIN_PACKAGE = Path(__file__).parents[2] / "plugin_package"


class Mine(Decoder):
    """Satisfies `CausalLM`."""


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in package on the path, with the metadata that an installation writes."""
    monkeypatch.syspath_prepend(PLUGIN_PACKAGE)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts packages on the path that consist of nothing but entry points."""

    def install(**packages: str) -> None:
        for package, entry in packages.items():
            info = tmp_path / f"{package}-2.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.0\n")
            (info / "entry_points.txt").write_text(f"[motet.models]\n{entry}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def found(architecture: str) -> type:
    return find_model_class({"architectures": [architecture]})


def test_a_registered_class_runs_its_architecture_and_no_other() -> None:
    register_model("MineForCausalLM", Mine)
    assert found("MineForCausalLM") is Mine
    assert found("LlamaForCausalLM") is MODELS["LlamaForCausalLM"]


def test_registering_the_same_pair_again_changes_nothing() -> None:
    register_model("MineForCausalLM", Mine)
    register_model("MineForCausalLM", Mine)
    assert found("MineForCausalLM") is Mine


def test_a_name_that_is_taken_is_refused_with_its_owner(installed: None) -> None:
    class Other(Decoder): ...

    register_model("MineForCausalLM", Mine)
    with pytest.raises(ModelError, match=r"MineForCausalLM has a class already, of test_plugins\.Mine"):
        register_model("MineForCausalLM", Other)
    with pytest.raises(ModelError, match="LlamaForCausalLM has a class already, of motet itself"):
        register_model("LlamaForCausalLM", Mine)
    with pytest.raises(ModelError, match=r"'own_models:Own' of the package own-models 1\.0"):
        register_model("OwnForCausalLM", Mine)
    assert found("MineForCausalLM") is Mine


def without(name: str) -> type:
    """A class that lacks a method of `CausalLM`."""
    return type("Lacking", (), {n: m for n, m in {**vars(Decoder)}.items() if n != name and n[0] != "_"})


@pytest.mark.parametrize(
    ("architecture", "cls", "words"),
    [
        ("", Mine, "'LlamaForCausalLM' say"),
        (7, Mine, "'LlamaForCausalLM' say"),
        ("MineForCausalLM", Mine.__new__(Mine), "no class"),
        ("MineForCausalLM", int, r"lacks the method from_config\(config"),
        ("MineForCausalLM", without("kv_spec"), r"lacks the method kv_spec\(self\)"),
        ("MineForCausalLM", without("forward"), r"lacks the method forward\(self, batch"),
        (
            "MineForCausalLM",
            type("Narrow", (Decoder,), {"forward": lambda self, batch: batch}),
            "forward that cannot be called",
        ),
    ],
)
def test_what_is_no_causal_lm_is_refused_with_what_it_lacks(architecture: Any, cls: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        register_model(architecture, cls)


def test_of_threads_that_register_one_name_at_once_one_wins() -> None:
    classes = [type(f"Class{i}", (Decoder,), {}) for i in range(16)]
    begin, refused = threading.Barrier(len(classes)), []

    def register(cls: type) -> None:
        begin.wait()
        try:
            register_model("MineForCausalLM", cls)
        except ModelError:
            refused.append(cls)

    threads = [threading.Thread(target=register, args=(cls,)) for cls in classes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {found("MineForCausalLM"), *refused} == set(classes) and len(refused) == 15


def test_a_plug_in_is_found_by_its_entry_point(installed: None) -> None:
    assert found("OwnForCausalLM").__module__ == "own_models"


def test_a_broken_plug_in_hurts_only_its_own_architecture_and_is_named(installed: None) -> None:
    assert found("LlamaForCausalLM") is MODELS["LlamaForCausalLM"]
    assert found("OwnForCausalLM").__module__ == "own_models"
    for architecture, words in {
        "BrokenForCausalLM": r"own_broken_models:Broken.*own-models 1\.0.*RuntimeError: this plug-in was made for",
        "AbsentForCausalLM": r"own_models:Absent.*own-models 1\.0.*AttributeError",
        "NoClassForCausalLM": r"own_models:OWN.*own-models 1\.0 is no class but 'no class'",
    }.items():
        with pytest.raises(ModelError, match=words):
            found(architecture)


def test_two_plug_ins_for_one_architecture_are_both_named(install: Callable[..., None]) -> None:
    install(first="XForCausalLM = a:X", second="XForCausalLM = b:X")
    with pytest.raises(
        ModelError, match=r"XForCausalLM is claimed by.*'a:X'.*first 2\.0.*'b:X'.*second 2\.0"
    ):
        found("XForCausalLM")


def test_a_plug_in_for_an_architecture_of_motet_is_not_silently_ignored(
    install: Callable[..., None],
) -> None:
    install(usurper="LlamaForCausalLM = a:X")
    with pytest.raises(ModelError, match=r"usurper 2\.0; motet runs it with .*Decoder"):
        found("LlamaForCausalLM")
    assert found("Qwen2ForCausalLM") is MODELS["Qwen2ForCausalLM"]


def test_an_unknown_architecture_is_refused_with_the_plug_ins_among_what_is_supported(
    installed: None,
) -> None:
    register_model("MineForCausalLM", Mine)
    with pytest.raises(UnsupportedModel, match=r"supported are .*LlamaForCausalLM, Mine.*OwnForCausalLM"):
        found("NobodysForCausalLM")


def test_a_model_without_an_attribute_of_causal_lm_is_refused_by_name(tmp_path: Path) -> None:
    class Forgetful(Decoder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            del self.max_model_len

    register_model("MineForCausalLM", Forgetful)
    folder = save_folder(make_hf_model(), tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MineForCausalLM"))
    with pytest.raises(ModelError, match="Forgetful lacks max_model_len"):
        load_model(folder, float32_ops())
