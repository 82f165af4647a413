"""Rounds on one directory: a process is started, killed, looked after, and followed by the next.

What is known of a directory from outside is what its processes said before they were killed: turns that ended, talks
that were deleted. After each kill the files are held against it; while the next one runs, its words against a control
that never stored anything. Everything follows from `seed`, but for what the machine's clocks decide.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from app.disk import verify
from kvstore import catalog_reading as reading
from kvstore.events import WritePolicy
from kvstore.nvme_dir import NvmeDirectory, holder
from tests.crash.points import POINTS, Ledger, Plan, note_erased
from tests.crash.store import SEGMENT_SLOTS, Form, files_of
from tests.crash.talk import Talk

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
NUM_TALKS = 40
OPEN_SECONDS = 60.0
POINT_SECONDS = 4.0
"""A point that is not reached by then is not in this round: it is killed all the same."""

_FAULT = re.compile(r"digests, slot (\d+): (stale|corrupt)")


@dataclass(slots=True)
class Known:
    """What the outside has been told so far."""

    seed: int
    turns: dict[int, int] = field(default_factory=dict)  # by talk: how many have ended
    deleted: set[int] = field(default_factory=set)
    uncertain: set[int] = field(default_factory=set)  # to be deleted, and nobody said that it was
    next_talk: int = 0
    talks: dict[int, Talk] = field(default_factory=dict)

    def fill(self) -> None:
        while len(self.turns) < NUM_TALKS:
            self.turns[self.next_talk] = 0
            self.next_talk += 1

    def take(self, line: dict[str, Any]) -> None:
        """Note a line that a process wrote; a word that the control did not say is a failure."""
        match line["what"]:
            case "turn":
                number, turn = line["talk"], line["turn"]
                talk = self.talks.setdefault(number, Talk(self.seed, number))
                assert line["said"] == talk.answer(turn), f"talk {number} said something else in turn {turn}"
                self.turns[number] = turn + 1
                self.next_talk = max(self.next_talk, number + 1)
            case "deleting":
                self.turns.pop(line["talk"], None)
                self.uncertain.add(line["talk"])
            case "deleted":
                self.uncertain.discard(line["talk"])
                self.deleted.add(line["talk"])


@dataclass(slots=True)
class Seen:
    """Over all rounds, so that a test can tell that there was something to see."""

    reached: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    first_reused: Counter[str] = field(default_factory=Counter)
    """Tokens by tier, of first turns after a kill."""
    found: int = 0
    broken: int = 0
    """Slots that do not hold what the catalog says, since their files were deleted."""
    under_way: int = 0
    sound: int = 0
    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        each = sorted(self.seconds)
        return (
            f"{len(each)} rounds, median {each[len(each) // 2]:.2f} s and {each[-1]:.2f} s at most; "
            f"killed at {dict(self.reached)}; {self.turns} turns, first ones after a kill reused "
            f"{dict(self.first_reused)} tokens; {self.sound} blocks found sound, {self.broken} lost with their files, "
            f"{self.under_way} cut in writing"
        )


class Child:
    """One process that lives to be killed."""

    def __init__(self, plan: dict[str, Any], log: Path) -> None:
        self._log = log.open("ab")
        self._lines: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.life", json.dumps(plan)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):
                self._lines.put(json.loads(line))
        self._lines.put({"what": "end"})

    def until(self, what: tuple[str, ...], seconds: float) -> Iterator[dict[str, Any]]:
        """Lines, up to the one that is of these, or the end, or `seconds` from now."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return
            yield line
            if line["what"] in (*what, "end"):
                return

    def drain(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"drain\n")
            self._process.stdin.flush()

    def kill(self) -> int:
        """End it, wherever it is; its exit status."""
        self._process.kill()
        return self.wait()

    def wait(self) -> int:
        status = self._process.wait(60.0)
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return status

    def rest(self) -> Iterator[dict[str, Any]]:
        """What it wrote and nobody has read, after its end."""
        while not self._lines.empty():
            yield self._lines.get()


class Chain:
    """Rounds, one after the other, in `place`."""

    def __init__(self, place: Path, seed: int) -> None:
        self.seen = Seen()
        self._place = place
        self._seed = seed
        self._root = place / "nvme"
        self._journal = place / "writes"
        self._log = place / "stderr"
        self._known = Known(seed)
        self._number = 0
        self._deleted: set[int] = set()  # slots whose files were deleted under the catalog

    def round(self) -> None:
        """One process, killed, and a look at what it left."""
        started = time.monotonic()
        chance = random.Random(f"{self._seed} {self._number}")
        plan, form = self._planned(chance), self._formed(chance)
        try:
            self._run(plan, form, chance)
            self._audit(form)
        except BaseException as error:
            where = f"round {self._number} of seed {self._seed}, in {self._place}: {plan}, {form}"
            error.add_note(f"{where}\n{self._tail()}")
            raise
        self._number += 1
        self.seen.seconds.append(time.monotonic() - started)

    def last(self) -> None:
        """A process that is left alone: every talk goes on, and at the end nobody holds any slot."""
        form = Form()
        try:
            child = self._start(Plan("none"), form, is_last=True)
            lines = self._take(child.until(("idle",), OPEN_SECONDS))
            assert child.wait() == 0
            assert lines[-1]["what"] == "idle"
            assert lines[-1]["free"] + lines[-1]["valid"] == lines[-1]["capacity"]
            self._audit(form)
        except BaseException as error:
            error.add_note(f"after {self._number} rounds of seed {self._seed}, in {self._place}\n{self._tail()}")
            raise

    def _planned(self, chance: random.Random) -> Plan:
        """Each point once in as many rounds as there are points, in an order of its own."""
        order = list(POINTS)
        random.Random(f"{self._seed} order {self._number // len(order)}").shuffle(order)
        point = order[self._number % len(order)]
        seconds = {"anywhere": 0.8, "commit": 0.0005, "drain": 0.03}.get(point, 0.002) * chance.random()
        most = {"resize": 2, "zero": 3, "drain write": 3, "read": 15}.get(point, 60)
        return Plan(point, 1 + chance.randrange(most), chance.random(), seconds)

    def _formed(self, chance: random.Random) -> Form:
        policies = [WritePolicy.EVERY_TURN] * 3 + [WritePolicy.ON_IDLE, WritePolicy.ON_PRESSURE]
        return Form(
            dram_slots=chance.choice([30, 30, 12, 0]),
            nvme_slots=chance.choice([200, 200, 120]),
            policy=chance.choice(policies).value,
            io="auto" if chance.random() < 0.5 else "buffered",
        )

    def _start(self, plan: Plan, form: Form, *, is_last: bool = False) -> Child:
        self._known.fill()
        if plan.point == "resize":
            self._delete_files()
        return Child(
            {
                "root": str(self._root),
                "journal": str(self._journal),
                "form": form.as_json(),
                "plan": asdict(plan),
                "seed": self._seed,
                "turns": self._known.turns,
                "next_talk": self._known.next_talk,
                "chance": f"{self._seed} {self._number}",
                "is_last": is_last,
            },
            self._log,
        )

    def _delete_files(self) -> None:
        """All of slots but the first: where they are all there already, none is made."""
        for path in sorted(self._root.glob("*/slabs/*.kv"))[1:]:
            path.unlink()
            first = int(path.stem) * SEGMENT_SLOTS
            self._deleted.update(range(first, first + SEGMENT_SLOTS))
            note_erased(self._journal, range(first, first + SEGMENT_SLOTS))

    def _run(self, plan: Plan, form: Form, chance: random.Random) -> None:
        child = self._start(plan, form)
        try:
            self._check_open(self._take(child.until(("open",), OPEN_SECONDS)), form)
            if plan.point == "anywhere":
                self._take(child.until((), plan.seconds))
                self.seen.reached["anywhere"] += 1
            elif plan.point.startswith("drain"):
                self._take(child.until((), 0.3 + chance.random() * 0.3))
                child.drain()
                end = "draining" if plan.point == "drain" else "at"
                lines = self._take(child.until((end,), POINT_SECONDS))
                self.seen.reached[plan.point] += any(line["what"] == end for line in lines)
                self._take(child.until((), plan.seconds))
            else:
                lines = self._take(child.until(("at",), POINT_SECONDS))
                self.seen.reached[plan.point] += any(line["what"] == "at" for line in lines)
                self._take(child.until((), plan.seconds))
        finally:
            status = child.kill()
        self._take(child.rest())
        self.seen.reached["commit"] += plan.point == "commit" and status == -signal.SIGKILL
        # A drain may have been quicker than the kill.
        assert status == -signal.SIGKILL or (status == 0 and plan.point.startswith("drain")), f"it ended with {status}"

    def _take(self, lines: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        taken: list[dict[str, Any]] = []
        for line in lines:
            is_first = line["what"] == "turn" and not any(each["what"] == "turn" for each in taken)
            if is_first:
                self.seen.first_reused.update(line["reused"])
            self.seen.turns += line["what"] == "turn"
            self._known.take(line)
            taken.append(line)
        return taken

    def _check_open(self, lines: list[dict[str, Any]], form: Form) -> None:
        assert lines
        assert lines[-1]["what"] == "open", "it did not start"
        counts = lines[-1]
        assert counts["free"] + counts["valid"] + counts["erasing"] == counts["capacity"] == form.nvme_slots
        assert counts["file_bytes"] == counts["held_bytes"] <= form.quota_bytes
        self.seen.found += counts["found"]

    def _audit(self, form: Form) -> None:
        """What lies there is what was said, and every block that is listed is whole, unless its slot was given away."""
        assert holder(self._root) is None, "the killed process's lock is still there"
        directory = NvmeDirectory(self._root, keep_free_share=0.0)
        directory.open()
        try:
            files = sum(path.stat().st_size for path in self._root.glob("*/slabs/*"))
            assert files == directory.bytes_held <= form.quota_bytes
            self._check_sessions(directory)
            self._check_blocks(directory)
        finally:
            directory.close()

    def _check_sessions(self, directory: NvmeDirectory) -> None:
        there = {session.id: session.turns for session in reading.listing(directory.catalog)}
        for number, turns in self._known.turns.items():
            assert there.get(f"talk-{number}", 0) >= turns, f"talk {number} was at turn {turns}, and is not any more"
        back = [number for number in self._known.deleted if f"talk-{number}" in there]
        assert not back, f"talks {back} were deleted, and are back"

    def _check_blocks(self, directory: NvmeDirectory) -> None:
        ledger = Ledger(self._journal)
        (folder,) = reading.folders(directory.catalog)
        with files_of(directory) as store:
            verdict = verify(directory, directory.catalog, (folder, store))
        for fault in verdict.faults:
            named = _FAULT.fullmatch(fault)
            assert named is not None, fault
            slot = int(named[1])
            key = reading.key_at(directory.catalog, folder.number, slot)
            assert key is not None
            assert slot in self._deleted, fault
            assert ledger.may_be_broken(slot, key.hex()), f"{fault}, and it was to hold {key.hex()}"
        self.seen.broken += len(verdict.faults)
        self.seen.under_way += len(ledger.under_way)
        self.seen.sound += verdict.blocks["ok"]

    def _tail(self) -> str:
        """The end of what processes said of themselves."""
        return self._log.read_text()[-4000:] if self._log.exists() else ""


def main() -> None:
    """`python -m tests.crash.rounds PLACE SEED ROUNDS`, to see one chain again."""
    chain = Chain(Path(sys.argv[1]), int(sys.argv[2]))
    os.makedirs(sys.argv[1], exist_ok=True)
    for number in range(int(sys.argv[3])):
        chain.round()
        print(number, chain.seen.reached, f"{chain.seen.seconds[-1]:.2f} s", flush=True)
    chain.last()
    print(chain.seen)


if __name__ == "__main__":
    main()
