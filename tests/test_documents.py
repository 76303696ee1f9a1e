"""What the documents say, done: README's code, the examples, the map of the house."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = [*sorted(path.name for path in (ROOT / "examples").glob("*.py")), "own_model_plugin/run.py"]
RUN_BY_HAND = {
    "demo.py": "`make demo`",
    "train_adapters.py": "minutes of training",
    "training_data.py": "only data",
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


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_in_the_readme_runs(number: int):
    assert len(BLOCKS) == 2
    assert run("-c", BLOCKS[number]).strip()


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in RUN_BY_HAND])
def test_the_examples_run(name: str):
    assert run(f"examples/{name}").strip()


def test_links_in_the_documents_lead_somewhere():
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (ROOT / target).exists(), f"{document.name}: {target}"


def test_the_map_of_the_house_names_every_room_and_no_other():
    rooms = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    named = set(re.findall(r"[\w/]+\.py", rooms))
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py")]
    present = {path.name for path in files if path.name != "__init__.py" and "models" not in path.parts}
    assert {Path(name).name for name in named} - {"__init__.py"} == present
