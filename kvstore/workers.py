"""Named threads for work that blocks, so that neither the event loop nor the engine waits for a copy or a disk.

Not concurrent.futures' pool: its threads are joined when the interpreter ends, so a disk that hangs would keep the
process alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger(__name__)

Job = Callable[[], None]

P = ParamSpec("P")
T = TypeVar("T")


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

    The first `reserved` of them take urgent jobs only: however many of the others hang, they are there. Daemon threads:
    one that hangs in a dead disk must not keep the process from ending.
    """

    def __init__(self, name: str, count: int, yielding: Yielding | None = None, *, reserved: int = 0) -> None:
        assert count > reserved >= 0
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._yielding = yielding
        self._rest_until = 0.0  # time.monotonic(): no job that is not urgent begins before
        self._is_closing = False
        self._lock = threading.Lock()
        self._for_any = threading.Condition(self._lock)
        self._for_urgent = threading.Condition(self._lock)  # here reserved threads wait
        self._threads = [
            threading.Thread(target=self._loop, args=(n < reserved,), name=f"{name}-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, *, urgent: bool) -> None:
        """Run `job` on one of the threads. What it raises is logged and ends nothing but itself."""
        with self._lock:
            assert not self._is_closing
            (self._urgent if urgent else self._others).append(job)
            self._for_any.notify_all()  # one of them may be resting, and only for what is not urgent
            if urgent:
                self._for_urgent.notify()

    def hurry(self, job: Job) -> None:
        """Make `job` urgent; one that a thread has begun is left alone."""
        with self._lock:
            if job in self._others:
                self._others.remove(job)
                self._urgent.append(job)
                self._for_any.notify_all()
                self._for_urgent.notify()

    def place(self, *, urgent: bool) -> Place:
        """A place in the queue for one call that has an answer."""
        return Place(self, urgent)

    def withdraw(self, job: Job) -> bool:
        """Take back a job that no thread has begun; False if one has."""
        with self._lock:
            for queue in (self._urgent, self._others):
                if job in queue:
                    queue.remove(job)
                    return True
        return False

    def close(self) -> None:
        """Let the threads end once nothing is queued; returns at once."""
        with self._lock:
            self._is_closing = True
            self._for_any.notify_all()
            self._for_urgent.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait until every thread has ended, `seconds` at most; blocking. False if one has not."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self, urgent_only: bool) -> None:
        while (found := self._next(urgent_only)) is not None:
            job, is_urgent = found
            started = time.monotonic()
            try:
                job()
            except Exception:
                log.exception("a job on %s failed", threading.current_thread().name)
            if not is_urgent:
                self._rest(started)
            del job, found  # or the last one's buffers would live as long as the thread waits

    def _next(self, urgent_only: bool) -> tuple[Job, bool] | None:
        """The next job, and whether it is urgent; None: there will be no other."""
        changed = self._for_urgent if urgent_only else self._for_any
        with self._lock:
            while not self._urgent:
                others = () if urgent_only else self._others
                rest_seconds = self._rest_until - time.monotonic()
                if others and (self._is_closing or rest_seconds <= 0.0):
                    return self._others.popleft(), False
                if self._is_closing:
                    return None
                changed.wait(rest_seconds if others else None)
            return self._urgent.popleft(), True

    def _rest(self, started: float) -> None:
        if self._yielding is None:
            return
        now = time.monotonic()
        until = now + self._yielding.rest_seconds(now - started)
        with self._lock:
            self._rest_until = max(self._rest_until, until)


class Place(Executor):
    """What an event loop's `run_in_executor` takes: makes one call on one of `workers`' threads.

    Withdrawn before a thread has begun it, the call is never made and has the answer that was given instead.
    """

    def __init__(self, workers: Workers, urgent: bool) -> None:
        self._workers = workers
        self._urgent = urgent
        self._call: Callable[[], Any] | None = None
        self._answer: Future[Any] = Future()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        assert self._call is None, "one place, one call"
        self._call = partial(fn, *args, **kwargs)
        if not self._answer.done():
            self._workers.submit(self._make_call, urgent=self._urgent)
        return self._answer

    def hurry(self) -> None:
        """Make the call urgent, unless a thread has begun it."""
        self._urgent = True
        self._workers.hurry(self._make_call)

    def withdraw(self, answer: object) -> bool:
        """False if a thread has begun the call, or ended it."""
        if self._answer.done() or not (self._call is None or self._workers.withdraw(self._make_call)):
            return False
        self._answer.set_result(answer)
        return True

    def _make_call(self) -> None:
        assert self._call is not None
        if not self._answer.set_running_or_notify_cancel():
            return
        call, self._call = self._call, _done
        try:
            answer = call()
        except Exception as exc:
            self._answer.set_exception(exc)
        else:
            self._answer.set_result(answer)


def _done() -> None:
    """Stands for a call that was made, so that its buffers need not live on."""
