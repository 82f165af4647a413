"""Objects inside a request that say how its session is to be kept, in our own words and in those of others.

    session                 ours
    prompt_cache_options    OpenAI
    agent_hint              vLLM (its RFC 52113)
    nvext                   Dynamo

The last two are read where they mean the same as a field of ours, which wins where both are there. What else they
hold is advice to other servers and is passed over.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from app.bodies import Body, Priority, Seconds, SessionIdText, Text

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(ttl: str | float | None) -> float | None:
    """What "30m" says, or a number of seconds; a hint that is not understood says nothing."""
    if ttl is None or not isinstance(ttl, str):
        return ttl
    found = re.fullmatch(r"(\d{1,9})([smhd])", ttl)
    return None if found is None else int(found[1]) * _UNITS[found[2]]


class StreamOptions(Body):
    """How a stream is dressed."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class PromptCacheOptions(Body):
    """OpenAI's hints; `prewarm` computes and keeps the prompt and answers with nothing, `ttl` is a keep_seconds.

    Any `mode` is taken: here everything is kept, whether its place is marked or not. What became of the prompt's cache
    next to that of `comparison_response_id`, an answer of /v1/responses tells.
    """

    mode: Literal["implicit", "explicit"] | None = None
    prewarm: bool | None = None
    ttl: Text | None = None
    comparison_response_id: Text | None = Field(default=None, max_length=512)

    @property
    def ttl_seconds(self) -> float | None:
        """What "30m" says; a hint that is not understood says nothing."""
        return seconds_of(self.ttl)


class SessionExtras(Body):
    """What the client asks for its session; kvstore/terms.py says what each promises. Null leaves it as it was."""

    expected_idle_seconds: Seconds | None = None
    keep_seconds: Seconds | None = None
    expire_seconds: Seconds | None = None
    persist: Literal["disk", "memory", "none"] | None = None
    final: bool = False


class Ttl(Body):
    """A cache hint of others: `ttl` as "5m" or in seconds."""

    ttl: Text | Seconds | None = None


class AgentHint(Body):
    """vLLM's; the ids are a session's and its parent's, the ttl a keep_seconds."""

    session_id: SessionIdText | None = None
    parent_session_id: SessionIdText | None = None
    cache_control: Ttl | None = None


class SessionControl(Body):
    """Dynamo's handle of a session."""

    session_id: SessionIdText | None = None


class AgentHints(Body):
    """Dynamo's; there, other than here, a higher priority is sooner."""

    priority: Priority | None = None


class Nvext(Body):
    """Dynamo's extensions."""

    session_control: SessionControl | None = None
    agent_hints: AgentHints | None = None
    cache_control: Ttl | None = None
    cache_salt: Text | None = Field(default=None, min_length=1, max_length=1024)
    top_k: int | None = Field(default=None, ge=-1, le=2**31)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, allow_inf_nan=False)
    ignore_eos: bool | None = None
