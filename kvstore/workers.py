"""Named threads for work that blocks, so that neither the event loop nor the engine waits for a copy or a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Workers:
    """`count` threads named `name-0`, `name-1`, ...; urgent jobs go first, otherwise in the order they came.

    Daemon threads: one that hangs in a dead disk must not keep the process from ending.
    """

    def __init__(self, name: str, count: int) -> None:
        assert count > 0
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
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
            self._changed.notify()

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
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:
                log.exception("a job on %s failed", threading.current_thread().name)
            del job  # or the last one's buffers would live as long as the thread waits

    def _next(self) -> Job | None:
        with self._changed:
            while not (self._urgent or self._others or self._is_closing):
                self._changed.wait()
            if self._urgent:
                return self._urgent.popleft()
            return self._others.popleft() if self._others else None
