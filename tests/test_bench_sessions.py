"""`bench sessions`: what it makes of a server's answers, and of budgets in sessions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest
from rich.console import Console

from bench.client import ChatServer, Reply
from bench.errors import BenchFailed
from bench.lengths import Length
from bench.sessions import SessionsBench, SessionsPlan, SessionsSamples, plan, session_turn
from bench.sessions_report import part, table
from bench.sessions_run import Probe
from kvstore.tiers.nvme import stride_bytes

if TYPE_CHECKING:
    from bench.words import Messages

BLOCK = 32


def reply(prompt_tokens: int, reused: dict[str, int], woke_from: str | None, miss: str | None = None) -> Reply:
    return Reply(
        started_at=10.0,
        finished_at=11.5,
        text_at=[11.0, 11.5],
        text="so it went",
        prompt_tokens=prompt_tokens,
        output_tokens=16,
        session={
            "reused_tokens": {"hbm": 0, "dram": 0, "nvme": 0, **reused},
            "woke_from": woke_from,
            "miss_reason": miss,
            "queue_ms": 200.0,
            "wake_ms": 50.0,
        },
        timings={"prompt_ms": 700.0},
    )


class RememberingServer(ChatServer):
    """Reuses every storable block of a session, from NVMe; refuses sessions whose id ends as told."""

    def __init__(self, refused: str = "none") -> None:
        super().__init__(httpx.AsyncClient(), "remembering")
        self._refused = refused
        self.histories: dict[str, int] = {}
        self.in_flight = 0
        self.most_in_flight = 0

    async def answer(self, messages: Messages, max_tokens: int, session_id: str | None = None) -> Reply:
        assert session_id is not None
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        if session_id.endswith(self._refused):
            raise BenchFailed("the server answered 429: full")
        known = self.histories.get(session_id, 0)
        reused = max(0, known - 1) // BLOCK * BLOCK
        self.histories[session_id] = (known or 470) + 30 + 16
        return reply((known or 470) + 30, {"nvme": reused}, "nvme" if reused else None)


def run(server: ChatServer, of: SessionsPlan) -> SessionsSamples:
    samples = SessionsSamples("fake", server.model, of, BLOCK)
    done: list[str] = []
    asyncio.run(SessionsBench(server, samples, 40, done.append).run())
    assert len(done) == len(samples.turns) + len(samples.failures)
    return samples


def test_a_turn_is_held_against_the_blocks_that_its_history_filled() -> None:
    turn = session_turn(2, 545, reply(590, {"dram": 64, "nvme": 480}, "nvme"), BLOCK)
    assert (turn.storable_blocks, turn.reused_blocks, turn.woke_from) == (17, 17, "nvme")
    one_short = session_turn(2, 544, reply(590, {"hbm": 480}, "hbm"), BLOCK)
    assert (one_short.storable_blocks, one_short.reused_blocks) == (16, 15), "its last token was never computed"


def test_time_to_the_first_token_is_the_sum_of_its_parts() -> None:
    turn = session_turn(2, 545, reply(590, {"dram": 544}, "dram"), BLOCK)
    assert (turn.queue_seconds, turn.wake_seconds, turn.prefill_seconds) == (0.2, 0.05, 0.7)
    assert turn.other_seconds == pytest.approx(0.05)
    assert turn.ttft_seconds == 1.0


def test_of_a_server_that_tells_less_only_what_it_told_is_known() -> None:
    silent = session_turn(2, 545, Reply(1.0, 2.0, [1.5], prompt_tokens=590), block_tokens=1)
    assert (silent.queue_seconds, silent.prefill_seconds, silent.reused_tokens) == (None, None, {})
    assert (silent.storable_blocks, silent.other_seconds) == (0, 0.5), "what it reused is not held against it"
    cached = Reply(1.0, 2.0, [1.5], prompt_tokens=590, cached_tokens=512, timings={"prompt_ms": 300.0})
    turn = session_turn(2, 545, cached, block_tokens=1)
    assert (turn.reused_blocks, turn.storable_blocks, turn.prefill_seconds) == (512, 544, 0.3)


def test_a_table_of_a_server_that_tells_less_has_no_rows_for_tiers() -> None:
    samples = SessionsSamples("as served", "other", SessionsPlan(sessions=1, turns=2), block_tokens=1)
    samples.turns = [session_turn(number, 500, Reply(1.0, 2.0, [1.5], prompt_tokens=590), 1) for number in (1, 2)]
    assert set(part(samples)["summary"]["by_tier"]) == {"first", "later"}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(samples))
    assert "not told" in capture.get()


def test_users_think_between_turns_and_the_run_goes_on_with_the_others() -> None:
    server = RememberingServer()
    samples = run(server, SessionsPlan(sessions=6, turns=3, in_flight=2, think_seconds=0.002))
    assert len(samples.turns) == 18
    assert samples.not_begun == 0


def test_every_turn_of_every_session_runs_and_no_more_than_asked_for_at_once() -> None:
    server = RememberingServer()
    samples = run(server, SessionsPlan(sessions=24, turns=3, in_flight=8))
    assert len(samples.turns) == 72
    assert sorted(turn.number for turn in samples.turns) == [1] * 24 + [2] * 24 + [3] * 24
    assert server.most_in_flight == 8
    assert samples.reused_share == 1.0
    assert samples.reaches_goal
    assert set(part(samples)["summary"]["by_tier"]) == {"first", "woke from nvme"}


def test_a_failed_turn_is_counted_and_ends_its_session_only() -> None:
    samples = run(RememberingServer(refused="-3"), SessionsPlan(sessions=6, turns=3, in_flight=2))
    assert samples.failures == ["the server answered 429: full"]
    assert len(samples.turns) == 15
    assert not samples.reaches_goal


def test_a_run_that_is_out_of_time_says_what_it_left() -> None:
    samples = run(RememberingServer(), SessionsPlan(sessions=6, turns=3, in_flight=2, max_seconds=0.0))
    assert (samples.turns, samples.not_begun) == ([], 18)
    assert not samples.reaches_goal
    said = [str(each) for each in table(samples).renderables]
    assert any("18 turns were not begun" in line for line in said)


def test_budgets_in_sessions_hold_whole_ones_and_nvme_all() -> None:
    probe = Probe(BLOCK, 737_280, Length(40, 1), added_tokens=28, tokens_per_second=500)
    of = SessionsPlan(sessions=100, turns=3, prompt_tokens=500, tokens=16, hbm_for=6, dram_for=20)
    assert probe.blocks(of) == 19, "604 tokens"
    flags = dict(zip(*[iter(probe.flags(of))] * 2, strict=True))
    assert int(flags["--hbm-bytes"]) == 6 * 19 * 737_280
    assert int(flags["--dram-bytes"]) == 20 * 19 * 737_280
    assert int(flags["--nvme-bytes"]) > 100 * 19 * stride_bytes(737_280)


def test_a_run_that_computes_histories_again_is_estimated_to_take_longer() -> None:
    probe = Probe(BLOCK, 737_280, Length(40, 1), added_tokens=28, tokens_per_second=500)
    of = SessionsPlan(sessions=100, turns=3, prompt_tokens=500, tokens=16)
    assert probe.estimated_seconds(of, reuses=True) == pytest.approx(100 * (516 + 2 * 60) / 500)
    assert probe.estimated_seconds(of, reuses=False) == pytest.approx(100 * (516 + 560 + 604) / 500)


def test_sizes_given_go_before_the_quick_ones() -> None:
    quick = plan({"sessions": 12, "in_flight": None}, seed=7, max_seconds=None, is_quick=True)
    assert (quick.sessions, quick.in_flight, quick.seed) == (12, 8, 7)
    assert plan({}, seed=7, max_seconds=5, is_quick=False).sessions == 1024
