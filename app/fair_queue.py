"""Turns of different keys share the store's queue; nobody's flood stands before everybody else.

The store admits turns by priority and age and knows no tenants. So only a few waiting turns are handed to it at a
time, as many as its look-ahead makes use of, and each time there is room it is the turn of the key that has the
fewest running. Within a key, the lower `priority` goes first, then the older.

    waiting here ──────────── handed on ───────────── running
    max_waiting of each key   WINDOW of all keys      max_running of each key (waking and suspended turns count)

Without keys there is nobody to be fair to, and every turn goes straight through. The event loop owns it.
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


@dataclass(slots=True, order=True)
class _Waiter:
    priority: int
    serial: int
    may_go: asyncio.Future[None] = field(compare=False)


@dataclass(slots=True)
class _Share:
    """One key's part: `running` counts what was handed on and has not ended."""

    tenant: Tenant
    waiting: list[_Waiter] = field(default_factory=list)
    running: int = 0
    served_at: int = -1  # when it last had its turn, counted in turns

    @property
    def may_go(self) -> bool:
        most = self.tenant.limits.max_running
        return bool(self.waiting) and (not most or self.running < most)


class FairQueue:
    """See the module."""

    def __init__(
        self, manager: TierManager, *, max_queue: int, window: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert window > 0
        self._manager = manager
        self._max_queue = max_queue
        self._window = window
        self._clock = clock
        self._shares: dict[str, _Share] = {}
        self._serials = itertools.count()
        self._handed = 0

    def __repr__(self) -> str:
        shares = ", ".join(f"{name} {len(each.waiting)}+{each.running}" for name, each in self._shares.items())
        return f"<FairQueue {self._handed}/{self._window} handed on | {shares or 'nobody'}>"

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
        await self._turn_of(share, spec.priority)
        waited = self._clock() - arrived
        try:
            lease = await self._manager.acquire(spec)
        except BaseException:
            share.running -= 1
            raise
        finally:
            self._handed -= 1
            self._hand_on()
        tenant.budget.tokens.take(prompt_tokens)
        lease.grant = replace(lease.grant, queue_seconds=lease.grant.queue_seconds + waited)
        lease.when_ended(lambda: self._end(share, len(lease.token_ids) - prompt_tokens))
        return lease

    async def _turn_of(self, share: _Share, priority: int) -> None:
        waiter = _Waiter(priority, next(self._serials), asyncio.get_running_loop().create_future())
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
                self._handed -= 1
                self._hand_on()
            raise

    def _hand_on(self) -> None:
        while self._handed < self._window:
            able = [share for share in self._shares.values() if share.may_go]
            if not able:
                return
            share = min(able, key=lambda each: (each.running, each.served_at))
            waiter = share.waiting.pop(0)
            if waiter.may_go.cancelled():
                continue
            share.running += 1
            share.served_at = next(self._serials)
            self._handed += 1
            waiter.may_go.set_result(None)

    def _end(self, share: _Share, output_tokens: int) -> None:
        share.running -= 1
        share.tenant.budget.tokens.take(output_tokens)
        self._hand_on()
