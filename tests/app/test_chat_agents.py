"""What real agents send beside their conversation: nothing of it costs the conversation a block, and nothing is a 409.

The model is tiny and random, but its K/V is real: what a conversation says at its end is what it says computed anew.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import pytest

from models import embedded
from tests.app.live import Live, client, live
from tests.app.published import stream, whole
from tests.faults import tiny
from tests.faults.server import settings
from tests.models.test_tool_templates import TOOLS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

BLOCK = 16
URL = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tiny_server(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = tiny.save(tmp_path_factory.mktemp("agents") / "tiny", embedded.fetch(cache_dir, progress=print))
    with live(settings(model, None, block_tokens=BLOCK)) as server:
        yield server
        server.check_idle()


class Talk:
    """A conversation as a client keeps it: sends everything, reads text, and never sees an id or a token."""

    def __init__(
        self, http: httpx.Client, headers: dict[str, str], system: str = "", tools: list[Any] | None = None
    ) -> None:
        self.http = http
        self.headers = headers
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.fields: dict[str, Any] = {"tools": tools} if tools else {}
        self.sessions: list[dict[str, Any]] = []

    def ask(self, text: str, *, streams: bool = True, **fields: Any) -> dict[str, Any]:
        """One turn more; the answer's `session`."""
        self.messages.append({"role": "user", "content": text})
        body = {"model": "tiny", "messages": self.messages, "max_tokens": 4, "temperature": 0, **self.fields, **fields}
        response = self.http.post(URL, json={**body, "stream": streams}, headers=self.headers)
        assert response.status_code == 200, response.text
        if streams:
            chunks = stream(response.text, usage=False)
            said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
            session: dict[str, Any] = chunks[-1]["session"]
        else:
            answer = whole(response.text)
            said, session = answer["choices"][0]["message"]["content"] or "", answer["session"]
        self.messages.append({"role": "assistant", "content": said})
        self.sessions.append(session)
        return session

    def said_anew(self) -> str:
        """The last answer again, by a server that knows nothing of the conversation."""
        body = {"model": "tiny", "messages": self.messages[:-1], "max_tokens": 4, "temperature": 0, **self.fields}
        answer = self.http.post(URL, json={**body, "cache_prompt": False}).json()
        text: str = answer["choices"][0]["message"]["content"] or ""
        return text

    def assert_nothing_was_lost(self) -> None:
        """From its second turn on: one branch, each turn the next, and less than a block of it computed again."""
        assert len(self.sessions) > 1
        assert len({session["branch"] for session in self.sessions}) == 1, self.sessions
        assert [session["turn"] for session in self.sessions] == list(range(1, len(self.sessions) + 1))
        for session in self.sessions[1:]:
            assert session["miss_reason"] is None, session
            assert session["recomputed_tokens"] < BLOCK, session
        assert self.said_anew() == self.messages[-1]["content"]


def history_of(talk: Talk) -> str:
    said = "\n".join(f"{message['role'].upper()}: {message['content']}" for message in talk.messages[-4:])
    return f"### Chat History:\n<chat_history>\n{said}\n</chat_history>"


# As Open WebUI words them, in short; each is one user message, not streamed, under the chat's id.
TITLE = (
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n"
    "### Guidelines:\n- The title should clearly represent the main theme.\n"
    '### Output:\nJSON format: { "title": "your concise title here" }\n'
)
TAGS = (
    "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history, along with 1-3 more specific "
    'subtopic tags.\n### Output:\nJSON format: { "tags": ["tag1", "tag2", "tag3"] }\n'
)
FOLLOW_UPS = (
    "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user might naturally ask next in this "
    'conversation.\n### Output:\nJSON format: { "follow_ups": ["Question 1?", "Question 2?"] }\n'
)


def test_open_webui_asks_for_titles_tags_and_follow_ups_under_the_chats_own_id(tiny_server: Live) -> None:
    with client(tiny_server) as http, ThreadPoolExecutor(6) as threads:
        people = {"X-OpenWebUI-User-Name": "Ann", "X-OpenWebUI-User-Id": "u-1", "X-OpenWebUI-User-Role": "user"}
        chats = [Talk(http, {**people, "X-OpenWebUI-Chat-Id": f"chat-{name}"}) for name in ("one", "two")]
        tasks, asides = [], []
        for turn in range(8):  # 2 chats of 8 turns with 17 tasks each: more than a session has branches
            for chat in chats:
                chat.ask(f"Question {turn} about the garden of {chat.headers['X-OpenWebUI-Chat-Id']}?")
            for chat in chats:
                for prompt in [TITLE] * (turn == 0) + [TAGS, FOLLOW_UPS]:
                    aside = Talk(http, chat.headers)
                    asides.append((chat, aside))
                    tasks.append(threads.submit(aside.ask, prompt + history_of(chat), streams=False))
            # The next questions are asked while these tasks still run.
        wait(tasks)
        assert [task.exception() for task in tasks] == [None] * len(tasks)
        for chat in chats:
            chat.assert_nothing_was_lost()
            assert {session["id_source"] for session in chat.sessions} == {"header:x-openwebui-chat-id"}
        for chat, aside in asides:
            (session,) = aside.sessions
            assert session["id"] == chat.headers["X-OpenWebUI-Chat-Id"]
            assert session["branch"] != chat.sessions[0]["branch"]
        # Prompts of one kind share their first words, whichever chat they are about.
        assert sum(asides[-1][1].sessions[0]["reused_tokens"].values()) >= BLOCK
    tiny_server.check_idle()


CODER = "You are opencode, an interactive tool that helps with software engineering. Be concise. Working directory: /w."
TITLER = "You are a title generator. You output ONLY a thread title. Nothing else. Use the language of the user."
EXPLORER = "You are a file search specialist. You look for files in a codebase and report what you found, no more."


def test_opencode_names_its_session_in_two_headers_and_its_sub_agents_their_parent(tiny_server: Live) -> None:
    def headers(session: str, parent: str = "") -> dict[str, str]:
        named = {"X-Session-Id": session, "x-session-affinity": session}
        return named | ({"X-Parent-Session-Id": parent} if parent else {})

    with client(tiny_server) as http, ThreadPoolExecutor(4) as threads:
        main = Talk(http, headers("ses_main"), CODER, TOOLS)
        title = Talk(http, headers("ses_main"), TITLER)
        naming = threads.submit(title.ask, "Generate a title for this conversation: fix the failing test")
        main.ask("Fix the failing test, please.")
        naming.result()
        agents = [Talk(http, headers(f"ses_child{number}", "ses_main"), EXPLORER, TOOLS[:1]) for number in range(3)]
        for step in range(4):  # sub-agents in parallel, and the main conversation beside them
            running = [threads.submit(agent.ask, f"Step {step}: look for uses of f{step}.") for agent in agents]
            running.append(threads.submit(main.ask, f"Step {step} is done, go on."))
            for each in running:
                each.result()
        main.assert_nothing_was_lost()
        for agent in agents:
            agent.assert_nothing_was_lost()
            assert {session["parent_id"] for session in agent.sessions} == {"ses_main"}
        assert title.sessions[0]["branch"] != main.sessions[0]["branch"]
        # Compaction: a summary at the end of the whole conversation, then a new one that begins with it, under the
        # same id. The first continues the conversation, the second is a branch of its own.
        main.ask("Provide a detailed prompt for continuing our conversation above.")
        assert main.sessions[-1]["miss_reason"] is None
        compacted = Talk(http, headers("ses_main"), CODER, TOOLS)
        for step in range(3):
            compacted.ask(f"Summary: {main.messages[-1]['content']}" if step == 0 else f"Then do step {step}.")
        compacted.assert_nothing_was_lost()
        assert compacted.sessions[0]["miss_reason"] == "new_branch"
        assert sum(compacted.sessions[0]["reused_tokens"].values()) >= BLOCK  # the tools and the system's words
        assert {session["id"] for session in compacted.sessions} == {"ses_main"}
        main.ask("Never mind, go on where we were.")
        main.assert_nothing_was_lost()
    tiny_server.check_idle()
