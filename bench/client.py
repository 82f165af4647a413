"""One streamed chat completion, with the time at which each piece arrived.

While an answer streams only bytes and times are kept; they are read afterwards. What the client does between pieces it
does on cores that the server may want.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from bench.errors import BenchFailed

if TYPE_CHECKING:
    from bench.words import Messages

Arrival = tuple[float, bytes]
"""Seconds by `time.perf_counter`, and what came then."""

ANSWER_SECONDS = 900.0


@dataclass(slots=True)
class Reply:
    """What was streamed. Times are of `time.perf_counter`; a token without visible text has none."""

    started_at: float
    finished_at: float
    """When the reason to finish came: with the last token, or just after it."""
    text_at: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """None where the server does not say."""
    session: dict[str, Any] = field(default_factory=dict)
    """What Dormouse says of the turn, whole only with the reason to finish; empty from other servers."""
    timings: dict[str, Any] = field(default_factory=dict)
    """Of servers that have llama-server's."""

    @property
    def ttft_seconds(self) -> float:
        """From the request to the first visible text."""
        return self.text_at[0] - self.started_at

    @property
    def last_token_at(self) -> float:
        """The last text's time, unless some tokens had no text of their own: then the last one may be among them."""
        return self.text_at[-1] if len(self.text_at) >= self.output_tokens else self.finished_at

    @property
    def seconds_per_token(self) -> float:
        """Mean distance of one token from the next."""
        return (self.last_token_at - self.text_at[0]) / max(1, self.output_tokens - 1)


class Refused(BenchFailed):
    """The server answered with another status than success."""


class ChatServer:
    """An OpenAI-compatible server and the model to ask it for."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self.model = model
        self._length = _ignore_eos
        """How this server is asked for an exact number of tokens."""

    async def answer(self, messages: Messages, max_tokens: int, session_id: str | None = None) -> Reply:
        """Stream one greedy answer of exactly `max_tokens` tokens, in a session where one is named.

        The name goes in a header, which servers that know nothing of sessions ignore.

        Raises:
            BenchFailed: the server refused, failed or answered with nothing that can be timed.
        """
        try:
            return await self._answer(messages, max_tokens, session_id)
        except Refused as exc:
            if self._length is not _ignore_eos or "ignore_eos" not in str(exc):
                raise
        # transformers refuses fields that it does not know, and has another word for this.
        self._length = _least_new_tokens
        return await self._answer(messages, max_tokens, session_id)

    async def _answer(self, messages: Messages, max_tokens: int, session_id: str | None) -> Reply:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._length(max_tokens),
        }
        headers = {} if session_id is None else {"x-session-id": session_id}
        arrivals: list[Arrival] = []
        started_at = time.perf_counter()
        try:
            async with self._http.stream("POST", "chat/completions", json=body, headers=headers) as response:
                await _raise_refusal(response)
                async for data in response.aiter_raw():
                    arrivals.append((time.perf_counter(), data))
        except httpx.HTTPError as exc:
            raise BenchFailed(f"the server went away: {type(exc).__name__} {exc}") from exc
        return read(started_at, arrivals)


def connect(url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """A client of the server at `url`, with or without its `/v1`."""
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    # A proxy named in the environment cannot reach this machine's loopback.
    local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    # Raw bytes are read, so that they must come uncompressed.
    headers["accept-encoding"] = "identity"
    return httpx.AsyncClient(
        base_url=base,
        headers=headers,
        timeout=httpx.Timeout(ANSWER_SECONDS, connect=10),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=not local,
    )


async def server_state(http: httpx.AsyncClient) -> dict[str, Any]:
    """What a Dormouse tells of itself; empty from other servers, and where its admin page wants a key."""
    url = str(http.base_url).removesuffix("/").removesuffix("/v1") + "/admin/api/state"
    try:
        response = await http.get(url)
        told = response.json() if response.is_success else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return dict(told) if isinstance(told, dict) and "block_tokens" in told else {}


async def first_model(http: httpx.AsyncClient) -> str:
    """The first model that the server lists.

    Raises:
        BenchFailed: it does not answer, or lists none.
    """
    try:
        response = await http.get("models")
        await _raise_refusal(response)
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as exc:
        raise BenchFailed(f"no server answers at {http.base_url}: {type(exc).__name__} {exc}") from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise BenchFailed(f"{http.base_url} lists no model; name one with --model") from exc


async def _raise_refusal(response: httpx.Response) -> None:
    if response.is_success:
        return
    await response.aread()
    raise Refused(f"the server answered {response.status_code}: {response.text[:500]}")


def _ignore_eos(max_tokens: int) -> dict[str, Any]:
    """The word of vLLM, llama-server and Dormouse."""
    return {"ignore_eos": True}


def _least_new_tokens(max_tokens: int) -> dict[str, Any]:
    """The word of `transformers serve`."""
    return {"generation_config": json.dumps({"min_new_tokens": max_tokens, "max_new_tokens": max_tokens})}


def read(started_at: float, arrivals: Sequence[Arrival]) -> Reply:
    """The reply that `arrivals` are the stream of.

    Raises:
        BenchFailed: it carries an error, or no text.
    """
    reply = Reply(started_at, finished_at=arrivals[-1][0] if arrivals else started_at)
    for arrived_at, chunk in _chunks(arrivals):
        if chunk.get("error"):
            raise BenchFailed(f"the answer failed: {chunk['error']}")
        _read_usage(reply, chunk.get("usage"))
        reply.session.update(chunk.get("session") or {})
        reply.timings.update(chunk.get("timings") or {})
        for choice in chunk.get("choices") or ():
            if text := (choice.get("delta") or {}).get("content"):
                reply.text_at.append(arrived_at)
                reply.text += text
            if choice.get("finish_reason"):
                reply.finished_at = arrived_at
    if not reply.text_at:
        raise BenchFailed("the answer had no text, so there is nothing to time")
    # A server that tells no usage is taken to send one token a chunk.
    reply.output_tokens = reply.output_tokens or len(reply.text_at)
    return reply


def _read_usage(reply: Reply, usage: dict[str, Any] | None) -> None:
    if usage:
        reply.prompt_tokens = usage.get("prompt_tokens", 0)
        reply.output_tokens = usage.get("completion_tokens", 0)
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _chunks(arrivals: Sequence[Arrival]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Every JSON object of the stream, with the time at which its line was whole."""
    rest = b""
    for arrived_at, data in arrivals:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if payload.startswith(b"{"):
                yield arrived_at, json.loads(payload)
