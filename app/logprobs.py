"""Logprobs as OpenAI writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.token_names import TokenNames

LEAST = -9999.0
"""What OpenAI says of tokens that could not come at all; JSON knows no infinity."""


def chat_logprobs(notes: Any, names: TokenNames) -> dict[str, object]:
    """A chat completion's `logprobs` object; `notes` are TokenLogprobs."""
    return {
        "content": [
            {
                **_token(note.token_id, note.logprob, names),
                "top_logprobs": [_token(token_id, logprob, names) for token_id, logprob in note.top],
            }
            for note in notes
        ],
        "refusal": None,
    }


def _token(token_id: int, logprob: float, names: TokenNames) -> dict[str, object]:
    return {
        "token": names.text(token_id),
        "bytes": list(names.bytes(token_id)),
        "logprob": finite(logprob),
    }


def finite(logprob: float) -> float:
    """At least LEAST."""
    return max(logprob, LEAST)
