"""Does waking branches before their turn pay? An agentic trace replayed through the planner, under a virtual clock.

    python bench/returns.py TRACE.jsonl.gz [--sessions 200] [--hbm 1.5M] [--dram 6M] [--nvme 60M] [--hours 2]

TRACE has one session a line, with `requests` of `in` and `out` tokens, `hit_prev` (tokens shared
with the request before) and `think_time` seconds. Sizes are in tokens. Costs are those of an 8B
model in bf16 (128 KiB a token) on one large GPU, so everything printed is simulated: 50 GB/s between
HBM and DRAM, 13 from one drive and 6 to it, 20,000 tokens a second of prefill, 50 of decode.

Two runs, with and without prediction, and what they differ in: the share of woken branches whose
turn found them in HBM, bytes read from DRAM and NVMe, and how long turns waited for their blocks.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import itertools
import json
from collections import defaultdict
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from bench.planner_scale import percentile
from kvstore.config import PlannerConfig
from kvstore.events import (
    BranchRecorded,
    Event,
    Fill,
    GrantTurn,
    RefuseTurn,
    StartTransfer,
    StepEnded,
    SuspendTurn,
    TransferDone,
    TurnArrived,
    TurnStopped,
    WritePolicy,
)
from kvstore.planner import Planner
from kvstore.types import BlockKey, StopReason, Tier, TurnId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_TOKENS = 1_024
BLOCK_BYTES = BLOCK_TOKENS * 128 * 1_024
BYTES_PER_SECOND = {
    (Tier.DRAM, Tier.HBM): 50e9,
    (Tier.HBM, Tier.DRAM): 50e9,
    (Tier.NVME, Tier.DRAM): 13e9,
    (Tier.NVME, Tier.HBM): 13e9,
    (Tier.DRAM, Tier.NVME): 6e9,
    (Tier.HBM, Tier.NVME): 6e9,
}
PREFILL_TOKENS_PER_SECOND = 20_000.0
DECODE_TOKENS_PER_SECOND = 50.0
START_SECONDS = 1_800.0
"""Sessions begin one after the other within this."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of the trace; tokens, and seconds since the turn before was answered."""

    prompt: int
    output: int
    shared: int
    gap: float


@dataclass(slots=True)
class Session:
    """One session as it is replayed: `chain` are the keys of what its branch holds."""

    requests: Iterator[Request]
    chain: list[BlockKey] = field(default_factory=list)
    tip: BlockKey | None = None


class Replay:
    """The planner in virtual time."""

    def __init__(self, config: PlannerConfig) -> None:
        self.planner = Planner(config)
        self.now = 0.0
        self.waits: list[float] = []
        self.refused = self.num_suspended = 0
        self._running: dict[TurnId, GrantTurn] = {}
        self._moments: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._way_is_free_at: dict[tuple[Tier, Tier], float] = defaultdict(float)
        self._turns: dict[TurnId, tuple[Session, Request]] = {}
        self._timer = float("inf")

    def at(self, moment: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._moments, (moment, next(self._serial), what))

    def run(self, sessions: list[Session], until: float) -> None:
        """Replay until all have ended, or the clock says `until`."""
        for number, session in enumerate(sessions):
            self.at(START_SECONDS * number / len(sessions), lambda session=session: self._next_turn(session))  # type: ignore[misc]
        while self._moments and self._moments[0][0] < until:
            self.now, _, what = heapq.heappop(self._moments)
            what()

    def _next_turn(self, session: Session) -> None:
        request = next(session.requests, None)
        if request is None:
            return
        kept = min(request.shared // BLOCK_TOKENS, len(session.chain))
        new = (request.prompt + request.output - 1) // BLOCK_TOKENS - kept
        fresh = [BlockKey(blake2b(str(next(self._serial)).encode(), digest_size=16).digest()) for _ in range(new)]
        session.chain = session.chain[:kept] + fresh
        turn = TurnId(next(self._serial))
        self._turns[turn] = session, request
        looked_up = (request.prompt - 1) // BLOCK_TOKENS
        self._feed(TurnArrived(turn, tuple(session.chain[:looked_up]), request.prompt, request.output))

    def _granted(self, grant: GrantTurn) -> None:
        _, request = self._turns[grant.turn]
        self.waits.append(grant.wake_seconds)
        self._running[grant.turn] = grant
        prefill = (request.prompt - grant.cached_tokens) / PREFILL_TOKENS_PER_SECOND
        self.at(self.now + prefill + request.output / DECODE_TOKENS_PER_SECOND, lambda: self._ended(grant))

    def _ended(self, grant: GrantTurn) -> None:
        if self._running.get(grant.turn) is not grant:
            return  # it was suspended meanwhile
        del self._running[grant.turn]
        session, request = self._turns.pop(grant.turn)
        first = grant.cached_tokens // BLOCK_TOKENS
        keys = session.chain[: min(len(session.chain), len(grant.slots))]
        fills = tuple(Fill(grant.turn, index, keys[index]) for index in range(first, len(keys)))
        self._feed(StepEnded(fills, (TurnStopped(grant.turn, StopReason.STOP, request.prompt + request.output),)))
        tip = keys[-1] if keys else None
        self._feed(BranchRecorded(tip, session.tip))
        session.tip = tip
        following = next(session.requests, None)
        if following is not None:
            session.requests = itertools.chain([following], session.requests)
            self.at(self.now + following.gap, lambda: self._next_turn(session))

    def _suspended(self, turn: TurnId) -> None:
        """What it had computed is lost, for simplicity: it begins again when it is granted again."""
        if self._running.pop(turn, None) is not None:
            prompt = self._turns[turn][1].prompt
            self.num_suspended += 1
            self._feed(StepEnded((), (TurnStopped(turn, StopReason.SUSPENDED, prompt),)))

    def _feed(self, event: Event) -> None:
        for action in self.planner.handle(event, self.now):
            self._do(action)
        self._set_timer()

    def _do(self, action: object) -> None:
        match action:
            case GrantTurn():
                self._granted(action)
            case RefuseTurn():
                self.refused += 1
                del self._turns[action.turn]
            case SuspendTurn():
                self.at(self.now, lambda: self._suspended(action.turn))
            case StartTransfer():
                way = action.source, action.target
                start = max(self.now, self._way_is_free_at[way])
                end = start + len(action.keys) * BLOCK_BYTES / BYTES_PER_SECOND[way]
                self._way_is_free_at[way] = end
                self.at(end, lambda: self._feed(TransferDone(action.transfer, len(action.keys))))

    def _set_timer(self) -> None:
        due = self.planner.next_timeout()
        if due is not None and (due < self._timer or self._timer <= self.now):
            self._timer = due
            self.at(max(due, self.now), self._timeout)

    def _timeout(self) -> None:
        self._timer = float("inf")
        for action in self.planner.handle_timeout(self.now):
            self._do(action)
        self._set_timer()


def read(trace: Path, sessions: int, least_tokens: int) -> list[Session]:
    """The first `sessions` of the trace; a request that could never fit ends its session."""
    found: list[Session] = []
    with gzip.open(trace, "rt") as lines:
        for line in lines:
            requests, before = [], 0.0
            for each in json.loads(line)["requests"]:
                if "in" not in each:
                    continue
                if each["in"] + each["out"] + BLOCK_TOKENS > least_tokens:
                    break
                gap = each.get("think_time")
                gap = max(0.0, each["t"] - before) if gap is None else gap
                before = each["t"] + each.get("api_time", 0.0)
                requests.append(Request(max(2, each["in"]), max(1, each["out"]), each["hit_prev"], gap))
            if len(requests) > 1:
                found.append(Session(iter(requests)))
            if len(found) == sessions:
                break
    return found


def replay(arguments: argparse.Namespace, predict: bool) -> Replay:
    config = PlannerConfig(
        hbm_slots=arguments.hbm // BLOCK_TOKENS,
        dram_slots=arguments.dram // BLOCK_TOKENS,
        nvme_slots=arguments.nvme // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        max_running=64,
        max_queue=10_000,
        age_limit_seconds=60.0,
        output_slice_tokens=16 * BLOCK_TOKENS,
        wake_deadline_seconds=60.0,
        demote_deadline_seconds=60.0,
        slot_bytes=BLOCK_BYTES,
        nvme_write_policy=WritePolicy.EVERY_TURN,
        cost_gate="off",
        predict_returns=predict,
        predict_lead_seconds=arguments.lead,
    )
    it = Replay(config)
    it.run(read(arguments.trace, arguments.sessions, arguments.hbm // 4), arguments.hours * 3_600.0)
    return it


def tell(name: str, it: Replay) -> None:
    totals = it.planner.snapshot().totals
    waits = [wait for wait in it.waits if wait > 0.0] or [0.0]
    print(
        f"{name}: {totals.turns_granted} turns, {totals.reused} blocks reused, {totals.published} computed, "
        f"{totals.evicted} last copies evicted; loaded {totals.loaded}, of them from NVMe {totals.nvme_blocks_read}; "
        f"{len(waits)} turns waited for blocks, p50 {percentile(waits, 0.5) * 1e3:.0f} ms, "
        f"p95 {percentile(waits, 0.95) * 1e3:.0f} ms, mean over all turns {sum(waits) / len(it.waits) * 1e3:.1f} ms; "
        f"{it.num_suspended} suspended, {it.refused} refused"
    )


def tokens(text: str) -> int:
    return int(float(text.rstrip("M")) * 1e6) if text.endswith("M") else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--hbm", type=tokens, default=tokens("3M"))
    parser.add_argument("--dram", type=tokens, default=tokens("8M"))
    parser.add_argument("--nvme", type=tokens, default=tokens("100M"))
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--lead", type=float, default=1.0, help="seconds by which a branch is woken early")
    arguments = parser.parse_args()
    without, with_it = replay(arguments, predict=False), replay(arguments, predict=True)
    tell("on arrival", without)
    tell("predicted ", with_it)
    before, after = without.planner.snapshot().totals, with_it.planner.snapshot().totals
    used = after.predictions_used / max(1, after.predictions)
    read = after.loaded / max(1, before.loaded) - 1
    from_nvme = after.nvme_blocks_read / max(1, before.nvme_blocks_read) - 1
    print(
        f"predicted wakes: {after.predictions}, used {after.predictions_used} ({used:.0%}); "
        f"blocks read {read:+.1%}, from NVMe {from_nvme:+.1%}"
    )


if __name__ == "__main__":
    main()
