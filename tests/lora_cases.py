"""Adapters of any ranks in an arena that is NaN everywhere else, and what they add to a linear, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from motet.kernels.ops import LoRAPlan, LoRASlices, Ops

NAN = float("nan")
Segments = list[tuple[int, int, int]]


@dataclass
class LoRACase:
    """A linear of P projections, the second of a model's three sites, and some adapters; their other sites: rubbish."""

    arena: Tensor
    table: Tensor  # [slots, P + 3, 5]
    slices: LoRASlices
    dense: list[Tensor]  # per slot: [N, K] float64, B · A of its projections one below the other
    scale: Tensor  # [slots, N] float64
    shift: Tensor  # [slots, N] float64

    def plan(self, ops: Ops, segments: Segments) -> LoRAPlan:
        acts = torch.tensor([False, True, False])
        return ops.plan_lora(self.arena, self.table, acts, torch.tensor(segments).long().view(-1, 3))

    def expected(self, x: Tensor, segments: Segments, out: Tensor) -> Tensor:
        """x [T, K], out [T, N] before -> [T, N] float64 after."""
        y = out.double()
        for slot, first, last in segments:
            delta = torch.einsum("tk,nk->tn", x[first:last].double(), self.dense[slot])
            y[first:last] = y[first:last] * self.scale[slot] + self.shift[slot] + delta
        return y


def lora_case(
    ranks: list[list[int]],
    in_features: int,
    outs: list[int],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    extras: bool = False,
) -> LoRACase:
    """`ranks[slot][projection]`. extras: some projections have a scale or a shift, too."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    bounds = [0, *accumulate(outs)]
    slots, before, behind = len(ranks), 2, 1
    table = torch.full((slots, before + len(outs) + behind, 5), 1 << 60)
    chunks: list[Tensor] = []
    end = 0

    def put(tensor: Tensor) -> int:
        nonlocal end
        hole = torch.full((rng.randint(0, 9),), NAN)
        chunks.extend((hole.to(dtype), tensor.flatten()))
        end += len(hole) + tensor.numel()
        return end - tensor.numel()

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    dense = []
    scale, shift = torch.ones(slots, bounds[-1]).double(), torch.zeros(slots, bounds[-1]).double()
    for s in range(slots):
        products = []
        for p, (rank, n) in enumerate(zip(ranks[s], outs, strict=True)):
            a, b = some(rank, in_features), some(rank, n)
            products.append(torch.einsum("rn,rk->nk", b.double(), a.double()))
            entry = [put(a), put(b), rank, -1, -1]
            for i, extra in enumerate((scale, shift), 3):
                if extras and rng.random() < 0.5:
                    values = some(n)
                    extra[s, bounds[p] : bounds[p + 1]] = values.double()
                    entry[i] = put(values)
            table[s, before + p] = torch.tensor(entry)
        dense.append(torch.cat(products))
    arena = torch.cat([*chunks, torch.full((3,), NAN, dtype=dtype)])
    slices = LoRASlices(1, before, in_features, torch.tensor(bounds))
    return LoRACase(arena, table, slices, dense, scale, shift)


def check_lora(case: LoRACase, segments: Segments, num_rows: int, ops: Ops, tolerance: float) -> None:
    """`add_lora` gives the segments' rows what their adapters make of them and touches no other."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, case.slices.in_features, generator=generator).to(ops.activations)
    before = torch.randn(num_rows, int(case.slices.bounds[-1]), generator=generator).to(ops.activations)
    adapted = torch.zeros(num_rows, dtype=torch.bool)
    for _, first, last in segments:
        adapted[first:last] = True
    expected = case.expected(x, segments, before)
    x[~adapted] = NAN  # base rows cost nothing: nobody reads them
    before[~adapted] = NAN

    out = before.clone()
    ops.add_lora(x, case.slices, case.plan(ops, segments), out)

    assert out[~adapted].isnan().all()
    size = torch.maximum(expected.abs(), before.double().abs()).amax(1, keepdim=True)
    assert ((out.double() - expected).abs() <= tolerance * size)[adapted].all()
