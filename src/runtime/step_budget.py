"""StepBudget: how many tokens a step may have, so that streams that run get their next token in time."""

from __future__ import annotations

from collections.abc import Collection

from motet.runtime.request import Request
from motet.runtime.scheduler_output import SchedulerOutput

MIN_PREFILL = 16
"""Prefill tokens that every step may have, however slow it is: prompts must get on."""

ROOM = 0.85
"""A step that took less than this share of the target leaves room for more."""

MOST_PATIENCE = 256
"""Steps, at most, until a size that was too much is tried again: fewer than one in a hundred is then too slow."""


class StepBudget:
    """The token budget of each next step, learnt from how long steps took. The engine thread owns it.

    A step in which requests decode is the time between two of their tokens. What it may compute for prompts
    besides, its *allowance*, is halved by a step that took longer than `target` seconds and grows by an eighth
    while steps use all of it in less than `ROOM` of that. Was a step too slow just because it grew, that is undone,
    and tried again after twice as many steps as the last time. It takes nothing for granted but that more tokens
    take longer, and always leaves `MIN_PREFILL`. Without a target, or while nobody waits for a next token, a step
    may have `most` tokens.
    """

    def __init__(self, most: int, target: float | None = None) -> None:
        self._most = most
        self._target = target
        self._least = min(MIN_PREFILL, most)
        self._allowance = most
        self._before_growth: int | None = None
        """What it was, until a step has shown that the growth was right."""
        self._num_calm = 0
        """Steps of this allowance that were in time."""
        self._patience = 1
        """How many of them it takes to grow."""
        self._has_just_shrunk = False

    def tokens(self, running: Collection[Request]) -> int:
        """Of the next step: one for each request that decodes, and the allowance.

        Each that is still at its prompt can have one token at least, too, within `most`.
        """
        if self._target is None:
            return self._most
        num_decoding = sum([bool(r.num_output_tokens or r.num_awaited_tokens) for r in running])
        if not num_decoding:
            return self._most
        return min(self._most, num_decoding + max(self._allowance, len(running) - num_decoding))

    def observe(self, plan: SchedulerOutput, seconds: float) -> None:
        """A step was done, and took so long. One more plan may have been made since."""
        if self._target is None:
            return
        num_decoding = sum([chunk.output_index > 0 for chunk in plan.chunks])
        num_prefill = sum([len(chunk.token_ids) for chunk in plan.chunks]) - num_decoding
        if not num_decoding or not num_prefill:
            return
        planned_before = self._has_just_shrunk and num_prefill > self._allowance
        self._has_just_shrunk = False
        if seconds <= self._target:
            if num_prefill >= min(self._allowance, self._most - num_decoding):
                self._grow(has_room=seconds <= ROOM * self._target)
        elif not planned_before:
            self._shrink(num_prefill)

    def _shrink(self, num_prefill: int) -> None:
        if self._before_growth is not None and num_prefill > self._before_growth:
            self._allowance = self._before_growth
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        else:
            self._allowance = max(self._least, self._allowance // 2)
        self._before_growth = None
        self._num_calm = 0
        self._has_just_shrunk = True

    def _grow(self, *, has_room: bool) -> None:
        if self._before_growth is not None:
            self._before_growth = None
            self._patience = 1
        self._num_calm += 1
        if has_room and self._num_calm >= self._patience and self._allowance < self._most:
            self._before_growth = self._allowance
            self._allowance = min(self._most, self._allowance + max(1, self._allowance // 8))
            self._num_calm = 0
