"""Hypothesis strategies and settings that more than one test file uses."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

FEW = settings(max_examples=200, stateful_step_count=30, deadline=None)
"""For `make test`."""

MANY = settings(max_examples=5000, stateful_step_count=80, deadline=None)
"""For tests marked slow."""


def prompts(max_size: int) -> st.SearchStrategy[list[int]]:
    """Prompts of 1 to `max_size` tokens out of 0, 1 and 2, which often begin alike and repeat themselves."""
    start = st.integers(0, max_size).map(lambda length: [1] * length)
    tail = st.lists(st.integers(0, 2), max_size=4)
    return st.builds(lambda a, b: (a + b)[:max_size], start, tail).filter(bool)
