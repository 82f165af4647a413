"""`dormouse chat` against a server that speaks Dormouse's side of the wire."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from rich.console import Console

from app.chat_client import ChatClient, ChatFailed, talk

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeServer(httpx.BaseTransport):
    """Answers each turn with the number of messages it was sent, in two pieces; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.acts: list[tuple[str, str, str, dict[str, Any]]] = []
        self.refuse_next = False
        self.break_next = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "small"}, {"id": "other"}]})
        if request.url.path.startswith("/v1/sessions/"):
            return self._session(request)
        if self.refuse_next:
            self.refuse_next = False
            error = {"message": "too long", "type": "invalid_request_error", "param": None, "code": "too_long"}
            return httpx.Response(400, json={"error": error})
        body = json.loads(request.read())
        self.asked.append(body)
        return httpx.Response(200, stream=self._stream(body))

    def _session(self, request: httpx.Request) -> httpx.Response:
        session, action = request.url.path.removeprefix("/v1/sessions/").split("/")
        body = json.loads(request.read())
        self.acts.append((session, action, request.url.query.decode(), body))
        if self.refuse_next:
            self.refuse_next = False
            return httpx.Response(404, json={"error": {"message": "no such session", "code": "session_not_found"}})
        told: dict[str, dict[str, Any]] = {
            "sleep": {"status": "asleep", "tier": request.url.params.get("tier"), "tokens": 4064, "reason": None},
            "wake": {"status": "awake", "source": "nvme", "tokens": 4064, "reason": None},
            "fork": {"id": body.get("session_id")},
        }
        return httpx.Response(200, json=told[action])

    def _stream(self, body: dict[str, Any]) -> httpx.SyncByteStream:
        broken, self.break_next = self.break_next, False
        session = {"id": body["session_id"], "turn": len(body["messages"]) // 2}

        class Stream(httpx.SyncByteStream):
            def __iter__(self) -> Iterator[bytes]:
                yield b": keepalive\n\n"
                yield chunk({"delta": {"role": "assistant", "content": ""}}, session={"id": body["session_id"]})
                yield chunk({"delta": {"content": f"{len(body['messages'])} "}})
                if broken:
                    yield b'data: {"error": {"message": "it broke", "code": null}}\n\n'
                    return
                yield chunk({"delta": {"content": "messages"}})
                yield chunk({"delta": {}, "finish_reason": "stop"}, session=session)
                yield b"data: [DONE]\n\n"

        return Stream()


def chunk(choice: dict[str, Any], **extra: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}], **extra})}\n\n".encode()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def client(server: FakeServer) -> Iterator[ChatClient]:
    with httpx.Client(transport=server, base_url="http://server") as http:
        yield ChatClient(http)


def said(client: ChatClient) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in client.messages]


def test_every_turn_sends_the_whole_conversation_under_one_session(client: ChatClient, server: FakeServer) -> None:
    assert list(client.ask("one")) == ["1 ", "messages"]
    assert "".join(client.ask("two")) == "3 messages"
    assert said(client) == [("user", "one"), ("assistant", "1 messages"), ("user", "two"), ("assistant", "3 messages")]
    assert [body["session_id"] for body in server.asked] == [client.session] * 2
    assert {body["model"] for body in server.asked} == {"small"}


def test_the_last_session_object_is_kept_whole(client: ChatClient) -> None:
    list(client.ask("one"))
    assert client.stats["session"] == {"id": client.session, "turn": 0}


def test_a_refused_turn_leaves_the_conversation_as_it_was(client: ChatClient, server: FakeServer) -> None:
    list(client.ask("one"))
    server.refuse_next = True
    with pytest.raises(ChatFailed, match=r"too long \(400 too_long\)"):
        list(client.ask("two"))
    assert said(client) == [("user", "one"), ("assistant", "1 messages")]


def test_what_arrived_of_a_broken_answer_stays(client: ChatClient, server: FakeServer) -> None:
    server.break_next = True
    with pytest.raises(ChatFailed, match="it broke"):
        list(client.ask("one"))
    assert said(client) == [("user", "one"), ("assistant", "1 ")]


def test_what_arrived_of_a_stopped_answer_stays(client: ChatClient) -> None:
    pieces = client.ask("one")
    next(pieces)
    pieces.close()
    assert said(client) == [("user", "one"), ("assistant", "1 ")]


def test_lines_are_turns_and_commands(
    client: ChatClient, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = io.StringIO()
    first = client.session
    lines = ["one", "", "/stats", "/new", "two", "/nonsense", "/help", "/quit", "never sent"]
    assert talk(client, lines, Console(file=notes, width=100)) == 1
    assert capsys.readouterr().out == "1 messages\n1 messages\n"
    assert len(server.asked) == 2
    assert client.session != first
    assert '"turn": 0' in notes.getvalue()
    assert "no command /nonsense" in notes.getvalue()
    assert "Ctrl-C stops an answer" in notes.getvalue()


def test_a_failed_turn_is_said_and_the_next_one_goes_on(
    client: ChatClient, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = io.StringIO()
    server.refuse_next = True
    assert talk(client, ["one", "two"], Console(file=notes, width=100)) == 1
    assert "too long" in notes.getvalue()
    assert capsys.readouterr().out == "\n1 messages\n"


def test_a_server_that_is_no_dormouse_is_said_to_be_none() -> None:
    plain = httpx.MockTransport(lambda request: httpx.Response(404, text="nginx"))
    with httpx.Client(transport=plain, base_url="http://server") as http, pytest.raises(ChatFailed, match="404"):
        ChatClient(http)


def test_a_session_is_put_to_sleep_woken_and_forked_from_the_chat(client: ChatClient, server: FakeServer) -> None:
    notes = io.StringIO()
    first = client.session
    lines = ["one", "/sleep", "/sleep nvme", "/wake", "/fork", "two"]
    assert talk(client, lines, Console(file=notes, width=100)) == 0
    assert notes.getvalue().splitlines() == [
        "asleep in DRAM: 4,064 tokens",
        "asleep in NVMe: 4,064 tokens",
        "awake: 4,064 tokens, from NVMe",
        f"session {client.session}",
    ]
    assert server.acts == [
        (first, "sleep", "tier=dram", {}),
        (first, "sleep", "tier=nvme", {}),
        (first, "wake", "", {"wait": True}),
        (first, "fork", "", {"session_id": client.session}),
    ]
    assert client.session != first
    assert [body["session_id"] for body in server.asked] == [first, client.session]
    assert len(server.asked[1]["messages"]) == 3


def test_a_session_that_is_not_there_yet_cannot_sleep_and_words_after_a_command_are_no_turn(
    client: ChatClient, server: FakeServer
) -> None:
    notes = io.StringIO()
    server.refuse_next = True
    assert talk(client, ["/sleep"], Console(file=notes, width=100)) == 1
    assert talk(client, ["/sleep well"], Console(file=notes, width=100)) == 1
    assert "no such session (404 session_not_found)" in notes.getvalue()
    assert "no command /sleep well" in notes.getvalue()
    assert server.asked == []


def test_answers_are_as_long_as_was_asked_for(server: FakeServer) -> None:
    with httpx.Client(transport=server, base_url="http://server") as http:
        list(ChatClient(http).ask("one"))
        list(ChatClient(http, max_tokens=60).ask("one"))
    assert [body.get("max_tokens") for body in server.asked] == [None, 60]


def test_an_id_with_a_slash_is_one_segment_of_the_path(server: FakeServer) -> None:
    paths: list[bytes] = []

    class Watched(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            paths.append(request.url.raw_path)
            return httpx.Response(200, json={"status": "declined", "reason": "not_stored"})

    with httpx.Client(transport=Watched(), base_url="http://server") as http:
        chat = ChatClient(http, "small", "run/1")
        assert chat.sleep("dram") == "not asleep: not stored"
        assert chat.wake() == "not awake: not stored"
    assert paths == [b"/v1/sessions/run%2F1/sleep?tier=dram", b"/v1/sessions/run%2F1/wake"]
