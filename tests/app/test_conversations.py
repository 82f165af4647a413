"""Conversations over HTTP with the real model: what each turn reuses, and why not more.

The control keeps branches and exact ids but drops all K/V before every turn: its text must be the same.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from app.settings import Settings
from models.embedded import NAME
from tests.app.live import Live, client, live

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

BLOCK = 32
SYSTEM = "You are a patient gardener who answers in one short sentence and loves to name the plants you talk about."
QUESTIONS = [
    "What should I plant in a shady corner?",
    "And under an old oak?",
    "How often do I water it?",
    "Which of them flowers first?",
    "Can I eat any of them?",
    "What about slugs?",
    "When do I cut it back?",
    "Does it need feeding?",
    "Will it survive frost?",
    "Thank you. Say goodbye.",
]


class Chat:
    """One conversation: its messages, and what the last turn said of itself."""

    def __init__(self, http: httpx.Client, session: str | None, system: str = SYSTEM, answer_tokens: int = 6) -> None:
        self.http = http
        self.id = session
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}]
        self.session: dict[str, Any] = {}
        self.usage: dict[str, Any] = {}
        self.answer_tokens = answer_tokens

    def ask(self, question: str) -> str:
        self.messages.append({"role": "user", "content": question})
        return self.answer()

    def answer(self) -> str:
        """Answer the messages as they stand."""
        body: dict[str, Any] = {
            "model": NAME,
            "messages": self.messages,
            "temperature": 0,
            "max_tokens": self.answer_tokens,
        }
        response = self.http.post("/v1/chat/completions", json=body | ({"session_id": self.id} if self.id else {}))
        assert response.status_code == 200, response.text
        done = response.json()
        self.session, self.usage = done["session"], done["usage"]
        text: str = done["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": text})
        return text

    @property
    def history(self) -> int:
        """Tokens of this conversation after its last turn, the last of which has no K/V."""
        return int(self.usage["total_tokens"])

    @property
    def reused(self) -> int:
        return int(sum(self.session["reused_tokens"].values()))


@pytest.fixture
def http(fresh: Live) -> Iterator[httpx.Client]:
    with client(fresh) as http:
        yield http


def whole(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def test_ten_turns_reuse_every_full_block_and_say_what_they_would_without_k_v(fresh: Live, http: httpx.Client) -> None:
    warm, control = Chat(http, "warm"), Chat(http, "control")
    texts = []
    for turn, question in enumerate(QUESTIONS, 1):
        history = warm.history if turn > 1 else 0
        texts.append(warm.ask(question))
        assert warm.session["turn"] == turn
        if turn > 1:
            assert warm.reused == whole(history - 1)
            assert warm.session["recomputed_tokens"] < BLOCK
            assert warm.session["miss_reason"] is None
            assert warm.session["diverged"] is None
        total = warm.reused + warm.session["recomputed_tokens"] + warm.session["computed_tokens"]
        assert total == warm.usage["prompt_tokens"]
    for text, question in zip(texts, QUESTIONS, strict=True):
        fresh.flush()
        assert control.ask(question) == text
        assert control.reused == 0
    assert control.session["miss_reason"] == "evicted"


def test_an_edited_message_reuses_what_comes_before_it_and_shows_the_edit(http: httpx.Client) -> None:
    chat = Chat(http, "edited")
    for question in QUESTIONS[:3]:
        chat.ask(question)
    del chat.messages[4:]  # back to before the second answer
    chat.messages[3]["content"] = "And beside a pond?"
    chat.answer()
    assert (chat.session["branch"], chat.session["miss_reason"]) == (0, "prompt_diverged")
    assert chat.reused == whole(chat.session["diverged_at"])
    assert chat.session["diverged"]["message_index"] == 3
    assert "oak" in chat.session["diverged"]["stored"]
    assert "pond" in chat.session["diverged"]["received"]
    chat.ask(QUESTIONS[2])
    assert chat.session["miss_reason"] is None


def test_regenerating_the_first_and_a_later_answer_continues_the_branch(http: httpx.Client) -> None:
    chat = Chat(http, "again", answer_tokens=12)
    first = chat.ask("Tell me about ferns and moss in my garden, please.")
    chat.messages.pop()
    assert chat.answer() == first
    assert (chat.session["branch"], chat.session["turn"]) == (0, 2)
    assert chat.session["diverged_at"] == chat.usage["prompt_tokens"]
    assert chat.reused == whole(chat.usage["prompt_tokens"] - 1)
    chat.answer_tokens = BLOCK + 4  # so that a whole block of the answer is replaced
    second = chat.ask("Tell me everything you know about old oaks.")
    chat.messages.pop()
    assert chat.answer() == second
    assert (chat.session["branch"], chat.session["miss_reason"]) == (0, "prompt_diverged")
    assert chat.reused == whole(chat.usage["prompt_tokens"] - 1)


def test_a_shorter_history_reuses_what_is_left_of_it(http: httpx.Client) -> None:
    chat = Chat(http, "shorter")
    for question in QUESTIONS[:4]:
        chat.ask(question)
    del chat.messages[3:]
    chat.ask("Something else: which tool first?")
    assert chat.session["miss_reason"] == "prompt_diverged"
    assert chat.reused == whole(chat.session["diverged_at"]) > 0


def test_two_sessions_share_a_system_prompt(http: httpx.Client) -> None:
    system = SYSTEM * 4
    one, two = Chat(http, "one", system), Chat(http, "two", system)
    one.ask(QUESTIONS[0])
    two.ask(QUESTIONS[5])
    assert two.session["miss_reason"] == "new_session"
    assert two.reused >= 64
    assert two.session["woke_from"] == "hbm"


def test_one_id_carries_a_chat_its_titles_and_two_agents_at_once(http: httpx.Client) -> None:
    chat = Chat(http, "busy")
    agents = [Chat(http, "busy", f"You are agent {name}. Be brief and precise in all you say.") for name in "AB"]
    titles = Chat(http, "busy", "Write a title of three words for the conversation that the user shows you.")
    with ThreadPoolExecutor(2) as threads:
        for turn in range(3):
            history = chat.history if turn else 0
            chat.ask(QUESTIONS[turn])
            assert chat.reused >= whole(history - 1)
            assert chat.session["branch"] == 0
            for kind in ("title", "tag"):
                titles.messages = [titles.messages[0]]
                titles.ask(f"Give a {kind} for: {chat.messages[-1]['content']}")
            before = [agent.history if turn else 0 for agent in agents]
            list(threads.map(Chat.ask, agents, [f"Step {turn} of my plan?"] * 2))
            for agent, history in zip(agents, before, strict=True):
                assert agent.reused >= whole(history - 1)
                assert agent.session["miss_reason"] == (None if turn else "new_branch")
    assert len({agent.session["branch"] for agent in agents} | {0}) == 3


def test_agents_without_ids_are_told_apart_by_their_text(http: httpx.Client) -> None:
    chats = [Chat(http, None, f"You are gardener {name} of the castle.") for name in ("Ann", "Bob")]
    for question in QUESTIONS[:3]:
        for chat in chats:
            chat.ask(question)
    assert [chat.session["id_source"] for chat in chats] == ["text", "text"]
    assert [chat.session["turn"] for chat in chats] == [3, 3]
    assert chats[0].session["id"] != chats[1].session["id"]


@pytest.fixture(scope="module")
def small(cache_dir: Path) -> Iterator[Live]:
    """HBM for 10 blocks, three short conversations at most, and nothing below it."""
    settings = Settings(model="embedded", hbm_bytes=10 * 737_280, dram_bytes=0, cache_dir=cache_dir, drain_seconds=5)
    with live(settings) as server:
        yield server
        server.check_idle()


def test_the_least_recent_give_way_and_their_next_turn_says_evicted(small: Live) -> None:
    with client(small) as http:
        chats = [Chat(http, f"s{number}", f"You are number {number}. {SYSTEM}") for number in range(4)]
        texts: list[list[str]] = [[] for _ in chats]
        reasons = []
        for question in QUESTIONS[:3]:
            for chat, said in zip(chats, texts, strict=True):
                said.append(chat.ask(question))
                reasons.append(chat.session["miss_reason"])
        assert "evicted" in reasons
        alone = Chat(http, "alone", chats[2].messages[0]["content"])
        assert [alone.ask(question) for question in QUESTIONS[:3]] == texts[2]
    assert small.gateway.manager.max_context == 10 * BLOCK


def test_the_least_recent_sleep_in_dram_and_wake_with_nothing_lost(cache_dir: Path) -> None:
    slot = 737_280
    settings = Settings(
        model="embedded", hbm_bytes=10 * slot, dram_bytes=64 * slot, cache_dir=cache_dir, drain_seconds=5
    )
    with live(settings) as server, client(server) as http:
        chats = [Chat(http, f"s{number}", f"You are number {number}. {SYSTEM}") for number in range(6)]
        sessions = []
        for question in QUESTIONS[:3]:
            for chat in chats:
                chat.ask(question)
                sessions.append(chat.session)
        assert {session["miss_reason"] for session in sessions[len(chats) :]} == {None}
        woken = [session for session in sessions if session["woke_from"] == "dram"]
        assert woken
        for session in woken:
            assert session["reused_tokens"]["dram"] > 0
            assert session["wake_trigger"] == "arrival"
            assert session["wake_ms"] >= 0
        assert all(session["recomputed_tokens"] < BLOCK for session in sessions)
        server.check_idle()


def test_many_concurrent_turns_that_outgrow_hbm_all_say_what_they_say_alone(small: Live) -> None:
    with client(small) as http, ThreadPoolExecutor(24) as threads:

        def ask(number: int) -> str:
            chat = Chat(http, f"many-{number}", f"You count from {number % 4}.", answer_tokens=24)
            return chat.ask("Count on, one number after the other, without a pause.")

        together = list(threads.map(ask, range(24)))
        for number in range(4):
            alone = ask(100 + number)
            assert {text for index, text in enumerate(together) if index % 4 == number} == {alone}
    small.check_idle()


def test_a_seed_says_the_same_alone_and_in_a_batch(small: Live) -> None:
    with client(small) as http, ThreadPoolExecutor(8) as threads:

        def ask(seed: int) -> str:
            body = {
                "model": NAME,
                "messages": [{"role": "user", "content": f"Tell me a story about {'a mouse ' * (1 + seed % 3)}."}],
                "seed": seed,
                "temperature": 1.2,
                "max_tokens": 10,
                "cache_prompt": seed % 2 == 0,
            }
            text: str = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            return text

        together = list(threads.map(ask, range(8)))
        assert [ask(seed) for seed in range(0, 8, 3)] == together[::3]
    assert len(set(together)) > 4
    small.check_idle()
