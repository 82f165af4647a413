"""What the HTTP side asks of the store about sessions that are not running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvstore.events import BranchRecorded, WakeStatus
    from kvstore.types import BlockKey, Tier, WakeId


class Wake(Protocol):
    """A hint under way, or what became of it."""

    @property
    def id(self) -> WakeId: ...

    @property
    def status(self) -> WakeStatus: ...

    @property
    def tokens(self) -> int:
        """Ready when AWAKE, on their way while WAKING."""

    @property
    def origin(self) -> Tier:
        """The deepest tier they come from."""

    async def settled(self) -> object:
        """Wait until `status` is no longer WAKING."""

    def cancel(self) -> None:
        """Load no more for it; one that has settled stays as it is."""


class SleepingStore(Protocol):
    """The part of the manager that sessions need; keys are those of one chain, in order."""

    def wake(self, keys: tuple[BlockKey, ...], target: Tier, hold_seconds: float) -> Wake:
        """Bring the chain up to `target`; worth keeping there for `hold_seconds`."""

    async def sleep(self, keys: tuple[BlockKey, ...], target: Tier) -> int:
        """Free the chain's slots above `target` where a copy there can be had; tokens that are not above it now."""

    def record_branch(self, event: BranchRecorded) -> None:
        """A branch has moved, or its terms have."""

    def take_over_branches(self, branches: Sequence[BranchRecorded]) -> None:
        """Branches that an earlier process left, all at once."""

    def forget(self, tips: tuple[BlockKey, ...], chains: tuple[tuple[BlockKey, ...], ...] = ()) -> None:
        """Branches are gone: what nobody else shares leaves every tier. `chains` are all keys of each of them."""

    def blocks_by_tier(self, keys: Sequence[BlockKey]) -> Mapping[Tier, int]:
        """How many of these blocks each tier has a copy of; empty where the store does not tell."""
