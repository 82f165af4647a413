"""Named threads for work that blocks, so that neither the event loop nor the engine waits for a copy or a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

Job = Callable[[], None]

LONGEST_REST_SECONDS = 0.1
"""After a job that took long, perhaps because its thread had to wait: deadlines are seconds."""


@dataclass(frozen=True, slots=True)
class Yielding:
    """How jobs that are not urgent leave others their cores and their memory's bandwidth.

    While `is_busy`, asked on a worker thread, they take at most `share` of the time: each is followed by a rest.
    """

    share: float
    is_busy: Callable[[], bool]

    def rest_seconds(self, job_seconds: float) -> float:
        """Until the next job that is not urgent, after one that took `job_seconds`."""
        if not self.is_busy():
            return 0.0
        return min(job_seconds * (1.0 / self.share - 1.0), LONGEST_REST_SECONDS)


class Workers:
    """`count` threads named `name-0`, `name-1`, ...; urgent jobs go first, otherwise in the order they came.

    Daemon threads: one that hangs in a dead disk must not keep the process from ending.
    """

    def __init__(self, name: str, count: int, yielding: Yielding | None = None) -> None:
        assert count > 0
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._yielding = yielding
        self._rest_until = 0.0  # time.monotonic(): no job that is not urgent begins before
        self._is_closing = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._loop, name=f"{name}-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, *, urgent: bool) -> None:
        """Run `job` on one of the threads. What it raises is logged and ends nothing but itself."""
        with self._changed:
            assert not self._is_closing
            (self._urgent if urgent else self._others).append(job)
            self._changed.notify_all()

    def hurry(self, job: Job) -> None:
        """Make `job` urgent; one that a thread has begun is left alone."""
        with self._changed:
            if job in self._others:
                self._others.remove(job)
                self._urgent.append(job)
                self._changed.notify_all()

    def withdraw(self, job: Job) -> bool:
        """Take back a job that no thread has begun; False if one has."""
        with self._changed:
            for queue in (self._urgent, self._others):
                if job in queue:
                    queue.remove(job)
                    return True
        return False

    def close(self) -> None:
        """Let the threads end once nothing is queued; returns at once."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait until every thread has ended, `seconds` at most; blocking. False if one has not."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self) -> None:
        while (found := self._next()) is not None:
            job, is_urgent = found
            started = time.monotonic()
            try:
                job()
            except Exception:
                log.exception("a job on %s failed", threading.current_thread().name)
            if not is_urgent:
                self._rest(started)
            del job, found  # or the last one's buffers would live as long as the thread waits

    def _next(self) -> tuple[Job, bool] | None:
        """The next job, and whether it is urgent; None: there will be no other."""
        with self._changed:
            while not self._urgent:
                rest_seconds = self._rest_until - time.monotonic()
                if self._others and (self._is_closing or rest_seconds <= 0.0):
                    return self._others.popleft(), False
                if self._is_closing:
                    return None
                self._changed.wait(rest_seconds if self._others else None)
            return self._urgent.popleft(), True

    def _rest(self, started: float) -> None:
        if self._yielding is None:
            return
        now = time.monotonic()
        until = now + self._yielding.rest_seconds(now - started)
        with self._changed:
            self._rest_until = max(self._rest_until, until)
