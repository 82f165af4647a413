"""Rates: what is there, what is left, and how long until there is more."""

from __future__ import annotations

import pytest

from app.budgets import Bucket, Budget, Spent, spelled


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_a_minutes_worth_at_once_and_then_at_its_rate() -> None:
    clock = Clock()
    budget = Budget(requests_per_minute=3, clock=clock)
    assert [budget.begin() for _ in range(3)] == [None, None, None]
    assert budget.begin() == Spent("requests", 3, 20.0)
    clock.now += 19.999
    assert budget.begin() is not None
    clock.now += 0.001
    assert budget.begin() is None
    assert budget.begin() == Spent("requests", 3, 20.0)
    clock.now += 3600
    assert [budget.begin() is None for _ in range(4)] == [True, True, True, False]


def test_tokens_used_beyond_what_was_there_are_waited_for() -> None:
    clock = Clock()
    budget = Budget(tokens_per_minute=60, clock=clock)
    assert budget.begin() is None
    budget.tokens.take(90)
    assert budget.begin() == Spent("tokens", 60, 31.0)
    clock.now += 31
    assert budget.begin() is None


def test_a_refused_request_uses_nothing() -> None:
    clock = Clock()
    budget = Budget(requests_per_minute=2, tokens_per_minute=60, clock=clock)
    budget.tokens.take(60)
    assert [budget.begin() for _ in range(5)] == [Spent("tokens", 60, 1.0)] * 5
    assert budget.requests.level == 2


def test_without_a_limit_nothing_is_ever_spent() -> None:
    budget = Budget(clock=Clock())
    budget.tokens.take(10**9)
    assert [budget.begin() for _ in range(1000)] == [None] * 1000
    assert dict(budget.headers()) == {}


def test_headers_are_openais() -> None:
    clock = Clock()
    budget = Budget(requests_per_minute=60, tokens_per_minute=6000, clock=clock)
    budget.begin()
    budget.tokens.take(9000)
    assert dict(budget.headers()) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0204, "20ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (60, "1m0s"), (361.25, "6m1.25s")],
)
def test_durations_are_spelled_as_openai_does(seconds: float, text: str) -> None:
    assert spelled(seconds) == text


def test_a_bucket_that_is_full_does_not_overflow() -> None:
    clock = Clock()
    bucket = Bucket(10, clock)
    clock.now += 1000
    assert bucket.level == 10
