"""`make torture`: rounds of tests.crash with the real server and the embedded model, over HTTP.

    make torture                                200 rounds: about 15 s each on two cores, most of it start-up
    make torture ARGS="--rounds 3 --seed 7"     what a failure says, to see it again

First a server that is never killed and keeps nothing below HBM tells every conversation once: the control. Then, round
by round on one directory, clients talk, put sessions to sleep and delete some, until the server is killed at the
planned point. After each kill `store verify` finds every listed block whole, but for slots that were given to another
block since; what was answered is in the catalog, what was deleted is not; files keep within the quota.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from app.disk import verify
from kvstore import catalog_reading as reading
from kvstore.nvme_dir import NvmeDirectory
from tests.crash.points import Plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]
MIB = 1024**2
NUM_TALKS, NUM_TURNS, ANSWER_TOKENS = 12, 4, 8
CLIENTS = 6
START_SECONDS, POINT_SECONDS, ANSWER_SECONDS = 180.0, 30.0, 300.0
QUOTA_BYTES = 96 * MIB
POINTS = ("anywhere", "write", "read", "zero", "commit", "drain", "drain write")
SENTENCE = (
    "the of a river stone mouse winter sleeps under old clock kitchen garden letter night train seven blue "
    "because never always asks finds keeps tells why where who small bright paper window bread song island"
)
WORDS = SENTENCE.split()


def question(number: int, turn: int) -> str:
    """What the user of a conversation says."""
    chance = random.Random(f"torture {number} {turn}")
    return " ".join(chance.choice(WORDS) for _ in range(chance.randrange(10, 60))) + "?"


@dataclass(slots=True)
class Talk:
    """One conversation as its client knows it; deleted, it is told again by a session of another id."""

    number: int
    generation: int = 0
    turns: int = 0
    is_busy: bool = False

    @property
    def id(self) -> str:
        return f"talk-{self.number}-{self.generation}"

    def messages(self, control: list[list[str]]) -> list[dict[str, str]]:
        told = control[self.number]
        said = [question(self.number, turn) for turn in range(self.turns + 1)]
        messages = [{"role": "user", "content": said[0]}]
        for answer, follow_up in zip(told, said[1:], strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
        return messages


class Server:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.opened: dict[str, Any] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, place: Path, plan: Plan, **settings: object) -> AsyncIterator[Server]:
        """Up to the moment it answers; killed at the end, if it still runs."""
        wanted = {"journal": str(place / "writes"), "plan": asdict(plan), "settings": settings}
        with (place / "stderr").open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.crash.server", json.dumps(wanted)),
                cwd=ROOT,
                env=os.environ | {"GOMP_SPINCOUNT": "20000"},
                stdout=PIPE,
                stderr=errors,
            )
        it = cls(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                it.opened = await it.line()
            assert it.opened["what"] == "open", "the server did not start"
            yield it
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def line(self) -> dict[str, Any]:
        """What it says next; "end" when it can say nothing more."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"what": "end"}
        return found

    async def until_point(self, seconds: float) -> bool:
        """Wait for the planned point, which in a commit is the process's end; False if it did not come in time."""
        try:
            async with asyncio.timeout(seconds):
                found = await self.line()
        except TimeoutError:
            return False
        return found["what"] == "at" or await self.process.wait() == -signal.SIGKILL


async def ask(http: httpx.AsyncClient, talk_id: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    """A turn's answer, and what was told of its session.

    Raises:
        httpx.HTTPError: the server is gone, or going.
    """
    body = {
        "messages": messages,
        "session_id": talk_id,
        "temperature": 0.0,
        "max_tokens": ANSWER_TOKENS,
        "model": "torture",
    }
    reply = await http.post("/v1/chat/completions", json=body)
    if reply.status_code == 503:
        raise httpx.RemoteProtocolError("it drains")
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return found["choices"][0]["message"]["content"], found["session"]


def client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.opened["url"], timeout=ANSWER_SECONDS, trust_env=False)


async def told_undisturbed(place: Path) -> list[list[str]]:
    """The answers of every conversation."""
    control: list[list[str]] = [[] for _ in range(NUM_TALKS)]
    async with (
        Server.started(place, Plan("none"), **common(256), dram_bytes=0, nvme_bytes=0) as server,
        client(server) as http,
        asyncio.TaskGroup() as group,
    ):

        async def tell(number: int) -> None:
            for turn in range(NUM_TURNS):
                talk = Talk(number, turns=turn)
                answer, _ = await ask(http, talk.id, talk.messages(control))
                control[number].append(answer)

        for number in range(NUM_TALKS):
            group.create_task(tell(number))
    return control


def common(hbm_mib: int) -> dict[str, Any]:
    # Exact: else a word might depend on which turns were computed together.
    return {
        "hbm_bytes": hbm_mib * MIB,
        "attention": "exact",
        "cost_gate": "off",
        "served_model_name": ["torture"],
        "drain_seconds": 10.0,
    }


@dataclass(slots=True)
class Torture:
    """The rounds of one seed."""

    place: Path
    seed: int
    control: list[list[str]]
    talks: list[Talk] = field(default_factory=lambda: [Talk(number) for number in range(NUM_TALKS)])
    deleted: set[str] = field(default_factory=set)
    reached: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    sound: int = 0

    @property
    def root(self) -> Path:
        return self.place / "nvme"

    async def round(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        plan = self._planned(number, chance)
        try:
            await self._run(plan, chance)
            await asyncio.to_thread(self._audit)
        except BaseException as error:
            errors = (self.place / "stderr").read_text()[-4000:]
            error.add_note(f"round {number} of seed {self.seed}, in {self.place}: {plan}\n{errors}")
            raise

    def _planned(self, number: int, chance: random.Random) -> Plan:
        order = list(POINTS)
        random.Random(f"{self.seed} order {number // len(order)}").shuffle(order)
        point = order[number % len(order)]
        seconds = {"anywhere": 10.0, "commit": 0.001, "drain": 0.5}.get(point, 0.005) * chance.random()
        most = {"zero": 2, "drain write": 3, "read": 6, "commit": 15}.get(point, 12)
        return Plan(point, 1 + chance.randrange(most), chance.random(), seconds)

    async def _run(self, plan: Plan, chance: random.Random) -> None:
        settings = {
            "dram_bytes": chance.choice([0, 16 * MIB, 32 * MIB]),
            "nvme_bytes": QUOTA_BYTES,
            "nvme_dir": str(self.root),
            "nvme_write_policy": chance.choice(["every-turn", "every-turn", "on-idle", "on-pressure"]),
            "nvme_io": chance.choice(["auto", "buffered"]),
            "nvme_free_share": 0.0,
            "idle_to_nvme_seconds": 0.2,
        }
        async with Server.started(self.place, plan, **common(48), **settings) as server:
            opened = server.opened
            assert opened["counted"] == opened["capacity"], opened
            assert opened["file_bytes"] == opened["held_bytes"] <= QUOTA_BYTES, opened
            clients = [asyncio.create_task(self._talk(server, random.Random(chance.random()))) for _ in range(CLIENTS)]
            if plan.point == "anywhere":
                await asyncio.sleep(plan.seconds)
                self.reached["anywhere"] += 1
            elif plan.point.startswith("drain"):
                await asyncio.sleep(1.0 + 2.0 * chance.random())
                server.process.send_signal(signal.SIGTERM)
                is_reached = plan.point == "drain" or await server.until_point(POINT_SECONDS)
                self.reached[plan.point] += is_reached
                await asyncio.sleep(plan.seconds)
            else:
                self.reached[plan.point] += await server.until_point(POINT_SECONDS)
                await asyncio.sleep(plan.seconds if plan.point != "commit" else 0.0)
            with contextlib.suppress(ProcessLookupError):
                server.process.kill()
            status = await server.process.wait()
            assert status == -signal.SIGKILL or (status == 0 and plan.point.startswith("drain")), status
            await asyncio.gather(*clients)

    async def _talk(self, server: Server, chance: random.Random) -> None:
        """Until the server is gone."""
        async with client(server) as http:
            while True:
                talk = chance.choice([talk for talk in self.talks if not talk.is_busy])
                talk.is_busy = True
                try:
                    await self._step(http, talk, chance)
                except httpx.HTTPError:
                    return
                finally:
                    talk.is_busy = False

    async def _step(self, http: httpx.AsyncClient, talk: Talk, chance: random.Random) -> None:
        if talk.turns == NUM_TURNS or (talk.turns and chance.random() < 0.05):
            await self._delete(http, talk)
            return
        if talk.turns and chance.random() < 0.3:
            tier = chance.choice(["dram", "nvme"])
            await http.post(f"/v1/sessions/{talk.id}/sleep", params={"tier": tier})
        answer, session = await ask(http, talk.id, talk.messages(self.control))
        expected = self.control[talk.number][talk.turns]
        assert answer == expected, f"{talk.id} said {answer!r} in turn {talk.turns}, and not {expected!r}: {session}"
        talk.turns += 1
        self.turns += 1
        self.reused.update(session["reused_tokens"])

    async def _delete(self, http: httpx.AsyncClient, talk: Talk) -> None:
        gone, talk.generation, talk.turns = talk.id, talk.generation + 1, 0  # whatever becomes of it
        reply = await http.delete(f"/v1/sessions/{gone}")
        if reply.status_code == 503:
            raise httpx.RemoteProtocolError("it drains")
        assert reply.is_success, reply.text
        self.deleted.add(gone)

    def _audit(self) -> None:
        directory = NvmeDirectory(self.root, keep_free_share=0.0)
        directory.open()
        try:
            files = sum(path.stat().st_size for path in self.root.glob("*/slabs/*"))
            assert files == directory.bytes_held <= QUOTA_BYTES, files
            there = {session.id: session.turns for session in reading.listing(directory.catalog)}
            for talk in self.talks:
                assert there.get(talk.id, 0) >= talk.turns, f"{talk.id} was at turn {talk.turns}, and is not any more"
            assert not self.deleted & there.keys(), self.deleted & there.keys()
            verdict = verify(directory, directory.catalog)
            assert not verdict.faults, verdict.faults
            self.sound += verdict.blocks["ok"]
        finally:
            directory.close()


async def main() -> None:
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--dir", type=Path, help="where the sessions lie; by default a new folder for temporary files")
    options = parser.parse_args()
    place = options.dir or Path(tempfile.mkdtemp(prefix="dormouse-torture-"))
    place.mkdir(parents=True, exist_ok=True)
    assert not (place / "nvme").exists(), f"{place} holds an earlier run: what its sessions were is not known here"
    print(f"seed {options.seed}, in {place}; telling {NUM_TALKS} conversations undisturbed", flush=True)
    started = time.monotonic()
    it = Torture(place, options.seed, await told_undisturbed(place))
    print(f"control told in {time.monotonic() - started:.0f} s", flush=True)
    for number in range(options.rounds):
        begun = time.monotonic()
        await it.round(number)
        now = time.monotonic()
        left = (now - started) / (number + 1) * (options.rounds - number - 1)
        print(
            f"round {number + 1} of {options.rounds}: {now - begun:.1f} s, {it.turns} turns, "
            f"reused {dict(it.reused)}, {it.sound} blocks sound, reached {dict(it.reached)}; "
            f"{left / 60:.0f} min left",
            flush=True,
        )
    print(f"{options.rounds} rounds of seed {options.seed}: no word wrong, no session lost, no slot either")


if __name__ == "__main__":
    asyncio.run(main())
