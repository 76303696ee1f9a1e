"""A token bucket, by a virtual clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.runtime.token_bucket import TokenBucket
from strategies import FEW


def test_it_is_full_at_first_and_fills_no_further():
    bucket = TokenBucket(10.0, 50, now=100.0)
    assert bucket.level(100.0) == bucket.level(1000.0) == 50
    bucket.take(20, 100.0)
    assert [bucket.level(t) for t in (100.0, 101.0, 102.0, 200.0)] == [30, 40, 50, 50]


def test_it_says_when_there_will_be_enough():
    bucket = TokenBucket(10.0, 50, now=0.0)
    bucket.take(50, 0.0)
    assert (bucket.due(10), bucket.due(50)) == (1.0, 5.0)
    assert bucket.due(10, behind=20) == 3.0
    assert bucket.due(1000) == 5.0, "more than it ever holds goes when it is full"


def test_it_may_owe_and_whoever_comes_next_waits():
    bucket = TokenBucket(10.0, 50, now=0.0)
    bucket.take(80, 0.0)
    assert bucket.level(0.0) == -30
    assert bucket.due(1) == pytest.approx(3.1)


def test_what_is_given_back_is_there_again_but_never_more_than_it_holds():
    bucket = TokenBucket(10.0, 50, now=0.0)
    bucket.take(50, 0.0)
    bucket.give_back(50)
    assert bucket.level(0.0) == 50
    bucket.take(10, 100.0)
    bucket.give_back(10)
    bucket.give_back(0)
    assert bucket.level(100.0) == 50


def test_other_limits_forgive_nothing():
    bucket = TokenBucket(10.0, 50, now=0.0)
    bucket.take(70, 0.0)
    bucket.change(100.0, 60, 1.0)
    assert bucket.level(1.0) == pytest.approx(0), "60 used and not refilled yet"
    bucket.change(1.0, 10, 1.0)
    assert bucket.level(1.0) == pytest.approx(-50)


@settings(FEW, max_examples=100)
@given(
    rate=st.floats(0.1, 1e6),
    burst=st.integers(1, 10_000),
    wishes=st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(1, 20_000)), max_size=30),
)
def test_whoever_takes_when_due_never_gets_more_than_rate_and_burst(
    rate: float, burst: int, wishes: list[tuple[float, int]]
):
    bucket, now = TokenBucket(rate, burst, 0.0), 0.0
    used = 0
    for pause, num_tokens in wishes:
        now += pause
        due = bucket.due(num_tokens)
        assert (due <= now) == (bucket.due(num_tokens) <= now), "asking changes nothing"
        now = max(now, due)
        assert used <= (burst + rate * now - min(num_tokens, burst)) * (1 + 1e-9) + 1e-6
        bucket.take(num_tokens, now)
        used += num_tokens
