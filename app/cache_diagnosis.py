"""OpenAI's `prompt_cache_diagnostics`: what a prompt found of the cache that an earlier answer left, and why not more.

Its reasons are of requests only. Where the prompt went on from that answer and the K/V was not there any more, theirs
is `unavailable`, and our own `session.miss_reason` says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore import chain, replies

if TYPE_CHECKING:
    from array import array

    from app.replies import Held

NOT_FOUND: dict[str, object] = {"type": "comparison_response_not_found"}
UNAVAILABLE: dict[str, object] = {"type": "unavailable"}
HIT: dict[str, object] = {"type": "cache_hit"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt and the answer that it is to be compared with, None where there is none of that id.

    `asked` is what else went into the prompt (replies.asked_of).
    """

    held: Held | None
    token_ids: array[int]
    asked: tuple[str, ...]
    block_tokens: int

    def told(self, reused_tokens: int) -> dict[str, object]:
        """The object, once it is known how much was reused."""
        if self.held is None:
            return NOT_FOUND
        reply = self.held.reply
        former = self.held.history.token_ids[: reply.num_tokens]
        if replies.ids_digest(former) != reply.ids_digest:
            return UNAVAILABLE  # the branch has been asked again further up, and its cache there has gone
        shared = chain.common_prefix(former, self.token_ids)
        left = self._storable(len(former))
        if shared >= left:
            return HIT if reused_tokens >= min(left, self._storable(len(self.token_ids))) else UNAVAILABLE
        return {
            "type": "cache_miss",
            "reason": self._reason(reply.asked),
            "cache_missed_tokens": len(self.token_ids) - shared,
            "comparison_reusable_tokens": left,
        }

    def _storable(self, tokens: int) -> int:
        """Of so many tokens, the last of which has no K/V, those in whole blocks."""
        return max(0, tokens - 1) // self.block_tokens * self.block_tokens

    def _reason(self, asked: tuple[str, ...]) -> str:
        if asked[:1] != self.asked[:1]:
            return "tools_changed"
        return "reasoning_effort_changed" if asked[1:] != self.asked[1:] else "input_changed"
