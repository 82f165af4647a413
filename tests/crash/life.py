"""One process of a crash round: `python -m tests.crash.life PLAN`, from the root of the checkout.

It opens the store that earlier ones left, checks it, and talks in many sessions at once until it is killed. What has
happened goes to stdout, a line of JSON each, written when it is true and not before; "drain" on stdin begins the drain.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.types import Tier
from tests.crash.points import CrashingFiles, Fuse, Plan, kill_in_commits
from tests.crash.store import SEGMENT_SLOTS, STRIDE, Form, Open, opened
from tests.crash.talk import MOST_TURNS, Talk

WORKERS = 10
DRAIN_SECONDS = 10.0


def tell(what: str, **facts: object) -> None:
    """In one call, so that a kill leaves whole lines."""
    os.write(1, (json.dumps({"what": what, **facts}) + "\n").encode())


class Crowd:
    """Talks that go on, several at a time; those that are over are deleted, and others begin."""

    def __init__(self, it: Open, seed: int, turns: dict[int, int], next_talk: int, chance: random.Random) -> None:
        self._it = it
        self._seed = seed
        self._turns = turns
        self._next_talk = next_talk
        self._chance = chance
        self._talks: dict[int, Talk] = {}
        self._busy: set[int] = set()

    async def talk(self) -> None:
        """Without end."""
        while True:
            number = self._chance.choice([each for each in self._turns if each not in self._busy])
            self._busy.add(number)
            await self._step(number)
            self._busy.discard(number)
            if self._chance.random() < 0.3:
                await asyncio.sleep(self._chance.random() * 0.01)

    async def _step(self, number: int) -> None:
        talk = self._talks.setdefault(number, Talk(self._seed, number))
        turn = self._turns[number]
        if turn == MOST_TURNS or (turn and self._chance.random() < 0.03):
            await self._delete(number)
            return
        if self._chance.random() < 0.2:
            await self._it.manager.sleep(self._it.keys_of(talk.name), self._chance.choice([Tier.DRAM, Tier.NVME]))
        await self._turn(talk, turn)
        self._turns[number] = turn + 1

    async def _turn(self, talk: Talk, turn: int) -> None:
        said = await self._it.turn(talk.name, talk.prompt(turn), len(talk.answer(turn)))
        reused = {tier.name: tokens for tier, tokens in said.reused.items()}
        tell("turn", talk=talk.number, turn=turn, said=said.output, reused=reused, blocks=said.prompt_blocks)

    async def _delete(self, number: int) -> None:
        tell("deleting", talk=number)
        self._it.keeper.forget("", f"talk-{number}")
        if await self._it.keeper.settled(5.0):
            tell("deleted", talk=number)
        del self._turns[number]
        self._turns[self._next_talk] = 0
        self._next_talk += 1

    async def once_each(self) -> None:
        """One turn in every talk, a few at a time."""
        left = [number for number, turn in self._turns.items() if turn < MOST_TURNS]

        async def some() -> None:
            while left:
                number = left.pop()
                talk = Talk(self._seed, number)
                await self._turn(talk, self._turns[number])
                self._turns[number] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(some())


def tell_state(what: str, it: Open) -> None:
    """Counts of NVMe, and what its files take."""
    nvme, store = it.manager.snapshot().tier(Tier.NVME), it.tier.disk.store
    tell(
        what,
        capacity=nvme.capacity,
        free=nvme.free,
        valid=nvme.valid,
        erasing=nvme.erasing,
        found=it.manager.snapshot().totals.found,
        file_bytes=store.bytes_on_disk,
        held_bytes=it.tier.disk.directory.bytes_held,
        io=store.io,
    )


async def live(plan: dict[str, Any]) -> None:
    form, root = Form(**plan["form"]), Path(plan["root"])
    fuse = Fuse(Plan(**plan["plan"]), lambda point: tell("at", point=point))
    kill_in_commits(fuse)
    files = CrashingFiles(fuse, Path(plan["journal"]), SEGMENT_SLOTS * STRIDE)
    async with opened(root, form, files) as it:
        it.check()
        tell_state("open", it)
        turns = {int(number): turn for number, turn in plan["turns"].items()}
        crowd = Crowd(it, plan["seed"], turns, plan["next_talk"], random.Random(plan["chance"]))
        if plan["is_last"]:
            await crowd.once_each()
            await it.manager.flush_down(DRAIN_SECONDS)
            await it.until_idle()
            it.check_idle()
            tell_state("idle", it)
            return
        fuse.is_armed = True
        wants_drain = asyncio.Event()
        _on_line(asyncio.get_running_loop(), wants_drain.set)
        tasks = [asyncio.create_task(crowd.talk()) for _ in range(WORKERS)]
        waiting = asyncio.create_task(wants_drain.wait())
        done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        # As on SIGTERM: turns that run may finish, and what is not on NVMe goes there.
        fuse.is_draining = True
        tell("draining", dirty=it.manager.snapshot().dirty_blocks)
        draining = asyncio.create_task(it.manager.drain(DRAIN_SECONDS))
        await draining
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tell("drained", dirty=it.manager.snapshot().dirty_blocks)


def _on_line(loop: asyncio.AbstractEventLoop, called: Callable[[], None]) -> None:
    def read() -> None:
        if sys.stdin.readline():
            loop.call_soon_threadsafe(called)

    threading.Thread(target=read, name="stdin", daemon=True).start()


if __name__ == "__main__":
    asyncio.run(live(json.loads(sys.argv[1])))
