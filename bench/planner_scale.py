"""How fast the planner decides when 100,000 sessions sleep.

    python bench/planner_scale.py [--sessions 100000] [--blocks 10] [--turns 20000] [--curve] [--nvme] [--tenants N]

Fills the tiers with `sessions` chains of `blocks` blocks behind a shared system prompt, then
lets random sessions come back for turns of 128 block operations (what is looked up, loaded,
published, demoted and evicted all counts once) while copies end a little later. Prints block
operations a second and the percentiles of one `handle()`, garbage collection included. With
`--nvme` DRAM holds a quarter, every turn's branch is recorded and written to NVMe, and at the end
a planner takes over what the catalogue then knows. With `--tenants` the sessions are as many tenants', each with a
system prompt of its own, and the first of them asks for half of all turns.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import time
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

from kvstore.config import PlannerConfig
from kvstore.events import (
    BlocksFound,
    BranchRecorded,
    Event,
    Fill,
    ForgetBlocks,
    FoundBlock,
    GrantTurn,
    RecordBlocks,
    RecordedBlock,
    SlotsErased,
    StartTransfer,
    StepEnded,
    TransferDone,
    TurnArrived,
    TurnStopped,
    WritePolicy,
)
from kvstore.planner import Planner
from kvstore.types import BlockKey, StopReason, TransferId, TurnId

BLOCK_TOKENS = 32
SHARED_BLOCKS = 8


def key(session: int, index: int, tenants: int = 1) -> BlockKey:
    """Key of block `index` of a session; all of one tenant share the first ones."""
    name = (session % tenants << 8) + index if index < SHARED_BLOCKS else (session << 20) + index
    return BlockKey(blake2b(name.to_bytes(8, "little"), digest_size=16).digest())


def _packed(block: RecordedBlock) -> bytes:
    return block.key + (block.parent or bytes(16)) + block.first_block.to_bytes(4, "little")


def _found(slot: int, packed: bytes) -> FoundBlock:
    parent = BlockKey(packed[16:32]) if any(packed[16:32]) else None
    return BlockKey(packed[:16]), parent, int.from_bytes(packed[32:], "little"), slot, 0.0


@dataclass
class Bench:
    """The planner, copies under way, and how long each `handle()` took."""

    planner: Planner
    seconds: list[float] = field(default_factory=list)
    copies: deque[TransferId] = field(default_factory=deque)
    sizes: dict[TransferId, int] = field(default_factory=dict)
    grants: list[GrantTurn] = field(default_factory=list)
    catalogue: dict[int, bytes] = field(default_factory=dict)  # by slot; bytes, so that it costs the collector nothing
    tips: dict[int, BlockKey] = field(default_factory=dict)
    now: float = 0.0
    turn: int = 0
    tenants: int = 1

    def feed(self, event: Event) -> None:
        start = time.perf_counter()
        actions = self.planner.handle(event, self.now)
        self.seconds.append(time.perf_counter() - start)
        for action in actions:
            if isinstance(action, StartTransfer):
                self.copies.append(action.transfer)
                self.sizes[action.transfer] = len(action.keys)
            elif isinstance(action, GrantTurn):
                self.grants.append(action)
            elif isinstance(action, RecordBlocks):
                self.catalogue.update((it.slot, _packed(it)) for it in action.blocks)
            elif isinstance(action, ForgetBlocks):
                for slot in action.slots:
                    self.catalogue.pop(slot, None)
                if action.erase:
                    self.feed(SlotsErased(action.slots))

    def end_copies(self, left: int) -> None:
        """End copies, the oldest first, until `left` are under way."""
        while len(self.copies) > left:
            transfer = self.copies.popleft()
            self.feed(TransferDone(transfer, self.sizes.pop(transfer)))

    def run_turn(self, keys: list[BlockKey], session: int) -> None:
        """A turn of `session` over `keys`; it fills what it does not find, ends, and its branch is recorded."""
        self.now += 0.01
        self.turn += 1
        turn = TurnId(self.turn)
        prompt_tokens = len(keys) * BLOCK_TOKENS + 1
        self.feed(TurnArrived(turn, tuple(keys), prompt_tokens, 16, tenant=f"tenant {session % self.tenants}"))
        while not self.grants:
            self.end_copies(len(self.copies) - 1)
        grant = self.grants.pop()
        self.end_copies(2)
        fills = tuple(Fill(turn, index, keys[index]) for index in range(grant.cached_tokens // BLOCK_TOKENS, len(keys)))
        self.feed(StepEnded(fills, (TurnStopped(turn, StopReason.LENGTH, prompt_tokens),)))
        if self.planner.config.nvme_slots:
            self.feed(BranchRecorded(keys[-1], self.tips.get(session)))
            self.tips[session] = keys[-1]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(sessions: int, blocks: int, turns: int, nvme: bool, tenants: int) -> None:
    """Fill, then time `turns` turns of 128 block operations or as many as a session has."""
    total = sessions * blocks + SHARED_BLOCKS * tenants
    hbm_slots = max(1_024, total // 16)
    config = PlannerConfig(
        hbm_slots=hbm_slots,
        block_tokens=BLOCK_TOKENS,
        max_running=16,
        max_queue=64,
        age_limit_seconds=30.0,
        dram_slots=total // 4 if nvme else total,
        nvme_slots=2 * total if nvme else 0,
        nvme_write_policy=WritePolicy.EVERY_TURN,
    )
    bench = Bench(Planner(config), tenants=tenants)
    depth = dict.fromkeys(range(sessions), SHARED_BLOCKS + blocks)
    for session in range(sessions):
        bench.run_turn([key(session, index, tenants) for index in range(depth[session])], session)
    snapshot = bench.planner.snapshot()
    present = sum(counts.valid for counts in snapshot.tiers)
    bench.seconds.clear()
    gc.collect()
    before = _operations(bench)
    rng = random.Random(0)
    start = time.perf_counter()
    for _ in range(turns):
        session = rng.randrange(sessions)
        if tenants > 1 and rng.random() < 0.5:
            session -= session % tenants
        new = 4
        keys = [key(session, index, tenants) for index in range(depth[session] + new)]
        depth[session] += new
        bench.run_turn(keys, session)
    wall = time.perf_counter() - start
    operations = _operations(bench) - before
    spent = sum(bench.seconds)
    print(
        f"{sessions:>7} sessions, {present:>8} copies: {operations / spent:>9,.0f} block ops/s in handle() "
        f"({operations} in {spent:.2f} s of {wall:.2f} s); handle() p50 {percentile(bench.seconds, 0.5) * 1e3:.3f} ms, "
        f"p99 {percentile(bench.seconds, 0.99) * 1e3:.3f} ms, max {max(bench.seconds) * 1e3:.1f} ms; "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )
    _measure_long_turns(bench, sessions)
    if nvme:
        _measure_take_over(bench)


def _measure_long_turns(bench: Bench, sessions: int) -> None:
    """Turns of exactly 128 blocks: the first computes them, the next ones find them."""
    bench.seconds.clear()
    before = _operations(bench)
    for number in range(2_000):
        session = sessions + number % 500
        bench.run_turn([key(session, index, bench.tenants) for index in range(128)], session)
    operations, spent = _operations(bench) - before, sum(bench.seconds)
    print(
        f"        turns of 128 blocks: {operations / spent:>9,.0f} block ops/s; handle() p50 "
        f"{percentile(bench.seconds, 0.5) * 1e3:.3f} ms, p99 {percentile(bench.seconds, 0.99) * 1e3:.3f} ms, "
        f"max {max(bench.seconds) * 1e3:.1f} ms"
    )


def _measure_take_over(bench: Bench) -> None:
    """A new planner is told what the old one left."""
    found = [_found(slot, packed) for slot, packed in bench.catalogue.items()]
    planner = Planner(bench.planner.config)
    start = time.perf_counter()
    planner.handle(BlocksFound(found), 0.0)
    print(f"        taking over {planner.snapshot().totals.found} blocks: {time.perf_counter() - start:.2f} s")


def _operations(bench: Bench) -> int:
    totals = bench.planner.snapshot().totals
    return (
        totals.reused + totals.published + totals.loaded + totals.demoted + totals.cleaned + totals.sunk
        + totals.released + totals.evicted
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--turns", type=int, default=20_000)
    parser.add_argument("--curve", action="store_true", help="with a hundredth, a tenth and all of the sessions")
    parser.add_argument("--nvme", action="store_true", help="with three tiers")
    parser.add_argument("--tenants", type=int, default=1)
    arguments = parser.parse_args()
    for share in (100, 10, 1) if arguments.curve else (1,):
        measure(arguments.sessions // share, arguments.blocks, arguments.turns, arguments.nvme, arguments.tenants)


if __name__ == "__main__":
    main()
