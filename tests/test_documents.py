"""What the documents say, done: README's code, the examples, the map of the house."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import motet
from motet import errors as motet_errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {
    f"{page.name}:{number}": block
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), 1)
}
WITH_AN_EXAMPLE = {"streaming", "adapters", "tenants", "batch", "metrics", "models"}
EXAMPLES = [*sorted(path.name for path in (ROOT / "examples").glob("*.py")), "own_model_plugin/run.py"]
RUN_BY_HAND = {
    "train_adapters.py": "minutes of training",
    "training_data.py": "only data",
    "web_app.py": "a server: test_web_app.py",
}


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "error"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_two_commands_come_first_in_the_readme():
    first_block = README.index("```sh\n")
    assert README[first_block:].startswith("```sh\nmake demo") and "\nmake test" in README
    assert first_block < README.index("```python")


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_the_code_in_the_documents_runs(block: str):
    assert run("-c", block).strip()


def test_each_page_of_the_guide_has_a_runnable_example():
    pages = [name.partition(".")[0] for name in BLOCKS]
    assert {*pages} >= WITH_AN_EXAMPLE
    assert pages.count("README") == 3


def test_the_reference_has_every_public_name_and_the_site_every_page():
    reference = (ROOT / "docs" / "reference.md").read_text()
    shown = set(re.findall(r"^::: motet\.(\w+)$", reference, re.MULTILINE))
    errors = {name for name in motet.__all__ if hasattr(motet_errors, name)}
    assert shown - {"errors"} == set(motet.__all__) - errors
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert set(re.findall(r"[\w-]+\.md", nav)) == {page.name for page in PAGES} - {"README.md"}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in RUN_BY_HAND])
def test_the_examples_run(name: str):
    assert run(f"examples/{name}").strip()


def test_links_in_the_documents_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_map_of_the_house_names_every_room_and_no_other():
    rooms = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    named = set(re.findall(r"[\w/]+\.py", rooms))
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py")]
    present = {path.name for path in files if path.name != "__init__.py" and "models" not in path.parts}
    assert {Path(name).name for name in named} - {"__init__.py"} == present
