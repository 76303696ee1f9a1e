"""Recorded steps: they say what steps run op by op say, and no family's step computes anything beside ops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from motet.config import EngineConfig
from motet.kernels.cpu.library import usable_isas
from motet.kernels.cpu.ops import CpuOps
from motet.params import SamplingParams
from motet.runtime import recorded_steps
from motet.runtime.build import Runtime, build_runtime
from motet.runtime.recorded_steps import RecordedSteps
from motet.runtime.scheduler_output import Sample
from tests.runtime.models.tiny_models import FAMILIES, make_hf_model, save_folder

needs_library = pytest.mark.skipif(not usable_isas(), reason="no C++ compiler at installation")


class FakeOps:
    def __init__(self, *, records: bool = True) -> None:
        self.recorded: list[list[Tensor]] = []
        self._records = records

    def record(self, step: Any, inputs: Sequence[Tensor]) -> Any:
        self.recorded.append(list(inputs))
        return (lambda inputs: ("replay", *inputs)) if self._records else None


class FakeModel:
    def forward(self, batch: Any, kv_caches: Any) -> str:
        return "forward"


def batch(rows: int, logits: int | None = None, lora: bool = False) -> Any:
    ids = torch.zeros(rows)
    adapters = object() if lora else None
    return SimpleNamespace(
        input_ids=ids,
        logits_rows=torch.zeros(rows if logits is None else logits),
        lora=adapters,
        logits_lora=adapters,
        arrays=lambda ops: [ids],
    )


def test_a_shape_is_recorded_when_it_comes_again_and_replayed_from_then_on() -> None:
    ops = FakeOps()
    steps = RecordedSteps(ops, FakeModel(), ())  # type: ignore[arg-type]
    assert steps(batch(3)) == "forward"
    assert ops.recorded == []
    for _ in range(3):
        again = batch(3)
        assert steps(again)[0] == "replay"
        assert steps(again)[1] is again.input_ids, "another step's arrays are replayed"
    assert len(ops.recorded) == 1


@pytest.mark.parametrize("other", [batch(4), batch(3, lora=True)])
def test_another_shape_is_another_recording(other: Any) -> None:
    ops = FakeOps()
    steps = RecordedSteps(ops, FakeModel(), ())  # type: ignore[arg-type]
    steps(batch(3))
    assert steps(other) == "forward"
    steps(batch(3))
    steps(other)
    assert len(ops.recorded) == 2


def test_steps_with_part_of_a_prompt_are_not_recorded() -> None:
    ops = FakeOps()
    steps = RecordedSteps(ops, FakeModel(), ())  # type: ignore[arg-type]
    assert [steps(batch(3, 2)) for _ in range(3)] == ["forward"] * 3
    assert ops.recorded == []


def test_what_cannot_be_recorded_is_not_tried_again() -> None:
    ops = FakeOps(records=False)
    steps = RecordedSteps(ops, FakeModel(), ())  # type: ignore[arg-type]
    assert [steps(batch(3)) for _ in range(5)] == ["forward"] * 5
    assert len(ops.recorded) == 1


def test_steps_of_many_rows_are_not_recorded() -> None:
    ops = FakeOps()
    steps = RecordedSteps(ops, FakeModel(), ())  # type: ignore[arg-type]
    rows = recorded_steps.MAX_ROWS + 1
    assert [steps(batch(rows)) for _ in range(3)] == ["forward"] * 3


KINDS: dict[str, list[dict[str, Any]]] = {
    "chosen by ops alone": [
        {},
        {"temperature": 1.0, "seed": 7},
        {"logprobs": 2},
        {"top_p": 0.9, "temperature": 0.7},
    ],
    "under rules": [{"logit_bias": {3: 0.1}, "logprobs": 1}, {"min_tokens": 4}],
}


def run(folder: Path, kind: str, **config: Any) -> tuple[list[list[Sample]], Runtime]:
    runtime = build_runtime(
        folder,
        EngineConfig(kv_cache_bytes=4 << 20, max_model_len=256, threads=2, **config),
        lambda request: None,
    )
    samples: dict[int, list[Sample]] = {}
    for i in range(5):  # of lengths that end one after another: five shapes
        params = KINDS[kind][i % len(KINDS[kind])]
        request = runtime.intake.make_request(
            SamplingParams(max_tokens=8 + 4 * i, ignore_eos="min_tokens" not in params, **params),
            tenant="t",
            adapter=None,
            priority=0,
            deadline=None,
        )
        request.set_prompt([3 + (5 * i + j) % 80 for j in range(10 + i)], None)
        runtime.core.scheduler.add(request)
        samples[request.request_id] = []
    while runtime.core.has_work:
        for delta in runtime.core.step():
            assert delta.sample is not None
            samples[delta.request.request_id].append(delta.sample)
    return list(samples.values()), runtime


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family_is_replayed_and_says_the_same(
    family: str, kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(make_hf_model(family), tmp_path)
    started: list[object] = []
    monkeypatch.setattr(
        CpuOps, "start", lambda ops, step, real=CpuOps.start: started.append(step) or real(ops, step)
    )
    replayed, runtime = run(folder, kind, dtype=dtype)
    assert (len(started) > 10) == (kind == "chosen by ops alone"), "those are left to the library"
    replays = runtime.core._runner._steps._replays  # type: ignore[attr-defined]
    assert {shape[0] for shape in replays} >= {1, 2, 3, 4, 5}
    assert None not in replays.values(), "something of the step is no op"
    monkeypatch.setattr(recorded_steps, "MAX_ROWS", 0)
    assert run(folder, kind, dtype=dtype)[0] == replayed
