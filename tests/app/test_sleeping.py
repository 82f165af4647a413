"""A client that leaves, or a server that stops, while copies to and from DRAM are under way: nothing stays held.

The real model behind the real server, with a copy engine that a test can hold.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from app import startup
from app.settings import Settings
from kvstore.tiers.hbm import hbm_store
from kvstore.transfer import Transfers
from kvstore.types import Tier
from kvstore.workers import Workers
from tests.app.live import Live, client, live
from tests.kvstore.stores import Wrapped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from app.gateway import Gateway
    from app.startup import Machinery
    from kvstore.manager import TierManager
    from kvstore.tiers.base import Landed, Run, SlotStore
    from kvstore.types import StepReport

MIB = 1024**2
WAIT_SECONDS = 60.0
CHECKOUT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
LONG = "Tell me of mice and of how they sleep through the winter. " * 16
"""Seven blocks or so."""


class HeldStore(Wrapped):
    """Copies wait while it is held."""

    def __init__(self, store: SlotStore) -> None:
        super().__init__(store)
        self.num_waiting = 0
        self._open = threading.Event()
        self._open.set()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def copy_in(self, run: Run) -> Landed:
        self._pass()
        return super().copy_in(run)

    def copy_out(self, run: Run) -> Landed:
        self._pass()
        return super().copy_out(run)

    def _pass(self) -> None:
        self.num_waiting += 1
        assert self._open.wait(WAIT_SECONDS)
        self.num_waiting -= 1


class Server:
    """A live server and the gate in its copies."""

    def __init__(self, live_server: Live, store: HeldStore) -> None:
        self.live = live_server
        self.store = store
        self.manager: TierManager = live_server.gateway.manager

    def say(self, session_id: str, *, tokens: int = 4, **fields: Any) -> dict[str, Any]:
        with client(self.live) as http:
            response = http.post(CHAT, json=body(session_id, tokens, **fields))
        assert response.status_code == 200, response.text
        session: dict[str, Any] = response.json()["session"]
        return session

    def sleep(self, session_id: str) -> dict[str, Any]:
        with client(self.live) as http:
            told: dict[str, Any] = http.post(f"/v1/sessions/{session_id}/sleep").json()
        return told

    def blocks(self, session_id: str) -> dict[str, int]:
        """Of its branch, by tier."""
        with client(self.live) as http:
            (branch,) = http.get(f"/v1/sessions/{session_id}").json()["branches"]
        blocks: dict[str, int] = branch["blocks"]
        return blocks

    def wait_until_held(self) -> None:
        self.live.wait_until(lambda: self.store.num_waiting > 0)

    def check_idle(self) -> None:
        """Every copy ends, and nothing is held in any tier."""
        self.live.wait_until(lambda: self.manager.snapshot().transfers == 0)
        self.live.check_idle()
        for tier in self.live.call(self.manager.snapshot).tiers:
            assert (tier.pinned, tier.open, tier.filling, tier.quarantined) == (0, 0, 0, 0)


def body(session_id: str, tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{session_id}: {LONG}"}]
    return {"model": "embedded", "messages": messages, "session_id": session_id, "max_tokens": tokens} | fields


@pytest.fixture(scope="module")
def machinery(cache_dir: Path) -> Iterator[Machinery]:
    settings = Settings(
        model="embedded", hbm_bytes=64 * MIB, dram_bytes=64 * MIB, cache_dir=cache_dir, attention="fast"
    )
    loaded = startup.load(settings)
    yield loaded
    loaded.slab.close()


@contextmanager
def serving(machinery: Machinery, **options: Any) -> Iterator[Server]:
    """As startup.opened does it, but for the gate, and for the model and the slab, which outlive it."""
    settings = Settings(model="embedded", served_model_name=("embedded",), **({"drain_seconds": 5} | options))
    store = HeldStore(hbm_store(machinery.runner.arena, machinery.slab.slot_bytes))

    @asynccontextmanager
    async def opened(settings: Settings) -> AsyncIterator[Gateway]:
        loop = asyncio.get_running_loop()

        def on_step(report: StepReport) -> None:
            loop.call_soon_threadsafe(manager.step_ended, report)

        engine = startup.make_engine(settings, machinery, on_step)
        transfers = Transfers(machinery.slab, {Tier.HBM: store}, {Tier.DRAM: Workers("dram-copy", 1)})
        manager = startup.make_manager(settings, machinery, engine, transfers)
        with ThreadPoolExecutor(startup.TEXT_THREADS, "text") as text_threads:
            gateway = startup.make_gateway(settings, machinery, manager, text_threads)
            gateway.metrics.watch_transfers(transfers.traffic)
            engine.open()
            try:
                yield gateway
            finally:
                await manager.drain(settings.drain_seconds)
                await transfers.close(startup.COPIES_END_SECONDS)
                await asyncio.to_thread(engine.close)

    with live(settings, opened) as server:
        try:
            yield Server(server, store)
        finally:
            store.release()


@pytest.fixture(scope="module")
def shared(machinery: Machinery) -> Iterator[Server]:
    with serving(machinery) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """Checked to be idle afterwards, and with a next turn that reuses all that its session has."""
    with client(shared.live) as http:
        http.delete("/v1/sessions")
    shared.live.flush()
    yield shared
    shared.store.release()
    shared.check_idle()


def test_a_client_that_leaves_its_call_to_sleep_changes_nothing_about_the_sleep(server: Server) -> None:
    server.say("s")
    server.store.hold()
    with client(server.live) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/sessions/s/sleep", timeout=0.2)
    server.wait_until_held()
    server.store.release()
    server.check_idle()
    assert server.blocks("s")["hbm"] == 0
    assert server.say("s")["woke_from"] == "dram"


def test_a_sleep_that_is_cancelled_while_it_waits_leaves_nothing_behind(server: Server) -> None:
    server.say("s")
    session = server.live.call(lambda: server.live.gateway.book.get("", "s"))
    assert session is not None
    assert session.latest is not None
    server.store.hold()
    sleeping = asyncio.run_coroutine_threadsafe(server.manager.sleep(session.latest.block_keys), server.live.loop)
    server.wait_until_held()
    sleeping.cancel()
    with pytest.raises(CancelledError):
        sleeping.result(WAIT_SECONDS)
    server.store.release()
    server.check_idle()
    assert server.blocks("s")["hbm"] == 0


@pytest.mark.parametrize("after_lines", [0, 2], ids=["before its first word", "in the middle of its answer"])
def test_a_turn_that_arrives_during_its_own_sleep_and_is_left_gives_everything_back(
    server: Server, after_lines: int
) -> None:
    server.say("s")
    server.store.hold()
    with ThreadPoolExecutor(1) as threads:
        sleeping = threads.submit(server.sleep, "s")
        server.wait_until_held()
        with client(server.live) as http, http.stream("POST", CHAT, json=body("s", 400, stream=True)) as response:
            lines = response.iter_lines()
            for _ in range(after_lines):
                next(lines)
        server.live.wait_until(lambda: server.manager.snapshot().turns.granted == 0)
        assert server.live.call(server.manager.snapshot).transfers > 0, "the copy is still held"
        server.live.call(server.manager.check)
        server.store.release()
        assert sleeping.result(WAIT_SECONDS)["object"] == "session.sleep"
    server.check_idle()
    again = server.say("s")
    assert (again["miss_reason"], again["turn"]) == (None, 2), "the turn that was left is none"


def test_a_turn_left_while_its_session_wakes_gives_everything_back(server: Server) -> None:
    server.say("s")
    assert server.sleep("s")["status"] == "asleep"
    server.store.hold()
    with client(server.live) as http, pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=body("s", 4), timeout=0.3)
    server.wait_until_held()
    server.live.wait_until(lambda: server.manager.snapshot().turns.granted == 0)
    server.store.release()
    server.check_idle()
    assert server.say("s")["miss_reason"] is None


def test_a_turn_that_waits_for_its_place_says_that_the_queue_woke_it(machinery: Machinery) -> None:
    with serving(machinery, max_running=1) as server, ThreadPoolExecutor(2) as threads:
        server.say("sleeper")
        server.say("runner")
        assert server.sleep("sleeper")["status"] == "asleep"
        running = threads.submit(server.say, "runner", tokens=60, ignore_eos=True)
        server.live.wait_until(lambda: server.manager.snapshot().turns.granted == 1)
        # Of a session that nobody knows nothing is woken on arrival; that its prompt is asleep its tokens say.
        waiting = threads.submit(server.say, "stranger", messages=body("sleeper", 4)["messages"])
        running.result(WAIT_SECONDS)
        session = waiting.result(WAIT_SECONDS)
        assert (session["woke_from"], session["wake_trigger"]) == ("dram", "queue")
        assert session["queue_ms"] > session["wake_ms"], "its blocks came while it waited"
        server.check_idle()
        with client(server.live) as http:
            text = http.get("/metrics").text
        assert 'dormouse_wake_seconds_count{source="dram",trigger="queue"} 1.0' in text
        assert "dormouse_sessions 3.0" in text
        assert 'dormouse_transfer_blocks_total{source="dram",target="hbm"} 0.0' not in text


@pytest.mark.parametrize("are_released", [True, False], ids=["copies that end", "copies that hang"])
def test_a_server_that_stops_with_copies_under_way_ends_in_time(machinery: Machinery, are_released: bool) -> None:
    with serving(machinery, drain_seconds=1) as server, ThreadPoolExecutor(1) as threads:
        server.say("s")
        server.store.hold()
        calling = threads.submit(server.sleep, "s")
        server.wait_until_held()
        server.live.stop()
        if are_released:
            server.store.release()
            assert calling.result(WAIT_SECONDS)["status"] == "asleep"
        server.live.thread.join(WAIT_SECONDS)
        assert not server.live.thread.is_alive()
        server.manager.check()
        snapshot = server.manager.snapshot()
        assert (snapshot.turns.granted, snapshot.turns.waiting) == (0, 0)
        if are_released:
            assert snapshot.transfers == 0
            assert all((tier.pinned, tier.open, tier.filling) == (0, 0, 0) for tier in snapshot.tiers)
        else:
            assert calling.exception(WAIT_SECONDS) is not None, "it cannot say that the session sleeps"


def test_sigterm_with_copies_under_way_exits_with_zero_in_time(cache_dir: Path) -> None:
    command = [sys.executable, "-m", "dormouse_gateway", "serve", "--port", "0", "--attention", "fast"]
    command += ["--nvme-bytes", "0"]
    command += ["--hbm-bytes", "128MiB", "--dram-bytes", "128MiB", "--drain-seconds", "5", "--log-format", "json"]
    short = [{"role": "user", "content": LONG[:400]}]
    command += ["--served-model-name", "embedded", "--cache-dir", str(cache_dir)]
    with subprocess.Popen(command, cwd=CHECKOUT, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = _url(process)
            with httpx.Client(base_url=url, timeout=WAIT_SECONDS, trust_env=False) as http:
                for name in "ab":
                    assert http.post(CHAT, json=body(name, 0, messages=short)).status_code == 200
            stopped = threading.Event()
            with ThreadPoolExecutor(2) as threads:
                calls = [threads.submit(_sleep_and_wake, url, name, stopped) for name in "ab"]
                while not all(call.running() for call in calls):
                    pass
                with httpx.Client(base_url=url, trust_env=False) as http:
                    while '{source="dram",target="hbm"} 0.0' in http.get("/metrics").text:
                        pass
                process.send_signal(signal.SIGTERM)
                assert process.wait(WAIT_SECONDS) == 0
                stopped.set()
                assert all(call.result(WAIT_SECONDS) > 0 for call in calls)
        finally:
            process.kill()


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        told = json.loads(line)
        if "url" in told:
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or the pipe fills, and it waits
            return str(told["url"])
    raise AssertionError("it ended before it was ready")


def _sleep_and_wake(url: str, session_id: str, stopped: threading.Event) -> int:
    """Until the server is gone; how often."""
    count = 0
    with httpx.Client(base_url=url, timeout=WAIT_SECONDS, trust_env=False) as http:
        while not stopped.is_set():
            try:
                http.post(f"/v1/sessions/{session_id}/sleep")
                http.post(f"/v1/sessions/{session_id}/wake", json={"wait": True})
            except httpx.HTTPError:
                return count
            count += 1
    return count
