"""The house stands: no file imports from a floor above its own, bookkeeping knows no torch, no file is too long."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"
FILES = {path.relative_to(SRC).as_posix(): path for path in sorted(SRC.rglob("*.py"))}

FLOORS = {
    "errors": 0,
    "frozen": 0,
    "garbage": 0,
    "config": 0,
    "params": 0,
    "kernels": 1,
    "lora": 2,
    "runtime": 3,
    "models": 3,
    "sdk": 4,
    "cli": 5,
}
"""Of what lies directly in `motet`. Its public names are for the top floor alone, which knows nothing else."""

LOWEST_FLOOR = {
    "torch": 1,
    "triton": 1,
    "safetensors": 2,
    "tokenizers": 3,
    "huggingface_hub": 3,
    "asyncio": 4,
    "anyio": 4,
    "trio": 4,
    "sniffio": 4,
    "prometheus_client": 4,
    "opentelemetry": 4,
    "http": 5,
    "fastapi": 5,
    "starlette": 5,
    "uvicorn": 5,
}
"""Where other packages may first be known."""

BOOKKEEPING = [
    "lora/extents.py",
    "lora/generation.py",
    "lora/pool.py",
    "lora/refusals.py",
    "lora/source.py",
    "lora/tiers.py",
    "runtime/admission.py",
    "runtime/block_hash.py",
    "runtime/block_pool.py",
    "runtime/engine_core.py",
    "runtime/intake.py",
    "runtime/kv_cache_manager.py",
    "runtime/meter.py",
    "runtime/places.py",
    "runtime/policy.py",
    "runtime/request.py",
    "runtime/scheduler.py",
    "runtime/scheduler_output.py",
    "runtime/statistics.py",
    "runtime/step_budget.py",
    "runtime/tenants.py",
    "runtime/token_bucket.py",
]

MAX_LINES = 400


def module_of(name: str) -> str:
    return ".".join(["motet", *Path(name).with_suffix("").parts]).removesuffix(".__init__")


def imports_of(name: str, source: str) -> Iterator[tuple[str, bool]]:
    """(module that is imported, whether only for type checkers), with `from package import module` spelled out."""
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = module_of(name).split(".") if name.endswith("__init__.py") else module_of(name).split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in for_types
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(parts + ([node.module] if node.module else []))
            for alias in node.names:
                is_room = base == "motet" and alias.name in FLOORS
                yield (f"motet.{alias.name}" if is_room else base), id(node) in for_types


def floor_of(module: str) -> int:
    if module == "motet":
        return FLOORS["cli"]
    room = module.split(".")[1]
    assert room in FLOORS, f"{module} stands on no floor: docs/architecture.md and FLOORS must say which"
    return FLOORS[room]


def breaches(name: str, source: str) -> list[str]:
    """What a file imports although it may not."""
    if name == "__init__.py":
        return []  # the public face: loads names from every floor
    floor = floor_of(module_of(name))
    found = []
    for module, for_types in imports_of(name, source):
        top = module.split(".")[0]
        if top == "motet":
            above = floor_of(module) > floor
            beside_the_face = floor == FLOORS["cli"] and floor_of(module) < floor
            allowed = not (above or beside_the_face)
        elif floor == 0:
            allowed = top in ("pydantic", "pydantic_core") or (
                top in sys.stdlib_module_names and top not in LOWEST_FLOOR
            )
        elif name in BOOKKEEPING and top == "torch":
            allowed = for_types
        else:
            allowed = floor >= LOWEST_FLOOR.get(top, 0)
        if not allowed:
            found.append(module)
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_from_its_own_floor_and_those_below(name: str) -> None:
    assert breaches(name, FILES[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "source", "breach"),
    [
        ("errors.py", "import torch", "torch"),
        ("params.py", "import numpy", "numpy"),
        ("config.py", "import asyncio", "asyncio"),
        ("config.py", "from motet.kernels.ops import Ops", "motet.kernels.ops"),
        ("kernels/ops.py", "import motet.lora.arena", "motet.lora.arena"),
        ("kernels/ops.py", "from motet import lora", "motet.lora"),
        ("kernels/ops.py", "import safetensors.torch", "safetensors.torch"),
        ("lora/pool.py", "from ..runtime.request import Request", "motet.runtime.request"),
        ("lora/pool.py", "def f():\n    import torch", "torch"),
        ("runtime/scheduler.py", "from torch import Tensor", "torch"),
        ("runtime/scheduler.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "torch"),
        ("runtime/build.py", "from motet import AsyncEngine", "motet"),
        ("runtime/models/base.py", "if TYPE_CHECKING:\n    from motet.sdk import engine", "motet.sdk"),
        ("runtime/engine_thread.py", "import anyio.from_thread", "anyio.from_thread"),
        ("sdk/engine.py", "from motet.cli import main", "motet.cli"),
        ("sdk/engine.py", "from http.server import HTTPServer", "http.server"),
        ("cli/chat.py", "from motet.runtime.build import build_runtime", "motet.runtime.build"),
    ],
)
def test_the_guard_sees_a_breach(name: str, source: str, breach: str) -> None:
    assert breaches(name, source) == [breach]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("params.py", "import re\nfrom pydantic import BaseModel"),
        ("kernels/ops.py", "import torch\nfrom motet import errors"),
        ("runtime/scheduler.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("runtime/models/base.py", "from ..request import Request\nfrom . import registry"),
        ("sdk/engine.py", "import anyio\nfrom motet.runtime.build import build_runtime"),
        ("cli/chat.py", "import asyncio\nfrom motet import AsyncEngine\nfrom motet.cli import show"),
    ],
)
def test_the_guard_lets_the_rest_pass(name: str, source: str) -> None:
    assert breaches(name, source) == []


@pytest.mark.parametrize("name", ["errors.py", "config.py", "params.py", *BOOKKEEPING])
def test_bookkeeping_and_the_ground_floor_load_where_there_is_no_torch(name: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module_of(name)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FILES)
def test_no_file_has_outgrown_its_room(name: str) -> None:
    assert len(FILES[name].read_text(encoding="utf-8").splitlines()) <= MAX_LINES
