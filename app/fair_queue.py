"""Turns of different keys share the store's queue and the engine; nobody's flood stands before everybody else.

Store and engine are fair in what they give out (kvstore/shares.py, models/contention.py), but their queue is one. So
each key has a lane of its own, and hands on only what the store and the engine can use ahead of time:

    waiting here             handed on          prompt computed         answering
    max_waiting of each key  AHEAD of each key  a step's worth of each  (all but the first: max_running of each key)

Another key's turn then waits for as much of a flood as is ahead in its lane, and not for the flood. Where several
lanes may go, the key with the fewest running is first; within a key the lower `priority`, then the older. Without keys,
or with a single one, there is nobody to be fair to: every turn goes straight through. The event loop owns it.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from app import tenants
from kvstore.errors import ContextTooLong, QueueFull

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.tenants import Tenant
    from kvstore.lease import Lease
    from kvstore.manager import TierManager
    from kvstore.types import TurnSpec

RETRY_SECONDS = 1.0

AHEAD = 2
"""Turns of one key that wait in the store's own queue, where sleeping blocks are brought up for them."""


@dataclass(slots=True, order=True)
class _Waiter:
    priority: int
    serial: int
    prompt_tokens: int = field(compare=False)
    may_go: asyncio.Future[None] = field(compare=False)


@dataclass(slots=True)
class _Share:
    """One key's lane: `running` counts what was handed on and has not ended, `handed` what waits for its grant,
    `prompt_tokens` what of their prompts may still have to be computed: all, until the grant says what was reused."""

    tenant: Tenant
    waiting: list[_Waiter] = field(default_factory=list)
    running: int = 0
    handed: int = 0
    prompt_tokens: int = 0
    served_at: int = -1  # when it last had its turn, counted in turns

    def may_go(self, step_tokens: int) -> bool:
        limits = self.tenant.limits
        if not self.waiting or (limits.max_running and self.running >= limits.max_running):
            return False
        return limits.is_alone or (self.handed < AHEAD and self.prompt_tokens < step_tokens)


class FairQueue:
    """See the module."""

    def __init__(
        self, manager: TierManager, *, max_queue: int, step_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert step_tokens > 0
        self._manager = manager
        self._max_queue = max_queue
        self._step_tokens = step_tokens
        self._clock = clock
        self._shares: dict[str, _Share] = {}
        self._serials = itertools.count()

    def __repr__(self) -> str:
        shares = (
            f"{name} {len(each.waiting)} waiting, {each.handed} handed on, {each.running} running"
            for name, each in self._shares.items()
        )
        return f"<FairQueue {' | '.join(shares) or 'nobody'}>"

    @property
    def waiting(self) -> int:
        """Turns that were not handed on yet."""
        return sum(len(share.waiting) for share in self._shares.values())

    async def acquire(self, spec: TurnSpec) -> Lease:
        """As the manager's, for the tenant at hand: its turn in the queue, its context, its tokens.

        Raises:
            ContextTooLong: the prompt and one token more are beyond the key's context, or the server's.
            QueueFull: too many of its turns wait, or too many in all.
            ShuttingDown: the server drains.
        """
        tenant = tenants.current()
        if tenant.is_nobody:
            return await self._manager.acquire(spec)
        prompt_tokens, limits = len(spec.token_ids), tenant.limits
        if limits.max_context and prompt_tokens + 1 > limits.max_context:
            raise ContextTooLong(prompt_tokens, limits.max_context)
        share = self._shares.setdefault(tenant.name, _Share(tenant))
        if len(share.waiting) >= (limits.max_waiting or self._max_queue) or self.waiting >= self._max_queue:
            raise QueueFull(len(share.waiting), RETRY_SECONDS)
        arrived = self._clock()
        await self._turn_of(share, spec)
        waited = self._clock() - arrived
        try:
            lease = await self._manager.acquire(spec)
        except BaseException:
            share.running -= 1
            share.prompt_tokens -= prompt_tokens
            asyncio.get_running_loop().call_soon(self._hand_on)
            raise
        finally:
            share.handed -= 1
        tenant.budget.tokens.take(prompt_tokens)
        lease.grant = replace(lease.grant, queue_seconds=lease.grant.queue_seconds + waited)
        self._run(share, lease, prompt_tokens)
        self._hand_on()
        return lease

    async def _turn_of(self, share: _Share, spec: TurnSpec) -> None:
        may_go: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(spec.priority, next(self._serials), len(spec.token_ids), may_go)
        bisect.insort(share.waiting, waiter)
        self._hand_on()
        try:
            await waiter.may_go
        except asyncio.CancelledError:
            if waiter.may_go.cancelled():
                if waiter in share.waiting:
                    share.waiting.remove(waiter)
            else:  # it was called, and left at the same moment
                share.running -= 1
                share.handed -= 1
                share.prompt_tokens -= waiter.prompt_tokens
                self._hand_on()
            raise

    def _hand_on(self) -> None:
        while able := [share for share in self._shares.values() if share.may_go(self._step_tokens)]:
            share = min(able, key=lambda each: (each.running, each.served_at))
            waiter = share.waiting.pop(0)
            if waiter.may_go.cancelled():
                continue
            share.running += 1
            share.handed += 1
            share.prompt_tokens += waiter.prompt_tokens
            share.served_at = next(self._serials)
            waiter.may_go.set_result(None)

    def _run(self, share: _Share, lease: Lease, prompt_tokens: int) -> None:
        """Keep account of a turn from its grant to its end."""
        to_compute = prompt_tokens - lease.grant.cached_tokens
        share.prompt_tokens -= lease.grant.cached_tokens

        def computed() -> None:
            nonlocal to_compute
            share.prompt_tokens -= to_compute
            to_compute = 0
            self._hand_on()

        def ended() -> None:
            share.running -= 1
            share.tenant.budget.tokens.take(len(lease.token_ids) - prompt_tokens)
            computed()  # a turn may end without a token

        lease.watch(computed, ended)
