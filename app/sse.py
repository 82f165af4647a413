"""The bytes of a streamed chat completion.

Per token there is one `json.dumps` of a short string between two prebuilt ends: no model is validated and no
dictionary is walked on the way of a token. Everything in a stream is an unnamed event, since named ones
(`event: x`) reach the OpenAI SDK as chunks without choices and break callers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.errors import ErrorReply

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
MEDIA_TYPE = "text/event-stream"
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {MEDIA_TYPE: {}}}}
"""What a route's schema says beside its JSON."""

PAD_TO = 16
"""Characters: an obfuscated delta and its padding together are a multiple of this."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk, and the whole completion, repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def fields(self, kind: str) -> dict[str, object]:
        """Leading keys of an object of this `kind`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class ChunkFormat:
    """Serialises the chunks of one stream, of however many choices."""

    def __init__(self, head: Head, include_usage: bool = False, obfuscate: bool = False) -> None:
        self._head = f"data: {_json(head.fields('chat.completion.chunk'))[:-1]},"
        # With usage asked for, every chunk but the last carries a null in its place.
        self._open = self._head + ('"usage":null,' if include_usage else "")
        self._before = self._open + '"choices":[{"index":'
        self._after = '},"logprobs":null,"finish_reason":null}]'
        self._obfuscate = obfuscate

    def opening(self, session: Mapping[str, object] | None, choice: int = 0) -> bytes:
        """A choice's first chunk: the role, and in the stream's first what the grant knows about the session."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._event(delta, None, {} if session is None else {"session": session}, choice)

    def text(self, text: str, choice: int = 0, name: str = "content") -> bytes:
        """One delta of visible text, or of another string."""
        hiding = f',"obfuscation":"{padding(len(text))}"' if self._obfuscate else ""
        spelled = json.dumps(text, ensure_ascii=False)
        return f'{self._before}{choice},"delta":{{"{name}":{spelled}{self._after}{hiding}}}\n\n'.encode()

    def delta(
        self, delta: Mapping[str, object], choice: int = 0, logprobs: Mapping[str, object] | None = None
    ) -> bytes:
        """One delta of any kind, with what is told of its tokens."""
        extras = {"obfuscation": padding(len(str(delta)))} if self._obfuscate else {}
        return self._event(delta, None, extras, choice, logprobs)

    def closing(self, finish_reason: str, extras: Mapping[str, object], choice: int = 0) -> bytes:
        """The chunk with the finish reason, and in the stream's last the whole of `session` and `timings`."""
        return self._event({}, finish_reason, extras, choice)

    def usage(self, usage: Mapping[str, object]) -> bytes:
        """The last chunk, without choices."""
        return f'{self._head}"choices":[],"usage":{_json(usage)}}}\n\n'.encode()

    def _event(
        self,
        delta: Mapping[str, object],
        finish_reason: str | None,
        extras: Mapping[str, object],
        index: int,
        logprobs: Mapping[str, object] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        tail = "".join(f",{_json(name)}:{_json(value)}" for name, value in extras.items())
        return f'{self._open}"choices":[{_json(choice)}]{tail}}}\n\n'.encode()


def failure(reply: ErrorReply) -> bytes:
    """A failure after the stream began: SDKs raise it. No [DONE] follows, since nothing was done."""
    return b"data: " + reply.payload() + b"\n\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def padding(length: int) -> str:
    """What hides how long a delta of `length` characters is."""
    return secrets.token_urlsafe(PAD_TO)[: PAD_TO - length % PAD_TO]
