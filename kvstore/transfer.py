"""Performs transfers between tiers, on threads of their own; decides nothing.

    loop      start() --> queue of the lower tier's threads      cancel(): withdrawn from there, or told
    thread    copy, piece by piece
    loop      done(TransferDone), once per start, never from within start or cancel

aiofiles' `wrap` carries whole runs there and back: one hop per run, not one per call to the disk, since each hop takes
the interpreter's lock from the engine. A copy between HBM and NVMe is two, through the slab's ring. What goes wrong is
never an exception here: a transfer that could not copy says so in its TransferDone, and somebody computes again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiofiles.os import wrap

from kvstore.events import StartTransfer, TransferDone, TransferEnd
from kvstore.tiers.base import Landed, Run
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.tiers.base import SlotStore
    from kvstore.tiers.dram import DramSlab
    from kvstore.types import TransferId
    from kvstore.workers import Place, Workers

log = logging.getLogger(__name__)

JOIN_SECONDS = 1.0
"""Threads with nothing left to do end in microseconds; more than this means that one hangs."""


@dataclass(slots=True)
class Traffic:
    """Copies from one tier to another that have ended. `seconds` are those of the copies, not of the queue."""

    transfers: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0


class _Flight:
    """One transfer between its start and its end."""

    def __init__(self, action: StartTransfer, done: Callable[[TransferDone], None], place: Place) -> None:
        self.action = action
        self.done = done
        self.place = place
        self.cancelled = threading.Event()


class Transfers:
    """All transfers under way. Made, called and closed on one event loop.

    `slab` is open and outlives this object, as do `stores`, by tier without DRAM; `workers`, by the lower tier of
    a transfer, are closed with it. Loads go before copies down, which yield as their
    workers' `Yielding` has it: a turn waits for a load, and for a copy down only once `hurry` was called.
    """

    def __init__(self, slab: DramSlab, stores: Mapping[Tier, SlotStore], workers: Mapping[Tier, Workers]) -> None:
        assert all(store.slot_bytes == slab.slot_bytes for store in stores.values())
        self._slab = slab
        self._stores = stores
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._flights: dict[TransferId, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._is_closing = False
        self.traffic: dict[tuple[Tier, Tier], Traffic] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __repr__(self) -> str:
        return f"<Transfers {len(self._flights)} under way>"

    def start(self, action: StartTransfer, done: Callable[[TransferDone], None]) -> None:
        """Carry out `action`, queued with the loop's next turn; there `done` comes, once nothing touches its slots."""
        assert not self._is_closing
        assert action.transfer not in self._flights
        is_load = action.target < action.source
        workers = self._workers[max(action.source, action.target)]
        flight = _Flight(action, done, workers.place(urgent=is_load))
        self._flights[action.transfer] = flight
        self._none_left.clear()
        task = self._loop.create_task(self._perform(flight))
        self._tasks.add(task)
        task.add_done_callback(self._settled)

    def cancel(self, transfer: TransferId) -> None:
        """End `transfer` between two pieces, or before the first; one that has ended is left alone."""
        flight = self._flights.get(transfer)
        if flight is not None:
            flight.cancelled.set()
            flight.place.withdraw((Landed(0, TransferEnd.CANCELLED), 0.0))

    def hurry(self, transfer: TransferId) -> None:
        """Somebody waits for `transfer` now; one that runs or has ended is left alone."""
        flight = self._flights.get(transfer)
        if flight is not None:
            flight.place.hurry()

    async def close(self, seconds: float) -> bool:
        """Cancel what is under way and wait until it has ended; no more can be started.

        Returns False if after `seconds` a copy still hangs: then its slots must not be unmapped.
        """
        self._is_closing = True
        for transfer in list(self._flights):
            self.cancel(transfer)
        try:
            async with asyncio.timeout(seconds):
                await self._none_left.wait()
        except TimeoutError:
            log.warning("%d copies did not end within %.1f s", len(self._flights), seconds)
        for workers in self._workers.values():
            workers.close()
        if self._flights:
            return False
        joins = (asyncio.to_thread(workers.join, JOIN_SECONDS) for workers in self._workers.values())
        return all(await asyncio.gather(*joins))

    # --- on a worker thread -------------------------------------------------------------------

    def _carry_out(self, flight: _Flight) -> tuple[Landed, float]:
        """Copy; how it ended, and the seconds that took."""
        started = time.perf_counter()
        landed = Landed(0, TransferEnd.FAILED)
        try:
            landed = self._copy(flight.action, flight.cancelled.is_set)
        except Exception:
            # The supervisor of copies: whatever a store raises becomes the event that the planner is owed.
            log.exception("transfer %d failed", flight.action.transfer)
        return landed, time.perf_counter() - started

    def _copy(self, action: StartTransfer, is_cancelled: Callable[[], bool]) -> Landed:
        source, target = action.source, action.target

        def run(slots: tuple[int, ...], host_slots: tuple[int, ...]) -> Run:
            keys = action.keys[: len(slots)]
            return Run(slots, self._slab, host_slots, keys, is_cancelled, action.parent, action.first_block)

        if target is Tier.DRAM:
            return self._stores[source].copy_out(run(action.source_slots, action.target_slots))
        if source is Tier.DRAM:
            return self._stores[target].copy_in(run(action.target_slots, action.source_slots))
        ring = self._slab.ring_slots(action.ring_slots)
        staged = self._stores[source].copy_out(run(action.source_slots, ring))
        good = staged.good
        landed = self._stores[target].copy_in(run(action.target_slots[:good], ring[:good]))
        return landed if landed.good < good else staged

    # --- on the event loop --------------------------------------------------------------------

    async def _perform(self, flight: _Flight) -> None:
        landed, seconds = await wrap(self._carry_out)(flight, executor=flight.place)
        self._ended(flight, landed, seconds)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():  # else the loop ends, and with it everyone who waited
            task.result()

    def _ended(self, flight: _Flight, landed: Landed, seconds: float) -> None:
        action = flight.action
        traffic = self.traffic.setdefault((action.source, action.target), Traffic())
        traffic.transfers += 1
        traffic.blocks += landed.good
        traffic.bytes += landed.good * self._slab.slot_bytes
        traffic.seconds += seconds
        del self._flights[action.transfer]
        if not self._flights:
            self._none_left.set()
        flight.done(TransferDone(action.transfer, landed.good, landed.reason))
