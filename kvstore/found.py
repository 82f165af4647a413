"""Taking over what an earlier process left on NVMe (pure).

Bulk work, once: a million blocks in seconds. What cannot be used is told to the catalogue: a
block whose parent is not there (no turn could reach it), a slot or a block that comes twice, a
slot that does not exist, an index that does not fit the parent's.

Of each chain the last block counts as the tip of a branch that may lie on NVMe, until a branch
that ends or ended there says otherwise: so a copy stays allowed, and what its session leaves on
NVMe goes when that is closed.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from kvstore.rows import NO_ROW
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.events import FoundBlock
    from kvstore.residency import Residency
    from kvstore.types import BlockKey


def adopt(blocks: Residency, found: Sequence[FoundBlock], owners: Mapping[BlockKey, str]) -> None:
    """Make `found` VALID in NVMe, which is empty, as far as it is of use; the store knows no block yet.

    `owners` has the tenants of chains by their first block.
    """
    rows, nvme = blocks.rows, blocks.pools[Tier.NVME]
    assert not len(rows), "blocks are found before anything else happens"
    find, add, depth, tenants, index_of = rows.find, rows.add, rows.depth, rows.tenant, rows.tenancy.index
    taken = bytearray(nvme.capacity)
    kept: list[tuple[int, int]] = []
    useless: dict[int, BlockKey] = {}
    for key, parent_key, first_block, slot, last in sorted(found, key=itemgetter(2)):
        parent = NO_ROW if parent_key is None else find(parent_key)
        index = 0 if parent == NO_ROW else depth[parent] + 1
        is_reachable = (parent == NO_ROW) == (parent_key is None) and index == first_block
        if not 0 <= slot < nvme.capacity or not is_reachable or taken[slot] or find(key) != NO_ROW:
            useless[slot] = key
            continue
        taken[slot] = 1
        tenant = index_of(owners.get(key, "")) if parent == NO_ROW else tenants[parent]
        row = add(key, parent, tenant)
        rows.last[row] = min(last, rows.now)
        kept.append((row, slot))
    nvme.adopt(kept)
    for slot, key in useless.items():
        is_there = 0 <= slot < nvme.capacity
        if is_there and taken[slot]:
            continue
        blocks.ledger.forget(slot)
        if is_there:
            blocks.ledger.leave(slot, key)
    tails = [row for row, _ in kept if not rows.children[row]]
    blocks.tips.add_found([rows.key(row) for row in tails])
    blocks.totals.found += len(kept)
