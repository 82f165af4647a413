"""Who has how much of one tier, and whose blocks make room for whom (pure).

    share       slots of the tier / active tenants
    used        blocks that are there or on their way there, and slots that running turns write to,
                without those that are being copied down to leave
    excess      used beyond the share

Room for a tenant comes first from what leaves at no loss, whosever it is, then from the tenant that uses most,
as far as that is beyond its share, then from its own blocks; the coldest of each. So whoever floods the store
displaces itself, and what a tenant has within its share only goes for its own. The one exception is asked for by
name (`beyond_share`): a turn that could not run otherwise. With one tenant there are no shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.rows import NO_ROW

if TYPE_CHECKING:
    from kvstore.frontier import Frontier
    from kvstore.tenancy import Tenancy

BLOCKS_OF_ONE = 16
"""Taken of one tenant before it is looked again who uses most: that costs a step for each of them."""


class Shares:
    """See the module. `capacity` is the pool's, which tells when it changes."""

    def __init__(self, tenancy: Tenancy, frontier: Frontier, capacity: int) -> None:
        self.capacity = capacity
        self._tenancy = tenancy
        self._frontier = frontier
        self._giver = 0  # who gives room at present, and how many times more before it is looked for again
        self._times_left = 0
        self.present = tenancy.column()  # VALID and FILLING blocks
        self.unheld = tenancy.column()  # VALID blocks that nothing needs
        self.leaving = tenancy.column()  # blocks under way down, which then leave
        self.opened = tenancy.column()  # slots that turns write to or wait with, as of the last count

    @property
    def share(self) -> int:
        """Slots of each active tenant."""
        return self.capacity // max(1, self._tenancy.num_active)

    def used(self, tenant: int) -> int:
        return self.present[tenant] + self.opened[tenant] - self.leaving[tenant]

    def excess(self, tenant: int) -> int:
        """What it uses beyond its share; negative where it uses less."""
        return self.used(tenant) - self.share

    def keeps(self, tenant: int) -> bool:
        """Is what it has here within its share, where there are others?"""
        return self._tenancy.is_shared and self.excess(tenant) <= 0

    def evictable_for(self, tenant: int) -> int:
        """Blocks that could leave, one after the other, to make room for `tenant` and nobody below its share."""
        if not self._tenancy.is_shared:
            return sum(self.unheld)
        share, count = self.share, self.unheld[tenant]
        columns = zip(self.unheld, self.present, self.opened, self.leaving, strict=True)
        for other, (unheld, present, opened, leaving) in enumerate(columns):
            excess = present + opened - leaving - share
            if unheld and excess > 0 and other != tenant:
                count += min(unheld, excess)
        return count

    def coldest(self) -> int:
        """The row that leaves next if room is wanted for nobody in particular; NO_ROW when there is none."""
        if not self._tenancy.is_shared:
            return self._frontier.coldest()
        row = self._frontier.coldest_at_no_loss()
        if row != NO_ROW:
            return row
        tenant = self._largest()
        return NO_ROW if tenant is None else self._frontier.coldest_of(tenant)

    def victim(self, tenant: int, beyond_share: bool = False) -> tuple[int, int]:
        """The row that leaves next to make room for `tenant`, NO_ROW when none may, and how many of its owner's may."""
        if not self._tenancy.is_shared:
            return self._frontier.coldest(), self.capacity
        row = self._frontier.coldest_at_no_loss()
        if row != NO_ROW:
            return row, self.capacity
        owner = self._largest()
        if owner is not None and not (beyond_share or owner == tenant) and self.excess(owner) <= 0:
            owner = tenant if self._frontier.live[tenant] else self._largest(anew=True)
        if owner is None:
            return NO_ROW, 0
        if owner == tenant or beyond_share:
            return self._frontier.coldest_of(owner), self.capacity
        if (excess := self.excess(owner)) <= 0:
            return NO_ROW, 0
        return self._frontier.coldest_of(owner), excess

    def is_owed(self, tenant: int, count: int, owner: int) -> bool:
        """Has `tenant` a right to `count` slots more, in place of blocks of `owner`, whatever those are worth?"""
        return owner != tenant and self._tenancy.is_shared and self.excess(tenant) + count <= 0

    def _largest(self, anew: bool = False) -> int | None:
        """Who uses most, of those of whom a block may leave; looked for once for several blocks, unless `anew`."""
        live = self._frontier.live
        if anew or not self._times_left or not live[self._giver]:
            having = [tenant for tenant, blocks in enumerate(live) if blocks]
            if not having:
                return None
            self._giver, self._times_left = max(having, key=self.used), BLOCKS_OF_ONE
        self._times_left -= 1
        return self._giver

    def check(self, present: dict[int, int], unheld: dict[int, int]) -> None:
        """Raise AssertionError unless the columns say what was counted."""
        for tenant, count in enumerate(self.present):
            assert count == present.get(tenant, 0), f"tenant {tenant} has {present.get(tenant, 0)} blocks, not {count}"
            assert self.unheld[tenant] == unheld.get(tenant, 0), f"unheld blocks of tenant {tenant} are miscounted"
