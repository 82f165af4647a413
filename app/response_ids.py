"""Ids of a response and of what is in it. All are made from the response's own, so that whoever reads the answer's text
again finds the same."""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "resp_"


def new_response_id() -> str:
    """An id that nobody can guess."""
    return PREFIX + secrets.token_hex(24)


def item_id(response_id: str, kind: str, index: int) -> str:
    """Of output item `index`: `msg`, `rs` or `fc`."""
    return f"{kind}_{_digest(response_id, kind, index)}"


def call_id(response_id: str, index: int, like: str) -> str:
    """Of call `index`, in the form that the model's template wants: `like` is such an id."""
    digest = _digest(response_id, "call", index)
    return f"call_{digest[:24]}" if like.startswith("call_") else digest[: len(like)]


def _digest(response_id: str, kind: str, index: int) -> str:
    return hashlib.blake2b(f"{response_id} {kind} {index}".encode(), digest_size=24).hexdigest()
