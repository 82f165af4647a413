"""`dormouse chat`: a conversation with a running server, for people and for pipes.

The server keeps the session's K/V; the messages are kept here and sent whole each turn, as every OpenAI client does.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
from rich.console import Console

HELP = """\
/stats         what the last turn reused, computed and waited for
/sleep [TIER]  let this session sleep in dram (the default) or nvme; the next turn wakes it
/wake          wake it now, and wait until it is awake
/fork          go on in a new session from here; this one stays as it is
/new           forget this conversation and begin another session
/help          this
/quit          leave (or Ctrl-D); Ctrl-C stops an answer"""


COMMANDS = ("/sleep", "/wake", "/fork", "/stats", "/new", "/help", "/quit")

TIERS = {"hbm": "HBM", "dram": "DRAM", "nvme": "NVMe"}


class ChatFailed(Exception):
    """A turn, or the connection, did not work; the text is for the person who chats."""


class ChatClient:
    """One conversation: its messages, its session id, and what the server said of its last turn."""

    def __init__(
        self, http: httpx.Client, model: str | None = None, session: str | None = None, max_tokens: int | None = None
    ) -> None:
        self._http = http
        self._max_tokens = max_tokens
        self.model = model or self._first_model()
        self.session = session or _new_session()
        self.messages: list[dict[str, str]] = []
        self.stats: dict[str, Any] = {}

    def restart(self) -> None:
        """Begin another session with nothing said yet."""
        self.session, self.messages, self.stats = _new_session(), [], {}

    def sleep(self, tier: str) -> str:
        """Let the session sleep in `tier` or below; what became of that, for people.

        Raises:
            ChatFailed: the server refused, or has no such session yet.
        """
        told = self._post(f"sleep?tier={quote(tier, safe='')}")
        if told["status"] == "asleep":
            return f"asleep in {TIERS.get(told['tier'], told['tier'])}: {told['tokens']:,} tokens"
        return f"not asleep: {str(told['reason']).replace('_', ' ')}"

    def wake(self) -> str:
        """Wake the session; returns when it is awake, or will not be.

        Raises:
            ChatFailed: as for `sleep`.
        """
        told = self._post("wake", {"wait": True})
        if told["status"] == "declined":
            return f"not awake: {str(told['reason']).replace('_', ' ')}"
        origin = f", from {TIERS.get(told['source'], told['source'])}" if told["source"] not in (None, "hbm") else ""
        return f"{told['status']}: {told['tokens']:,} tokens{origin}"

    def fork(self) -> None:
        """Go on in a new session that has the same history; the old one stays.

        Raises:
            ChatFailed: as for `sleep`.
        """
        self.session = str(self._post("fork", {"session_id": _new_session()})["id"])

    def _post(self, action: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        try:
            reply = self._http.post(f"/v1/sessions/{quote(self.session, safe='')}/{action}", json=body or {})
        except httpx.HTTPError as exc:
            raise ChatFailed(f"the server went away: {exc}") from exc
        _raise_refusal(reply)
        told: dict[str, Any] = reply.json()
        return told

    def ask(self, text: str) -> Generator[str, None, None]:
        """The answer in pieces. What was received of it stays in the conversation, also when it is stopped early.

        Raises:
            ChatFailed: the server refused or went away; the conversation is as before.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                yield piece
        except httpx.HTTPError as exc:
            raise ChatFailed(f"the server went away: {exc}") from exc
        finally:
            # Also on GeneratorExit and KeyboardInterrupt: a question with no answer would precede the next question.
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "session_id": self.session,
        }
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            _raise_refusal(reply)
            for line in reply.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from self._read(json.loads(line.removeprefix("data: ")))

    def _read(self, chunk: dict[str, Any]) -> Iterator[str]:
        if "error" in chunk:
            raise ChatFailed(str(chunk["error"].get("message", chunk["error"])))
        self.stats.update({key: chunk[key] for key in ("session", "timings") if chunk.get(key)})
        for choice in chunk.get("choices", ()):
            if piece := choice["delta"].get("content"):
                yield piece

    def _first_model(self) -> str:
        try:
            reply = self._http.get("/v1/models")
            _raise_refusal(reply)
            return str(reply.json()["data"][0]["id"])
        except httpx.ConnectError as exc:
            raise ChatFailed(f"no server answers at {self._http.base_url}; start one with `dormouse serve`") from exc
        except (httpx.HTTPError, ValueError, LookupError) as exc:
            raise ChatFailed(f"{self._http.base_url} does not answer as Dormouse would: {exc}") from exc


def chat(
    url: str, session: str | None, model: str | None, key: str | None = None, max_tokens: int | None = None
) -> int:
    """Chat on stdin and stdout until the end of input; the exit status is 1 where a turn failed and nobody watched."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with connect(url, key) as http:
        try:
            client = ChatClient(http, model, session, max_tokens)
        except ChatFailed as exc:
            console.print(f"dormouse: {exc}", markup=False)
            return 1
        if sys.stdin.isatty():
            console.print(f"{client.model}, session {client.session}; /help for commands", style="dim", markup=False)
            talk(client, _typed_lines(), console)
            return 0
        return talk(client, map(str.strip, sys.stdin), console)


def connect(url: str, key: str | None) -> httpx.Client:
    """A client of the server at `url`; nothing is sent yet."""
    local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    # A long queue or wake is silent for up to sse_keepalive_seconds, a prefill without streaming for minutes. A proxy
    # named in the environment cannot reach this machine's loopback.
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(600, connect=10)
    return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout, trust_env=not local)


def _typed_lines() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401  importing it gives input() line editing and history
    while True:
        try:
            yield input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


def talk(client: ChatClient, lines: Iterable[str], console: Console) -> int:
    """Do what each line asks, until /quit or the last; 1 where any of them failed."""
    worst = 0
    for line in lines:
        if line in ("/quit", "/exit"):
            break
        if line:
            worst = max(worst, _turn(client, line, console))
    return worst


def _turn(client: ChatClient, line: str, console: Console) -> int:
    """Do what `line` asks; 1 where that failed."""
    match line:
        case "/help":
            console.print(HELP, markup=False)
        case "/stats":
            console.print_json(data=client.stats)
        case "/new":
            client.restart()
            console.print(f"session {client.session}", style="dim", markup=False)
        case "/sleep" | "/sleep dram" | "/sleep nvme" | "/wake" | "/fork":
            return _session(client, line, console)
        case _ if line.startswith("/") and (" " not in line or line.split()[0] in COMMANDS):
            console.print(f"no command {line}; /help lists them", markup=False)
            return 1
        case _:
            return _answer(client, line, console)
    return 0


def _session(client: ChatClient, line: str, console: Console) -> int:
    """Do something with the session itself; 1 where that failed."""
    command, _, tier = line.partition(" ")
    try:
        if command == "/sleep":
            said = client.sleep(tier or "dram")
        elif command == "/wake":
            said = client.wake()
        else:
            client.fork()
            said = f"session {client.session}"
    except ChatFailed as exc:
        console.print(f"dormouse: {exc}", style="red", markup=False)
        return 1
    console.print(said, style="dim", markup=False)
    return 0


def _answer(client: ChatClient, line: str, console: Console) -> int:
    pieces = client.ask(line)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except ChatFailed as exc:
        print()
        console.print(f"dormouse: {exc}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        pieces.close()
        console.print(" (stopped)", style="dim", markup=False)
        return 0
    print()
    return 0


def _raise_refusal(reply: httpx.Response) -> None:
    if reply.is_success:
        return
    reply.read()
    try:
        error = reply.json()["error"]
        raise ChatFailed(f"{error['message']} ({reply.status_code} {error.get('code') or error.get('type')})")
    except (ValueError, LookupError, TypeError):
        raise ChatFailed(f"the server answered {reply.status_code} {reply.reason_phrase}") from None


def _new_session() -> str:
    return f"chat-{uuid.uuid4().hex[:12]}"
