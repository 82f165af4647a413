"""The manager carries out what the planner decides about NVMe: the journal, probes, sleeping there, the drain."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import deque
from typing import TYPE_CHECKING

from kvstore import chain
from kvstore.config import PlannerConfig
from kvstore.events import BranchRecorded, StartTransfer, TierHealth, TransferDone, TransferEnd, WritePolicy
from kvstore.manager import TierManager
from kvstore.planner import Planner
from kvstore.types import StepReport, StopReason, Tier, TurnId, TurnProgress, TurnSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.events import RecordedBlock
    from kvstore.types import BlockKey, TransferId

BLOCK_TOKENS = 4
SPACE = chain.namespace(b"tests", "", None)


class Engine:
    """Computes nothing; the test says what a step has done."""

    def __init__(self) -> None:
        self.started: list[TurnId] = []

    def start(self, turn: TurnId, spec: TurnSpec, cached_tokens: int, slots: Sequence[int]) -> None:
        self.started.append(turn)

    def extend(self, turn: TurnId, slots: Sequence[int]) -> None: ...

    def resume(self, turn: TurnId, cached_tokens: int, slots: Sequence[int]) -> None: ...

    def stop(self, turn: TurnId, reason: StopReason) -> None: ...


class Mover:
    """Copies end on the next round of the loop, well, unless it is `stuck`."""

    def __init__(self) -> None:
        self.is_stuck = False
        self.waiting: deque[tuple[StartTransfer, Callable[[TransferDone], None]]] = deque()

    def start(self, action: StartTransfer, done: Callable[[TransferDone], None]) -> None:
        if self.is_stuck:
            self.waiting.append((action, done))
        else:
            asyncio.get_running_loop().call_soon(done, TransferDone(action.transfer, len(action.keys)))

    def hurry(self, transfer: TransferId) -> None: ...

    def go_on(self) -> None:
        self.is_stuck = False
        for action, done in self.waiting:
            asyncio.get_running_loop().call_soon(done, TransferDone(action.transfer, len(action.keys)))
        self.waiting.clear()

    def cancel(self, transfer: TransferId) -> None:
        for action, done in list(self.waiting):
            if action.transfer == transfer:
                self.waiting.remove((action, done))
                asyncio.get_running_loop().call_soon(done, TransferDone(transfer, 0, TransferEnd.CANCELLED))


class Journal:
    """Keeps what it is told; `erased` says when slots are."""

    def __init__(self) -> None:
        self.blocks: dict[int, RecordedBlock] = {}
        self.erasing: list[tuple[tuple[int, ...], Callable[[], None]]] = []

    def record(self, blocks: tuple[RecordedBlock, ...]) -> None:
        self.blocks.update((block.slot, block) for block in blocks)

    def forget(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            del self.blocks[slot]

    def erase(self, slots: tuple[int, ...], done: Callable[[], None]) -> None:
        self.forget(slots)
        self.erasing.append((slots, done))


class Prober:
    def __init__(self) -> None:
        self.asked: list[tuple[Tier, Callable[[TierHealth], None]]] = []

    def probe(self, tier: Tier, done: Callable[[TierHealth], None]) -> None:
        self.asked.append((tier, done))


class Rig:
    """A manager with fakes round it, and one finished turn of five blocks."""

    def __init__(self, policy: WritePolicy = WritePolicy.ON_PRESSURE, dram_slots: int = 16) -> None:
        self.engine, self.mover, self.journal, self.prober = Engine(), Mover(), Journal(), Prober()
        config = PlannerConfig(
            hbm_slots=16,
            block_tokens=BLOCK_TOKENS,
            max_running=4,
            max_queue=4,
            age_limit_seconds=10.0,
            dram_slots=dram_slots,
            nvme_slots=16,
            nvme_write_policy=policy,
            clean_share=0.0,
            wake_deadline_seconds=0.01,
            probe_seconds=0.01,
            late_reads_until_off=1,
        )
        self.manager = TierManager(
            Planner(config),
            self.engine,
            max_context=64,
            mover=self.mover,
            journal=self.journal,
            prober=self.prober,
        )

    def spec(self, tokens: int = 5 * BLOCK_TOKENS + 1) -> TurnSpec:
        return TurnSpec(array("I", range(tokens)), 1, SPACE, None)

    def keys(self) -> list[BlockKey]:
        return chain.extend(None, array("I", range(5 * BLOCK_TOKENS)), BLOCK_TOKENS, SPACE)

    async def run_turn(self) -> None:
        """A turn that computes five blocks and ends, and its branch."""
        await self.manager.acquire(self.spec())
        self.finish_turn()
        self.record()

    def finish_turn(self) -> None:
        progress = TurnProgress(self.engine.started[-1], 5 * BLOCK_TOKENS + 1, [7], stopped=StopReason.STOP)
        self.manager.step_ended(StepReport([progress], seconds=0.1, prefill_tokens=21))

    def record(self) -> None:
        self.manager.record_branch(BranchRecorded(self.keys()[-1]))

    def tiers(self) -> dict[Tier, int]:
        return self.manager.blocks_by_tier(self.keys())

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not reached():  # noqa: ASYNC110 - the planner has no event for it
                await asyncio.sleep(0.001)
        self.manager.check()


async def test_a_session_sleeps_on_nvme_is_journalled_and_erased_when_it_is_forgotten() -> None:
    it = Rig()
    await it.run_turn()
    assert await it.manager.sleep(it.keys(), Tier.NVME) == 5 * BLOCK_TOKENS
    assert it.tiers() == {Tier.HBM: 0, Tier.DRAM: 0, Tier.NVME: 5}
    assert [it.journal.blocks[slot].key for slot in sorted(it.journal.blocks)] == it.keys()
    assert [block.first_block for block in it.journal.blocks.values()] == [0, 1, 2, 3, 4]
    it.manager.forget([it.keys()[-1]], [it.keys()])
    assert it.journal.blocks == {}
    assert it.manager.snapshot().tier(Tier.NVME).erasing == 5
    for _, done in it.journal.erasing:
        done()
    assert it.manager.snapshot().tier(Tier.NVME).free == 16


async def test_what_a_journal_kept_is_taken_over_by_the_next_manager() -> None:
    before, after = Rig(), Rig()
    await before.run_turn()
    await before.manager.sleep(before.keys(), Tier.NVME)
    after.manager.take_over(
        [(it.key, it.parent, it.first_block, it.slot, 0.0) for it in before.journal.blocks.values()]
    )
    lease = await after.manager.acquire(after.spec())
    assert lease.grant.reused[Tier.NVME] == 5 * BLOCK_TOKENS


async def test_a_drain_copies_down_what_is_dirty_and_tells_how_much_is_left() -> None:
    it = Rig()
    it.mover.is_stuck = True
    lease = await it.manager.acquire(it.spec())
    told: list[int] = []
    drain = asyncio.create_task(it.manager.drain(10.0, told.append))
    await asyncio.sleep(0)
    it.finish_turn()
    with contextlib.suppress(StopAsyncIteration):
        await anext(lease.pieces())
    it.record()  # as whoever read the last piece does
    await it.until(lambda: told == [5])
    it.mover.go_on()
    await drain
    assert it.tiers()[Tier.NVME] == 5
    assert it.manager.snapshot().dirty_blocks == 0


async def test_a_drain_ends_in_time_with_a_disk_that_hangs() -> None:
    it = Rig()
    await it.run_turn()
    it.mover.is_stuck = True
    async with asyncio.timeout(5.0):
        await it.manager.drain(0.05)
    assert it.manager.snapshot().dirty_blocks == 5


async def test_a_tier_whose_reads_hang_is_probed_until_it_works() -> None:
    it = Rig(dram_slots=0)
    await it.run_turn()
    await it.manager.sleep(it.keys(), Tier.NVME)
    it.mover.is_stuck = True
    await it.manager.acquire(it.spec())
    assert it.manager.snapshot().tier(Tier.NVME).health is TierHealth.OFF
    await it.until(lambda: len(it.prober.asked) == 1)
    tier, done = it.prober.asked[0]
    done(TierHealth.OFF)
    await it.until(lambda: len(it.prober.asked) == 2)
    done(TierHealth.OK)
    assert (tier, it.manager.snapshot().tier(Tier.NVME).health) == (Tier.NVME, TierHealth.OK)
