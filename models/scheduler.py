"""Which resident turns get tokens in the next step (pure).

Decode first, then prefill in order of arrival, in chunks up to a token budget: a long prompt
never stalls running turns by more than one chunk, and no turn is starved, since what the
budget left out comes first next time.

Where several tenants have prompts to compute, a step computes those of one of them, so that a short prompt does not
wait for the rest of a full step (contention.py says whose). It is half as long while there are several, since whoever
arrives waits for the step under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from models.contention import Contention


class Schedulable(Protocol):
    """A turn as the scheduler sees it."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    @property
    def num_pending(self) -> int:
        """Tokens known and not yet computed; one while decoding."""

    @property
    def num_writable(self) -> int:
        """Tokens for which slots are granted beyond what is computed."""


class Work(NamedTuple):
    """Compute the next `num_tokens` pending tokens of the turn at `place` in the list that was scheduled."""

    place: int
    num_tokens: int


def schedule(turns: Iterable[Schedulable], token_budget: int, contention: Contention) -> list[Work]:
    """Work for one step over `turns` in order of arrival; a turn without room waits for its slots.

    All decoding turns take part, even beyond the budget; prefill shares what they leave, and
    gets at least one token when nothing decodes.
    """
    decode: list[Work] = []
    prefill: dict[str, list[Work]] = {}
    for index, turn in enumerate(turns):
        count = min(turn.num_pending, turn.num_writable)
        if count == 1 and turn.num_pending == 1:
            decode.append(Work(index, 1))
        elif count > 0:
            prefill.setdefault(turn.tenant, []).append(Work(index, count))
    if not prefill:
        return decode
    tenant = contention.choose({each: sum(work.num_tokens for work in waits) for each, waits in prefill.items()})
    left = contention.budget(token_budget) - len(decode)
    chunks: list[Work] = []
    for index, count in prefill[tenant]:
        if left <= 0:
            break
        chunks.append(Work(index, min(count, left)))
        left -= chunks[-1].num_tokens
    contention.note(tenant, sum(chunk.num_tokens for chunk in chunks))
    return decode + chunks
