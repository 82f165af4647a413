"""Jobs that nobody waits for yield to whoever computes."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.workers import LONGEST_REST_SECONDS, Workers, Yielding

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_SECONDS = 30.0
LEAST_SHARE = 1e-9  # every rest is as long as may be


class Job:
    """Notes when it ran."""

    def __init__(self, name: str, ran: list[str]) -> None:
        self._name = name
        self._ran = ran
        self.done = threading.Event()

    def __call__(self) -> None:
        self._ran.append(self._name)
        self.done.set()

    def wait(self) -> None:
        assert self.done.wait(WAIT_SECONDS)


@contextmanager
def workers(share: float, *, busy: bool = True) -> Iterator[Workers]:
    made = Workers("test", 1, Yielding(share, lambda: busy))
    try:
        yield made
    finally:
        made.close()
        assert made.join(WAIT_SECONDS)


@pytest.fixture
def ran() -> list[str]:
    return []


def test_a_job_that_yields_is_followed_by_a_rest_in_proportion_and_of_bounded_length() -> None:
    assert Yielding(0.25, lambda: True).rest_seconds(0.01) == pytest.approx(0.03)
    assert Yielding(0.25, lambda: True).rest_seconds(10.0) == LONGEST_REST_SECONDS
    assert Yielding(0.25, lambda: False).rest_seconds(0.01) == 0.0
    assert Yielding(1.0, lambda: True).rest_seconds(0.01) == 0.0


def test_an_urgent_job_does_not_wait_for_a_rest(ran: list[str]) -> None:
    first, yielding, urgent = (Job(name, ran) for name in ("first", "yielding", "urgent"))
    with workers(LEAST_SHARE) as it:
        it.submit(first, urgent=False)
        first.wait()
        it.submit(yielding, urgent=False)
        it.submit(urgent, urgent=True)
        urgent.wait()
        yielding.wait()
    assert ran == ["first", "urgent", "yielding"]


def test_a_job_that_somebody_waits_for_after_all_goes_before_those_that_yield(ran: list[str]) -> None:
    first, second, third = (Job(name, ran) for name in ("first", "second", "third"))
    with workers(LEAST_SHARE) as it:
        it.submit(first, urgent=False)
        first.wait()
        it.submit(second, urgent=False)
        it.submit(third, urgent=False)
        it.hurry(third)
        it.hurry(third)
        it.hurry(first)
        third.wait()
        second.wait()
    assert ran == ["first", "third", "second"]


def test_a_hurried_job_can_be_taken_back_and_one_that_rests_too(ran: list[str]) -> None:
    first, second, third = (Job(name, ran) for name in ("first", "second", "third"))
    with workers(LEAST_SHARE) as it:
        it.submit(first, urgent=False)
        first.wait()
        it.submit(second, urgent=False)
        assert it.withdraw(second)
        it.submit(third, urgent=False)
    assert ran == ["first", "third"], "closing waits for no rest"


def test_nothing_rests_while_nobody_computes(ran: list[str]) -> None:
    jobs = [Job(str(number), ran) for number in range(200)]
    with workers(LEAST_SHARE, busy=False) as it:
        for job in jobs:
            it.submit(job, urgent=False)
        for job in jobs:
            assert job.done.wait(200 * LONGEST_REST_SECONDS / 4), "it rested"
    assert len(ran) == 200
