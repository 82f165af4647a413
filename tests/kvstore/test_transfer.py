"""Transfers between stores, on their threads: what lands, in which order, and how they end."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import threading
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

from kvstore.events import StartTransfer, TransferDone, TransferEnd
from kvstore.tiers.base import Landed, Run
from kvstore.tiers.hbm import hbm_store
from kvstore.transfer import Transfers
from kvstore.types import BlockKey, Tier, TransferId
from kvstore.workers import Workers
from tests.kvstore.faulty_files import FaultyFiles
from tests.kvstore.stores import (
    SLOT_BYTES,
    FaultyStore,
    GatedStore,
    TorchArena,
    Wrapped,
    contents,
    fill,
    model_folder,
    nvme_store,
    run,
    slab,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    import pytest

    from kvstore.tiers.base import SlotStore

NUM_SLOTS = 32
Slots = tuple[int, ...]


class Rig:
    """Three tiers and the transfers between them; the lowest is memory, too, and stands in for a disk."""

    def __init__(self, wrap: Callable[[SlotStore], SlotStore], threads: int) -> None:
        self.slab = slab(NUM_SLOTS, num_ring=4)
        self.disk = slab(NUM_SLOTS)
        self.hbm = hbm_store(TorchArena.zeros(NUM_SLOTS), SLOT_BYTES)
        stores = {Tier.HBM: wrap(self.hbm), Tier.NVME: wrap(self.disk)}
        workers = {Tier.DRAM: Workers("dram-copy", threads), Tier.NVME: Workers("nvme", threads)}
        self.transfers = Transfers(self.slab, stores, workers)
        self.ended: list[TransferDone] = []
        self._ids = itertools.count(1)
        self._waiters: dict[TransferId, asyncio.Future[TransferDone]] = {}

    def start(
        self,
        source: Tier,
        target: Tier,
        source_slots: Slots,
        target_slots: Slots,
        ring_slots: Slots = (),
        **chain: Any,
    ) -> TransferId:
        transfer = TransferId(next(self._ids))
        self._waiters[transfer] = asyncio.get_running_loop().create_future()
        chain = {"keys": (None,) * len(source_slots)} | chain
        action = StartTransfer(
            transfer, source, target, source_slots, target_slots, deadline=1e9, ring_slots=ring_slots, **chain
        )
        self.transfers.start(action, self._on_done)
        return transfer

    def _on_done(self, event: TransferDone) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.ended.append(event)
        self._waiters[event.transfer].set_result(event)

    async def end_of(self, transfer: TransferId) -> TransferDone:
        return await self._waiters[transfer]

    async def copy(
        self, source: Tier, target: Tier, source_slots: Slots, target_slots: Slots, ring_slots: Slots = ()
    ) -> TransferDone:
        return await self.end_of(self.start(source, target, source_slots, target_slots, ring_slots))

    def in_hbm(self, slots: Slots) -> list[bytes]:
        scratch = slab(len(slots))
        self.hbm.copy_out(run(slots, scratch, tuple(range(len(slots)))))
        return contents(scratch, tuple(range(len(slots))))

    def fill_hbm(self, slots: Slots) -> list[bytes]:
        scratch = slab(len(slots))
        written = fill(scratch, tuple(range(len(slots))))
        self.hbm.copy_in(run(slots, scratch, tuple(range(len(slots)))))
        return written


@asynccontextmanager
async def rig(wrap: Callable[[SlotStore], SlotStore] = lambda store: store, threads: int = 2) -> AsyncIterator[Rig]:
    it = Rig(wrap, threads)
    try:
        yield it
    finally:
        assert await it.transfers.close(30.0)
        assert len(it.transfers) == 0


async def test_a_run_sleeps_in_dram_and_comes_back_bit_for_bit() -> None:
    async with rig() as it:
        written = it.fill_hbm((3, 4, 9))
        assert await it.copy(Tier.HBM, Tier.DRAM, (3, 4, 9), (0, 1, 7)) == TransferDone(TransferId(1), 3)
        assert contents(it.slab, (0, 1, 7)) == written
        assert (await it.copy(Tier.DRAM, Tier.HBM, (0, 1, 7), (20, 21, 22))).good == 3
        assert it.in_hbm((20, 21, 22)) == written


async def test_a_run_goes_through_every_tier_and_back() -> None:
    async with rig() as it:
        written = it.fill_hbm((0, 1))
        await it.copy(Tier.HBM, Tier.DRAM, (0, 1), (4, 5))
        await it.copy(Tier.DRAM, Tier.NVME, (4, 5), (8, 6))
        await it.copy(Tier.NVME, Tier.DRAM, (8, 6), (10, 11))
        await it.copy(Tier.DRAM, Tier.HBM, (10, 11), (30, 31))
        assert it.in_hbm((30, 31)) == written


async def test_where_dram_has_no_room_a_run_passes_through_the_ring_and_touches_nothing_else() -> None:
    async with rig() as it:
        asleep = fill(it.slab, tuple(range(NUM_SLOTS)), seed=5)
        written = it.fill_hbm((0, 1))
        assert (await it.copy(Tier.HBM, Tier.NVME, (0, 1), (9, 2), ring_slots=(4, 5))).good == 2
        assert contents(it.disk, (9, 2)) == written
        assert (await it.copy(Tier.NVME, Tier.HBM, (9, 2), (7, 8), ring_slots=(0, 1))).good == 2
        assert it.in_hbm((7, 8)) == written
        assert contents(it.slab, tuple(range(NUM_SLOTS))) == asleep


class Noting(Wrapped):
    """Keeps the runs of copies in."""

    def __init__(self, store: SlotStore) -> None:
        super().__init__(store)
        self.runs: list[Run] = []

    def copy_in(self, run: Run) -> Landed:
        self.runs.append(run)
        return super().copy_in(run)


async def test_a_store_is_told_where_in_its_chain_a_run_lies() -> None:
    stores: list[Noting] = []

    def noting(store: SlotStore) -> SlotStore:
        stores.append(Noting(store))
        return stores[-1]

    async with rig(noting) as it:
        chain: dict[str, Any] = {"keys": (BlockKey(b"c" * 16), BlockKey(b"d" * 16)), "parent": BlockKey(b"b" * 16)}
        chain["first_block"] = 2
        await it.end_of(it.start(Tier.DRAM, Tier.NVME, (0, 1), (4, 5), **chain))
        await it.end_of(it.start(Tier.HBM, Tier.NVME, (0, 1), (6, 7), ring_slots=(4, 5), **chain))
        told = [{"keys": run.keys, "parent": run.parent, "first_block": run.first_block} for run in stores[1].runs]
        assert told == [chain, chain]


class Short(Wrapped):
    """Two blocks of a copy out are sound, whatever was asked for."""

    def copy_out(self, run: Run) -> Landed:
        super().copy_out(run)
        return Landed(2, TransferEnd.CORRUPT)


async def test_a_run_that_ends_short_says_how_far_it_is_sound_and_why() -> None:
    async with rig(Short) as it:
        done = await it.copy(Tier.NVME, Tier.DRAM, (0, 1, 2, 3), (0, 1, 2, 3))
        assert (done.good, done.reason) == (2, TransferEnd.CORRUPT)


async def test_through_the_ring_only_what_was_sound_goes_on() -> None:
    async with rig(Short) as it:
        untouched = it.fill_hbm((2, 3))
        fill(it.disk, (0, 1, 2, 3), seed=1)
        done = await it.copy(Tier.NVME, Tier.HBM, (0, 1, 2, 3), (0, 1, 2, 3), ring_slots=(0, 1, 2, 3))
        assert (done.good, done.reason) == (2, TransferEnd.CORRUPT)
        assert it.in_hbm((0, 1)) == contents(it.disk, (0, 1))
        assert it.in_hbm((2, 3)) == untouched


class Breaking(Wrapped):
    def copy_in(self, run: Run) -> Landed:
        raise OSError(5, "Input/output error")


async def test_whatever_a_store_raises_is_a_transfer_that_failed_and_the_next_one_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig(Breaking, threads=1) as it:
        with caplog.at_level(logging.CRITICAL):
            failed = await it.copy(Tier.DRAM, Tier.HBM, (0,), (0,))
        assert (failed.good, failed.reason) == (0, TransferEnd.FAILED)
        assert (await it.copy(Tier.HBM, Tier.DRAM, (0,), (0,))).good == 1


async def test_a_cancelled_run_ends_between_blocks() -> None:
    async with gated() as (it, gate):
        transfer = it.start(Tier.HBM, Tier.DRAM, (0, 1, 2, 3), (0, 1, 2, 3))
        gate.let_pass(2)
        await reached(gate, 3)
        it.transfers.cancel(transfer)
        gate.let_pass(1)
        assert await it.end_of(transfer) == TransferDone(transfer, 2, TransferEnd.CANCELLED)


async def test_a_queued_transfer_is_cancelled_though_every_thread_hangs() -> None:
    async with gated() as (it, gate):
        hanging = it.start(Tier.HBM, Tier.DRAM, (0,), (0,))
        await reached(gate, 1)
        queued = it.start(Tier.HBM, Tier.DRAM, (1,), (1,))
        it.transfers.cancel(queued)
        assert it.ended == [], "the planner must not be called back while it is calling"
        assert await it.end_of(queued) == TransferDone(queued, 0, TransferEnd.CANCELLED)
        it.transfers.cancel(queued)
        it.transfers.cancel(TransferId(99))
        gate.let_pass(1)
        assert await it.end_of(hanging) == TransferDone(hanging, 1)
        assert len(it.ended) == 2


async def test_loads_overtake_copies_down() -> None:
    async with gated() as (it, gate):
        first, second = (it.start(Tier.HBM, Tier.DRAM, (slot,), (slot,)) for slot in (0, 1))
        await reached(gate, 1)
        load = it.start(Tier.DRAM, Tier.HBM, (5,), (5,))
        await asyncio.sleep(0)  # one turn of the loop, in which it is queued
        gate.let_pass(3)
        await it.end_of(second)
        assert [done.transfer for done in it.ended] == [first, load, second]


async def test_a_copy_down_that_is_hurried_overtakes_those_that_nobody_waits_for() -> None:
    async with gated() as (it, gate):
        first, second, third = (it.start(Tier.HBM, Tier.DRAM, (slot,), (slot,)) for slot in (0, 1, 2))
        await reached(gate, 1)
        for transfer in (third, first, TransferId(99)):
            it.transfers.hurry(transfer)
        gate.let_pass(3)
        await it.end_of(second)
        assert [done.transfer for done in it.ended] == [first, third, second]


async def test_closing_waits_for_the_copy_under_way_and_withdraws_the_rest() -> None:
    async with gated() as (it, gate):
        running, queued = (it.start(Tier.HBM, Tier.DRAM, (slot, slot + 1), (slot, slot + 1)) for slot in (0, 2))
        await reached(gate, 1)
        closing = asyncio.create_task(it.transfers.close(30.0))
        await it.end_of(queued)
        assert not closing.done()
        gate.let_pass(1)
        assert await closing
        assert [(done.transfer, done.good, done.reason) for done in it.ended] == [
            (queued, 0, TransferEnd.CANCELLED),
            (running, 0, TransferEnd.CANCELLED),
        ]


async def test_closing_gives_up_on_a_copy_that_hangs_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with gated() as (it, gate):
        hanging = it.start(Tier.HBM, Tier.DRAM, (0,), (0,))
        await reached(gate, 1)
        with caplog.at_level(logging.CRITICAL):
            assert not await it.transfers.close(0.0)
        gate.let_pass(1)
        await it.end_of(hanging)


async def test_threads_are_named_for_what_they_do_and_end_with_their_owner() -> None:
    seen: set[threading.Thread] = set()

    class Noting(Wrapped):
        def copy_out(self, run: Run) -> Landed:
            seen.add(threading.current_thread())
            return super().copy_out(run)

    async with rig(Noting, threads=1) as it:
        await it.copy(Tier.HBM, Tier.DRAM, (0,), (0,))
        await it.copy(Tier.NVME, Tier.DRAM, (0,), (0,))
        await it.copy(Tier.NVME, Tier.HBM, (0,), (0,), ring_slots=(0,))
    assert {thread.name for thread in seen} == {"dram-copy-0", "nvme-0"}
    assert not any(thread.is_alive() for thread in seen)


async def test_traffic_counts_sound_blocks_by_direction() -> None:
    async with rig(Short) as it:
        await it.copy(Tier.DRAM, Tier.HBM, (0,), (0,))
        await it.copy(Tier.HBM, Tier.DRAM, (0, 1, 2), (0, 1, 2))
        down = it.transfers.traffic[Tier.HBM, Tier.DRAM]
        assert (down.transfers, down.blocks, down.bytes) == (1, 2, 2 * SLOT_BYTES)
        assert down.seconds > 0.0
        assert it.transfers.traffic[Tier.DRAM, Tier.HBM].blocks == 1


async def test_under_delays_failures_and_short_runs_everything_said_to_be_sound_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "kvstore.transfer")
    random = Random(7)
    stores: list[FaultyStore] = []

    def faulty(store: SlotStore) -> SlotStore:
        stores.append(FaultyStore(store, random, late=0.3, delay_seconds=0.002, short=0.3, raising=0.1))
        return stores[-1]

    async with rig(faulty) as it:
        written = it.fill_hbm(tuple(range(8)))
        for _ in range(50):
            slots = tuple(random.sample(range(NUM_SLOTS), 8))
            down = await it.copy(Tier.HBM, Tier.DRAM, tuple(range(8)), slots)
            assert contents(it.slab, slots)[: down.good] == written[: down.good]
            up = await it.copy(Tier.DRAM, Tier.HBM, slots[: down.good], tuple(range(8, 8 + down.good)))
            assert it.in_hbm(tuple(range(8, 8 + up.good))) == written[: up.good]
            garbage = bytes([255]) * SLOT_BYTES
            assert set(contents(it.slab, slots)[down.good :]) <= {garbage}
            assert set(it.in_hbm(tuple(range(8 + up.good, 8 + down.good)))) <= {garbage}
    assert sum(store.num_faults for store in stores) > 20
    assert {done.reason for done in it.ended} == {TransferEnd.DONE, TransferEnd.FAILED}


class FileRig(Rig):
    """The same with files in place of memory for the lowest tier: two threads, one of which takes only loads."""

    def __init__(self, path: Path) -> None:
        super().__init__(lambda store: store, 1)
        self.files = FaultyFiles()
        self.nvme = nvme_store(model_folder(path), NUM_SLOTS, files=self.files, io="auto")
        stores = {Tier.HBM: self.hbm, Tier.NVME: self.nvme}
        workers = {Tier.DRAM: Workers("dram-copy", 1), Tier.NVME: Workers("nvme-io", 2, reserved=1)}
        self.memory, self.transfers = self.transfers, Transfers(self.slab, stores, workers)


@asynccontextmanager
async def file_rig(path: Path) -> AsyncIterator[FileRig]:
    it = FileRig(path)
    try:
        yield it
    finally:
        it.files.release()
        assert await it.transfers.close(30.0)
        assert await it.memory.close(30.0)
        it.nvme.close()


async def test_blocks_sleep_in_files_and_come_back_by_way_of_dram_and_of_the_ring(tmp_path: Path) -> None:
    async with file_rig(tmp_path) as it:
        written = it.fill_hbm((0, 1, 2))
        await it.copy(Tier.HBM, Tier.DRAM, (0, 1, 2), (4, 5, 6))
        assert (await it.copy(Tier.DRAM, Tier.NVME, (4, 5, 6), (8, 9, 20))).good == 3
        assert (await it.copy(Tier.NVME, Tier.HBM, (8, 9, 20), (10, 11, 12), ring_slots=(0, 1, 2))).good == 3
        assert it.in_hbm((10, 11, 12)) == written
        assert (await it.copy(Tier.HBM, Tier.NVME, (11, 10), (0, 1), ring_slots=(4, 5))).good == 2
        assert (await it.copy(Tier.NVME, Tier.DRAM, (0, 1), (30, 31))).good == 2
        assert contents(it.slab, (30, 31)) == [written[1], written[0]]


async def test_writes_that_hang_hold_up_no_load(tmp_path: Path) -> None:
    async with file_rig(tmp_path) as it:
        await it.copy(Tier.DRAM, Tier.NVME, (0, 1), (0, 1))
        it.files.hang("write")
        writes = [it.start(Tier.DRAM, Tier.NVME, (slot,), (slot,)) for slot in (2, 3, 4)]
        await asyncio.to_thread(it.files.reached.acquire)
        assert (await it.copy(Tier.NVME, Tier.DRAM, (0, 1), (8, 9))).good == 2
        it.transfers.cancel(writes[1])
        assert (await it.end_of(writes[1])).reason is TransferEnd.CANCELLED
        it.files.release()
        assert [(await it.end_of(writes[place])).good for place in (0, 2)] == [1, 1]


async def test_a_disk_that_fails_ends_transfers_and_raises_nothing(tmp_path: Path) -> None:
    async with file_rig(tmp_path) as it:
        await it.copy(Tier.DRAM, Tier.NVME, (0, 1), (0, 1))
        it.files.errors = {"read": errno.EIO, "write": errno.ENOSPC}
        up = await it.copy(Tier.NVME, Tier.HBM, (0, 1), (0, 1), ring_slots=(0, 1))
        assert (up.good, up.reason) == (0, TransferEnd.SLOT_BROKEN)
        down = await it.copy(Tier.HBM, Tier.NVME, (0, 1), (2, 3), ring_slots=(4, 5))
        assert (down.good, down.reason) == (0, TransferEnd.FAILED)


@asynccontextmanager
async def gated() -> AsyncIterator[tuple[Rig, GatedStore]]:
    """A rig with one thread whose device store copies a block each time it is let pass."""
    gates: list[GatedStore] = []

    def gate(store: SlotStore) -> SlotStore:
        gates.append(GatedStore(store))
        return gates[-1]

    async with rig(gate, threads=1) as it:
        yield it, gates[0]


async def reached(gate: GatedStore, times: int) -> None:
    """Wait until copies stood before the gate `times` times."""
    for _ in range(times):
        await asyncio.to_thread(gate.reached.acquire)
