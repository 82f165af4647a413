"""`bench replay`: traces cut and scaled, and latencies that hide no waiting."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import httpx
import pytest

from bench import trace
from bench.client import ChatServer, Reply
from bench.errors import BenchFailed
from bench.lengths import Length
from bench.replay import Replay, ReplayPlan, ReplaySamples, Round, most_in_flight
from bench.replay_report import part, table
from bench.trace import Request

if TYPE_CHECKING:
    from bench.words import Messages

LENGTH = Length(40, 1)


@pytest.mark.parametrize("name", ["agentic", "conversation"])
def test_a_shipped_trace_is_in_order_and_says_how_each_session_begins(name: str) -> None:
    rows = trace.read(name)

    assert len(rows) > 1000
    assert all(before.at <= after.at for before, after in pairwise(rows))
    begun: set[int] = set()
    for row in rows:
        assert row.new > 0
        assert row.out > 0
        assert row.session in begun or row.keep is None, "nothing can be kept of what has not begun"
        assert row.session not in begun or not row.common
        begun.add(row.session)
    assert len(begun) < len(rows), "some sessions go on"


def test_an_unknown_trace_names_the_ones_there_are() -> None:
    with pytest.raises(BenchFailed, match="agentic, conversation"):
        trace.read("nowhere")


def test_lengths_are_scaled_and_a_session_ends_before_it_outgrows_the_context() -> None:
    rows = [Request(0, 0, 1000, 100), Request(0, 1, 1000, 100), Request(1, 2, 300, 2000), Request(0, 3, 10, 10)]

    short = trace.shortened(rows, scale=0.1, max_context=150, max_output=20)

    assert [(row.session, row.new, row.out) for row in short] == [(0, 100, 10), (1, 30, 20)]


def test_times_are_scaled_to_the_rate_asked_for() -> None:
    paced, factor = trace.paced([Request(0, 10, 8, 8), Request(1, 40, 8, 8), Request(2, 110, 8, 8)], 2.0)

    assert [row.at for row in paced] == [pytest.approx(0.0), pytest.approx(0.3), pytest.approx(1.0)]
    assert factor == pytest.approx(0.01)


def test_whole_sessions_are_drawn() -> None:
    rows = [Request(session, session + 10 * turn, 8, 8) for turn in range(3) for session in range(50)]

    drawn = trace.thinned(rows, 9, seed=3)

    assert len(drawn) == 9
    assert len({row.session for row in drawn}) == 3


class SlowServer(ChatServer):
    """Answers after a while; the whole conversation is what it was sent."""

    def __init__(self, seconds: float, fails: bool = False) -> None:
        super().__init__(httpx.AsyncClient(), "slow")
        self._seconds = seconds
        self._fails = fails
        self.sent: list[tuple[str, Messages]] = []

    async def answer(self, messages: Messages, max_tokens: int, session_id: str | None = None) -> Reply:
        self.sent.append((str(session_id), messages))
        started = time.perf_counter()
        await asyncio.sleep(self._seconds)
        if self._fails:
            raise BenchFailed("the server answered 500")
        ended = time.perf_counter()
        return Reply(started, ended, [ended], "so", sum(len(m["content"].split()) for m in messages), 1)


def replayed(server: ChatServer, *requests: Request) -> Round:
    return asyncio.run(Replay(server, requests, LENGTH, 1, "test", lambda _: None).run())


def test_a_turn_that_waits_for_the_answer_before_it_counts_from_when_it_should_have_come() -> None:
    server = SlowServer(0.05)

    done = replayed(server, Request(0, 0.0, 20, 8), Request(0, 0.001, 20, 8), Request(1, 0.002, 20, 8))

    first, second, other = sorted(done.answered, key=lambda each: each.at)
    assert second.sent_seconds >= first.seconds - 0.001, "it came a millisecond later"
    assert second.ttft_seconds >= second.sent_seconds + 0.05
    assert other.sent_seconds < first.seconds, "that one waited for nobody"
    assert most_in_flight(done.answered) == 3


def test_a_conversation_goes_on_from_its_answers_and_shares_what_its_group_does() -> None:
    server = SlowServer(0.0)
    replayed(
        server,
        *(Request(session, session / 1000, 20, 8, group=5, common=30) for session in (0, 1)),
        Request(0, 0.01, 30, 8),
        Request(0, 0.02, 30, 8, keep=10),
    )
    by_session = {name: [messages for who, messages in server.sent if who == name] for name, _ in server.sent}
    first, second, cut = by_session["test-0"]
    (other,) = by_session["test-1"]

    assert second[:2] == first
    assert second[2] == {"role": "assistant", "content": "so"}
    assert [message["role"] for message in cut] == ["system", "user"], "nothing whole is as short as what is kept"
    opening, others = (messages[0]["content"].split() for messages in (first, other))
    assert opening[:31] == others[:31], "the word before the first, and the 30 that are common"
    assert opening[31:] != others[31:]


def test_what_follows_a_failure_is_not_sent_and_is_counted() -> None:
    samples = ReplaySamples(ReplayPlan("agentic", repeats=1), "slow", 1.0, 1, 1)
    samples.rounds.append(replayed(SlowServer(0.0, fails=True), Request(0, 0.0, 20, 8), Request(0, 0.01, 20, 8)))

    assert (part(samples)["summary"]["failures"], part(samples)["summary"]["not_sent"]) == (1, 1)
    said = [str(each) for each in table(samples).renderables]
    assert any("0 answered, 1 failed, 1 not sent" in line for line in said)
