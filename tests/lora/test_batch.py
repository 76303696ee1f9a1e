from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_factories import SITES, make_arena, make_weights

from motet.kernels.ops import select_ops
from motet.lora.batch import LoRABatch

OPS = select_ops("cpu", "float32")


@settings(max_examples=200, deadline=None)
@given(row_slot=st.lists(st.integers(-1, 3), max_size=30))
def test_segments_are_the_longest_runs_of_one_adapter_and_leave_base_rows_out(row_slot: list[int]) -> None:
    arena = make_arena()
    for rank in range(1, 5):
        arena.place(arena.pack(make_weights({"q": rank})))
    batch = LoRABatch(OPS, arena, row_slot)
    assert batch.segments.dtype == np.int64
    assert batch.segments.shape[1:] == (3,)
    segments = batch.segments.tolist()
    rows = [-1] * len(row_slot)
    for slot, first, last in segments:
        assert first < last
        rows[first:last] = [slot] * (last - first)
    assert rows == row_slot == batch.row_slot.tolist()
    assert all(a[2] < b[1] or a[0] != b[0] for a, b in itertools.pairwise(segments))
    of_rows = batch.of_rows(np.arange(len(row_slot))[::2])
    assert of_rows.row_slot.tolist() == row_slot[::2]


def test_base_rows_and_rows_whose_adapter_skips_the_linear_are_left_as_they_are() -> None:
    arena = make_arena()
    q_only, o_only = (arena.place(arena.pack(make_weights({m: 2}))) for m in ("q", "o"))
    for site, rows in ((SITES[0], [1, 4]), (SITES[1], [2])):
        out = torch.full((5, sum(site.out_features)), float("nan"))
        out[rows] = 0
        x = torch.full((5, site.in_features), float("nan"))
        x[rows] = 1
        LoRABatch(OPS, arena, [-1, q_only, o_only, -1, q_only]).add_delta(site, x, out)
        changed = out.isfinite()
        assert changed[rows].all()
        assert changed.sum() == len(rows) * out.shape[1]


def test_a_batch_of_base_rows_alone_changes_nothing() -> None:
    arena = make_arena()
    arena.place(arena.pack(make_weights({"q": 2})))
    out = torch.zeros(2, 8)
    LoRABatch(OPS, arena, [-1, -1]).add_delta(SITES[0], torch.zeros(2, 3), out)
    assert not out.any()
