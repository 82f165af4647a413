"""Bodies of the routes under `/v1/sessions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from app.bodies import Body, Priority, Seconds, SessionIdText
from kvstore.terms import Change


class WakeRequest(Body):
    """`POST /v1/sessions/{id}/wake`."""

    branch: Annotated[int, Field(ge=0)] | None = None
    to: Literal["hbm", "dram"] = "hbm"
    hold_seconds: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 30.0
    wait: bool = False


class ForkRequest(Body):
    """`POST /v1/sessions/{id}/fork`; without an id the new session is given one."""

    session_id: SessionIdText | None = None
    branch: Annotated[int, Field(ge=0)] | None = None


class SessionPatch(Body):
    """`PATCH /v1/sessions/{id}`. What is left out stays; null takes back what can be taken back.

    Unlike a chat request's, unknown fields are refused: a misspelt one would be a promise not kept.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    priority: Priority | None = None
    keep_seconds: Seconds | None = None
    expire_seconds: Seconds | None = None
    pinned: bool | None = None

    @property
    def change(self) -> Change:
        """The same for the book: null is the value of a session of which nothing was said."""
        said = self.model_fields_set
        return Change(
            priority=(self.priority or 0) if "priority" in said else None,
            keep_seconds=(self.keep_seconds or 0.0) if "keep_seconds" in said else None,
            pinned=bool(self.pinned) if "pinned" in said else None,
            expire_seconds=self.expire_seconds,
            never_expires="expire_seconds" in said and self.expire_seconds is None,
        )
