"""Whose prompts are computed next, where several tenants have some (pure).

Start-time fair queuing over tenants: each has a count of prompt tokens computed, the least is next. Who comes back
after a while begins where whoever was served last began, so that no one saves up turns by staying away, nor pays
for having been alone. Of two that are level the one with less to compute is first: it delays the other least.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARED_STEPS: Final = 1_000
"""Steps with prompts in them for which a tenant counts as one who may be back: a minute or two."""

SHARED_PART: Final = 2


class Contention:
    """See the module. As long as there is one tenant it says nothing."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._was_pending: frozenset[str] = frozenset()
        self._seen: dict[str, int] = {}
        self._level = 0  # what whoever was chosen last had been served by then
        self._steps = 0

    @property
    def is_shared(self) -> bool:
        """Have several tenants had prompts lately?"""
        return len(self._seen) > 1

    def budget(self, token_budget: int) -> int:
        """Of `token_budget` tokens of a step, how many to compute at most."""
        return max(1, token_budget // SHARED_PART) if self.is_shared else token_budget

    def choose(self, pending: Mapping[str, int]) -> str:
        """Whose turn it is, of tenants with that many tokens to compute; not empty."""
        self._steps += 1
        for tenant in pending:
            self._seen[tenant] = self._steps
            if tenant not in self._was_pending:
                self._served[tenant] = max(self._served.get(tenant, 0), self._level)
        self._was_pending = frozenset(pending)
        if self.is_shared:
            recent = self._steps - SHARED_STEPS
            self._seen = {tenant: step for tenant, step in self._seen.items() if step > recent}
        chosen = min(pending, key=lambda tenant: (self._served[tenant], pending[tenant]))
        self._level = self._served[chosen]
        return chosen

    def note(self, tenant: str, num_tokens: int) -> None:
        """So many of its tokens are computed."""
        self._served[tenant] += num_tokens
