"""A hint that was given to the planner, as whoever gave it sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.events import WakeStatus
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.events import AnswerWake
    from kvstore.types import WakeId


class PendingWake:
    """What is known of one wake. `status` WAKING changes once more; anything else is final."""

    def __init__(self, wake: WakeId, cancel: Callable[[WakeId], None]) -> None:
        self.id = wake
        self.status = WakeStatus.WAKING
        self.tokens = 0
        """Ready when AWAKE, on their way while WAKING."""
        self.origin = Tier.HBM
        """The deepest tier they come from."""
        self._cancel = cancel
        self._settled = asyncio.Event()

    @property
    def is_settled(self) -> bool:
        return self._settled.is_set()

    async def settled(self) -> None:
        """Wait for the final status."""
        await self._settled.wait()

    def cancel(self) -> None:
        """Withdraw the hint; a settled one stays as it is."""
        if not self.is_settled:
            self._cancel(self.id)

    def answer(self, action: AnswerWake) -> None:
        """The manager's side: take the planner's word."""
        self.status, self.tokens, self.origin = action.status, action.tokens, action.origin
        if action.status is not WakeStatus.WAKING:
            self._settled.set()
