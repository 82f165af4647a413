"""Whose turn is next when several keys want the store."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from app import tenants
from app.budgets import Budget
from app.fair_queue import AHEAD, FairQueue
from app.tenants import Limits, Tenant
from kvstore.errors import ContextTooLong, QueueFull
from kvstore.lease import Grant, Lease
from kvstore.types import Namespace, TurnId, TurnProgress, TurnSpec


class Store:
    """Stands where the manager does: grants `room` turns at once, in the order in which they came."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked: list[str] = []
        self.granted: list[str] = []
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def acquire(self, spec: TurnSpec) -> Lease:
        name = tenants.current().name
        self.asked.append(name)
        may_run: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((name, may_run))
        self._grant()
        try:
            await may_run
        except asyncio.CancelledError:
            self._waiting = [each for each in self._waiting if each[1] is not may_run]
            raise
        return Lease(Grant(TurnId(len(self.granted)), 0, 0.0), array("q", spec.token_ids), lambda: None)

    def end(self, lease: Lease) -> None:
        lease.end()
        self.room += 1
        self._grant()

    def _grant(self) -> None:
        while self.room and self._waiting:
            name, may_run = self._waiting.pop(0)
            self.room -= 1
            self.granted.append(name)
            may_run.set_result(None)


def queue_of(store: Store, *, step_tokens: int = 1000, max_queue: int = 100) -> FairQueue:
    return FairQueue(store, max_queue=max_queue, step_tokens=step_tokens, clock=lambda: 5.0)  # type: ignore[arg-type]


def piece(lease: Lease) -> TurnProgress:
    """A first token."""
    return TurnProgress(lease.turn, computed_tokens=4, new_token_ids=[7])


def spec(tokens: int = 4, priority: int = 0) -> TurnSpec:
    ids = array("q", range(tokens))
    return TurnSpec(ids, 8, Namespace(b"n" * 16), payload=None, priority=priority)


def ask(queue: FairQueue, tenant: Tenant, **options: Any) -> asyncio.Task[Lease]:
    async def run() -> Lease:
        tenants.enter(tenant)
        return await queue.acquire(spec(**options))

    return asyncio.create_task(run())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def tenant(name: str, **limits: Any) -> Tenant:
    return Tenant(name, Limits(**limits))


async def test_a_flood_of_one_key_does_not_stand_before_anothers_turn() -> None:
    store = Store(room=2)
    queue = queue_of(store)
    alice, bob = tenant("alice"), tenant("bob")
    flood = [ask(queue, alice) for _ in range(20)]
    await settle()
    assert (store.granted, len(store.asked)) == (["alice", "alice"], 2 + AHEAD)
    ask(queue, bob)
    await settle()
    assert store.asked[-1] == "bob"
    for task in flood[:3]:
        store.end(task.result())
        await settle()
    assert store.granted[2:] == ["alice", "alice", "bob"]


async def test_a_key_computes_a_steps_worth_of_prompts_at_a_time() -> None:
    store = Store(room=100)
    queue = queue_of(store, step_tokens=8)
    alice, bob = tenant("alice"), tenant("bob")
    flood = [ask(queue, alice, tokens=5) for _ in range(9)]
    await settle()
    assert store.granted == ["alice"] * 2  # ten tokens
    ask(queue, bob, tokens=5)
    await settle()
    assert store.granted == ["alice"] * 2 + ["bob"]
    first = flood[0].result()
    first.deliver(piece(first))
    await settle()
    assert store.granted == ["alice"] * 2 + ["bob"] + ["alice"] * 1
    store.end(flood[1].result())  # one that ends without a token is computed no more, either
    store.end(first)
    await settle()
    assert store.granted[4:] == ["alice"]
    for task in flood:
        task.cancel()


async def test_keys_that_both_want_more_get_turns_alike() -> None:
    store = Store(room=1)
    queue = queue_of(store)
    alice, bob = tenant("alice"), tenant("bob")
    tasks = [ask(queue, alice) for _ in range(12)] + [ask(queue, bob) for _ in range(6)]
    ended: set[asyncio.Task[Lease]] = set()
    for _ in range(18):
        await settle()
        task = next(task for task in tasks if task.done() and task not in ended)
        ended.add(task)
        store.end(task.result())
    assert store.granted[AHEAD + 1 : AHEAD + 11].count("bob") in (5, 6)


async def test_a_key_that_is_alone_leaves_the_order_to_the_store() -> None:
    store = Store(room=0)
    queue = queue_of(store, step_tokens=1)
    alone = Tenant("alice", Limits(is_alone=True))
    tasks = [ask(queue, alone) for _ in range(7)]
    await settle()
    assert len(store.asked) == 7
    for task in tasks:
        task.cancel()


async def test_within_a_key_the_lower_priority_goes_first_then_the_older() -> None:
    store = Store(room=0)
    queue = queue_of(store)
    alice = tenant("alice")
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        tenants.enter(alice)
        lease = await queue.acquire(spec(priority=priority))
        order.append(name)
        store.end(lease)

    tasks = [asyncio.create_task(run(*each)) for each in (("first", 0), ("b", 0), ("c", 0), ("urgent", -1))]
    await settle()
    store.room = 1
    store._grant()
    await asyncio.gather(*tasks)
    assert order == ["first", "b", "urgent", "c"]  # the second had been handed on


async def test_no_key_runs_more_than_it_may_and_others_pass_it() -> None:
    store = Store(room=10)
    queue = queue_of(store)
    alice, bob = tenant("alice", max_running=2), tenant("bob", max_running=2)
    mine = [ask(queue, alice) for _ in range(4)]
    await settle()
    ask(queue, bob)
    await settle()
    assert store.granted == ["alice", "alice", "bob"]
    store.end(mine[0].result())
    await settle()
    assert store.granted == ["alice", "alice", "bob", "alice"]


async def test_a_key_that_fills_its_part_of_the_queue_is_refused_and_others_are_not() -> None:
    queue = queue_of(Store(room=0), max_queue=4)
    alice, bob = tenant("alice", max_waiting=2), tenant("bob", max_waiting=4)
    tasks = [ask(queue, alice) for _ in range(5)]
    await settle()
    assert [task.done() for task in tasks] == [False, False, False, False, True]  # two were handed on, two wait
    with pytest.raises(QueueFull):
        tasks[4].result()
    others = [ask(queue, bob) for _ in range(5)]
    await settle()
    assert [task.done() for task in others] == [False, False, False, False, True]  # the whole queue's limit
    for task in (*tasks[:4], *others):
        task.cancel()
    await asyncio.gather(*tasks, *others, return_exceptions=True)
    assert repr(queue) == (
        "<FairQueue alice 0 waiting, 0 handed on, 0 running | bob 0 waiting, 0 handed on, 0 running>"
    )


@pytest.mark.parametrize("moment", ["waiting here", "just called", "handed on"])
async def test_who_leaves_gives_back_its_place(moment: str) -> None:
    store = Store(room=0)
    queue = queue_of(store)
    alice = tenant("alice", max_running=1)
    first, second = ask(queue, alice), ask(queue, alice)
    await settle()
    if moment == "waiting here":
        second.cancel()
    elif moment == "handed on":
        first.cancel()
    else:
        first.cancel()
        await asyncio.sleep(0)
        second.cancel()  # in the very step in which it may go
    await settle()
    third = ask(queue, alice)
    if moment == "waiting here":
        first.cancel()
    await settle()
    store.room = 5
    store._grant()
    await settle()
    assert third.done() == (moment != "handed on")
    if moment == "handed on":
        store.end(second.result())
        await settle()
    store.end(third.result())
    assert repr(queue) == "<FairQueue alice 0 waiting, 0 handed on, 0 running>"


async def test_prompt_and_output_are_charged_to_the_key() -> None:
    store = Store(room=1)
    queue = queue_of(store)
    budget = Budget(tokens_per_minute=100, clock=lambda: 0.0)
    task = ask(queue, Tenant("alice", Limits(), budget), tokens=10)
    lease = await task
    assert budget.tokens.level == 90
    lease.token_ids.extend([1, 2, 3])
    store.end(lease)
    assert budget.tokens.level == 87


async def test_a_prompt_beyond_the_keys_context_is_refused_before_it_waits() -> None:
    store = Store(room=1)
    queue = queue_of(store)
    with pytest.raises(ContextTooLong) as caught:
        await ask(queue, tenant("alice", max_context=4), tokens=4)
    assert (caught.value.prompt_tokens, caught.value.max_context, store.asked) == (4, 4, [])
    await ask(queue, tenant("bob", max_context=4), tokens=3)


async def test_without_keys_every_turn_goes_straight_to_the_store() -> None:
    store = Store(room=0)
    queue = queue_of(store)
    tasks = [ask(queue, tenants.NOBODY) for _ in range(5)]
    await settle()
    assert (len(store.asked), queue.waiting) == (5, 0)
    for task in tasks:
        task.cancel()


async def test_time_spent_in_this_queue_counts_as_queued() -> None:
    times = iter([10.0, 12.5])
    store = Store(room=1)
    queue = FairQueue(store, max_queue=9, step_tokens=9, clock=lambda: next(times))  # type: ignore[arg-type]
    lease = await ask(queue, tenant("alice"))
    assert lease.grant.queue_seconds == 2.5
