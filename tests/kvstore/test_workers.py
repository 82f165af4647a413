"""Threads for work that blocks: who goes first, what is kept free, and that none outlives the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from kvstore.workers import Workers


def test_work_that_is_not_urgent_never_takes_a_reserved_thread() -> None:
    workers = Workers("io", 3, reserved=1)
    gate, begun, urgent = threading.Event(), threading.Semaphore(0), threading.Event()

    def slow() -> None:
        begun.release()
        gate.wait()

    for _ in range(8):
        workers.submit(slow, urgent=False)
    begun.acquire()
    begun.acquire()
    workers.submit(urgent.set, urgent=True)
    assert urgent.wait(30.0)
    assert not begun.acquire(blocking=False), "two of three are for them"
    gate.set()
    workers.close()
    assert workers.join(30.0)
    assert begun.acquire(blocking=False), "what was queued is done before the threads end"


def test_urgent_work_takes_any_thread() -> None:
    workers = Workers("io", 2, reserved=1)
    together = threading.Barrier(2)

    def meet() -> None:
        together.wait(30.0)

    for _ in range(2):
        workers.submit(meet, urgent=True)
    workers.close()
    assert workers.join(30.0)
    assert not together.broken


async def test_a_place_carries_one_call_and_its_answer() -> None:
    loop, workers = asyncio.get_running_loop(), Workers("io", 1)
    assert await loop.run_in_executor(workers.place(urgent=True), divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(workers.place(urgent=False), divmod, 7, 0)
    workers.close()
    assert workers.join(30.0)


async def test_a_place_that_is_withdrawn_has_the_answer_it_was_given() -> None:
    loop, workers, gate = asyncio.get_running_loop(), Workers("io", 1), threading.Event()
    begun = threading.Event()

    def slow() -> str:
        begun.set()
        gate.wait()
        return "made"

    running, queued, unused = (workers.place(urgent=False) for _ in range(3))
    answers = [loop.run_in_executor(place, slow) for place in (running, queued)]
    await asyncio.to_thread(begun.wait)
    assert not running.withdraw("withdrawn")
    assert queued.withdraw("withdrawn")
    assert not queued.withdraw("again")
    assert unused.withdraw("withdrawn")
    answers.append(loop.run_in_executor(unused, slow))
    assert await answers[1] == await answers[2] == "withdrawn"
    gate.set()
    assert await answers[0] == "made"
    workers.close()
    assert workers.join(30.0)


def test_a_thread_that_hangs_does_not_keep_the_process_alive() -> None:
    hang = """
import asyncio, threading
from aiofiles.os import wrap
from kvstore.workers import Workers

begun = threading.Event()

def hang():
    begun.set()
    threading.Event().wait()

async def main():
    task = asyncio.create_task(wrap(hang)(executor=Workers("io", 1).place(urgent=False)))
    await asyncio.to_thread(begun.wait)

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", hang], check=True, timeout=60.0)
